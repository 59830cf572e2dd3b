"""Settings of training and evaluation: schedule, validation, verdict, checkpoints, guards, logs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stability.config.base import Settings
from stability.config.identity import Label, Place, Since

Precision = Literal["float32", "tf32", "bf16"]


class ScheduleSpec(Settings):
    """Learning rate over the steps, as a factor of its peak.

    Attributes:
        read_by: the settings of each shape.
    """

    read_by: ClassVar[dict[str, tuple[str, ...]]] = {
        "constant": ("warmup_steps", "warmup_share"),
        "linear": ("warmup_steps", "warmup_share", "final_ratio"),
        "cosine": ("warmup_steps", "warmup_share", "final_ratio"),
        "wsd": ("warmup_steps", "warmup_share", "decay_share", "final_ratio"),
    }
    name: Literal["constant", "linear", "cosine", "wsd"] = Field(description="shape of the decay after warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0")
    warmup_share: Annotated[float | None, Since(None)] = Field(
        default=None, gt=0, lt=1, description="the same as a share of all steps, rounded; null: warmup_steps"
    )
    final_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="end of the decay as a share of the peak, reached one step after the last (linear, cosine, wsd)",
    )
    decay_share: Annotated[float, Since(0.2)] = Field(
        default=0.2, gt=0, le=1, description="share of all steps, the last ones, in which wsd decays"
    )

    @model_validator(mode="after")
    def _check_one_warmup(self) -> ScheduleSpec:
        if self.warmup_steps and self.warmup_share is not None:
            raise ValueError(
                f"schedule.warmup_share={self.warmup_share:g} and schedule.warmup_steps={self.warmup_steps} both set "
                "the warm-up; give warmup_steps=0 beside a share"
            )
        return self

    def settle(self, num_steps: int) -> ScheduleSpec:
        """Return the schedule of a run, its warm-up as a number of steps, at least one for a share."""
        if self.warmup_share is None:
            return self
        warmup_steps = max(1, round(self.warmup_share * num_steps))
        return self.model_copy(update={"warmup_steps": warmup_steps, "warmup_share": None})

    def decay_steps(self, num_steps: int) -> int:
        """Return the number of final steps in which wsd decays, at least one."""
        return max(1, round(self.decay_share * num_steps))


class InitSpec(Settings):
    """The checkpoint from which a run continues: parameters, optimizer and step of another run.

    Run id and step identify its content, wherever the file is.
    """

    run: str = Field(pattern=r"^[0-9a-f]{12}$", description="id of the run that wrote it")
    step: int = Field(ge=1, description="its step; the new run begins with the next one")


class WeightsSpec(Settings):
    """The weights of a finished run, used at step 0 with a fresh optimizer.

    Their content (``sha256``) is part of the run's id, their location is not.
    """

    source: Annotated[str, Place()] = Field(
        description=(
            "ckpt:FOLDER, a run's folder (its last checkpoint) or a checkpoint's, or hf:FOLDER, a GPT-2 of Hugging "
            "Face; written init=ckpt:FOLDER"
        )
    )
    partial: bool = Field(
        default=False,
        description=(
            "false: all tensors must match by name and shape; true: matching ones are loaded, all others are "
            "initialised as without init"
        ),
    )
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="sha256 of the weights' file; null: of the file at the beginning of the sweep",
    )
    label: Annotated[str, Label()] = Field(
        default="", description="their name in tables; empty: the run that wrote them and its step"
    )

    @field_validator("source")
    @classmethod
    def _check_kind(cls, value: str) -> str:
        kind, _, place = value.partition(":")
        if kind not in ("ckpt", "hf") or not place:
            raise ValueError(
                f"init={value}: must be ckpt:FOLDER, a run's folder or a checkpoint's (init=ckpt:runs/0123456789ab), "
                "or hf:FOLDER, a GPT-2 of Hugging Face"
            )
        return value

    @property
    def place(self) -> str:
        """The folder in ``source``."""
        return self.source.partition(":")[2]


def parse_weights(value: Any) -> Any:
    """Return a sweep's composed field ``init``, or None if it has no source.

    Raises:
        ValueError: another setting of it is given without a source.
    """
    fields = WeightsSpec.model_fields
    if not isinstance(value, dict) or value.get("source") is not None or value.keys() - fields.keys():
        return value
    given = [key for key, item in value.items() if key != "source" and item != fields[key].default]
    if given:
        raise ValueError(f"init.{given[0]} needs init, e.g. init=ckpt:FOLDER; add it")
    return None


class EvaluationSpec(Settings):
    every_steps: int = Field(
        default=100, ge=1, description="steps between validations; the first and the last step are always validated"
    )
    sequences: int = Field(
        default=256, ge=1, description="held-out sequences per validation, the same ones with the same masks every time"
    )


class VerdictSpec(Settings):
    smoothing_steps: int = Field(
        default=20,
        ge=1,
        description="steps of the exponential mean that smooths the training loss; a spike is a rise of this mean",
    )
    spike_nats: float = Field(
        default=0.5,
        gt=0,
        description=(
            "rise of the smoothed loss above its running minimum that counts as a spike, in a loss with little noise"
        ),
    )
    # It does not affect training. Runs from before this field were judged without it (a noisy loss could count as a
    # spike) and keep their verdict until they are trained again.
    noise_margin: Annotated[float, Since(8.0)] = Field(
        default=8.0,
        ge=0,
        description=(
            "standard deviations of the smoothed loss's own batch noise that a rise must exceed as well to be a "
            "spike; 0: none"
        ),
    )


class CheckpointSpec(Settings):
    every_steps: int = Field(
        default=0, ge=0, description="extra checkpoint cadence; 0: only at the first evaluation and at the end"
    )
    keep_last: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        description="how many of the extra cadence's checkpoints are kept, the newest ones; null: all",
    )
    keep_best: Annotated[int, Since(0)] = Field(
        default=0,
        ge=0,
        description="number of checkpoints kept for their low validation NLL; 0: none",
    )

    @model_validator(mode="after")
    def _check_keep_last(self) -> CheckpointSpec:
        if self.keep_last is not None and not self.every_steps:
            raise ValueError(
                f"checkpoint.keep_last={self.keep_last} needs checkpoint.every_steps, which is 0; give e.g. "
                "checkpoint.every_steps=100"
            )
        return self


class GuardSpec(Settings):
    """Algorithm 1 of *Frankenstein Transformer* (its section 4.7).

    A stability sweep leaves the guards off: they hide divergence.
    """

    post_clip_norm: Annotated[float | None, Since(None)] = Field(
        default=None,
        gt=0,
        description=(
            "largest gradient norm after clipping, below clip_norm; a step with a larger one is bad, like one that is "
            "not finite, and a run that it stops has diverged"
        ),
    )
    check_every: Annotated[int, Since(1)] = Field(
        default=1,
        ge=1,
        description="steps between checks; a step that is validated or may write a checkpoint is always checked",
    )
    on_nonfinite: Annotated[Literal["stop", "skip_step", "restore_last_good"], Since("stop")] = Field(
        default="stop",
        description=(
            "reaction to a bad step: end the run as diverged, skip the step, or restore the last good checkpoint"
        ),
    )
    retries: Annotated[int, Since(0)] = Field(
        default=0,
        ge=0,
        description="number of steps that a run may skip, or of restores; the next bad step ends it as diverged",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> GuardSpec:
        """Refuse retries without a guard, the reverse, and skip_step without checks at every step."""
        if self.on_nonfinite == "stop" and self.retries:
            raise ValueError(
                f"guards.retries={self.retries} needs guards.on_nonfinite=skip_step or restore_last_good; add one, or "
                "leave it out"
            )
        if self.on_nonfinite != "stop" and not self.retries:
            raise ValueError(
                f"guards.on_nonfinite={self.on_nonfinite} needs a number of retries before the run counts as "
                "diverged; add guards.retries=3"
            )
        if self.on_nonfinite == "skip_step" and self.check_every > 1:
            raise ValueError(
                f"guards.check_every={self.check_every} is too rare for skip_step, which needs a check at every step; "
                "give guards.check_every=1, or guards.on_nonfinite=restore_last_good"
            )
        return self


class LogSpec(Settings):
    """Settings of optional logs."""

    gradients: Annotated[int, Since(0)] = Field(
        default=0,
        ge=0,
        description="steps between the gradient statistics of each block of parameters (gradients.jsonl); 0: none",
    )
    activations: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        description=(
            "steps between the statistics of activations, logits and Adam's second moment (activations.jsonl); null: "
            "none"
        ),
    )
    curvature: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        description=(
            "steps between measurements of α_max along the step and of Adam's preconditioned sharpness, on the step's "
            "own batch (edge.jsonl); null: none"
        ),
    )


PROJECT = "stability"  # on Weights & Biases


class WandbSpec(Settings):
    """The settings of ``logger=wandb``."""

    project: str = Field(default=PROJECT, min_length=1, description="project that runs go to")
    entity: str | None = Field(
        default=None, min_length=1, description="user or team that it belongs to; null: the account's default"
    )
    checkpoints: bool = Field(
        default=False, description="whether the last checkpoint of each finished run is sent as an artifact"
    )
