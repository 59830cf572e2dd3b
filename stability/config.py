"""The frozen, hashable specs that everything below the command line works from, and the one place that validates them.

`parse` turns the plain dict that Hydra composed into a `SweepSpec` or `HessianSpec`; `SweepSpec.expand` makes `RunSpec`s; `run_id` names a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from stability.ablation import Ablation, Variant, require_swept
from stability.ablation import read as read_ablations
from stability.entry_specs import HessianSpec, ProbeSpec, ReportSpec, StatusSpec
from stability.guards import CheckpointSpec, GuardSpec, LogSpec
from stability.identity import Family, Label, Place, Since, filled
from stability.identity import run_id as run_id
from stability.launcher_specs import GpuShare, RaySpec, SlurmSpec, check_devices, check_launcher, check_shards
from stability.learning_rates import LearningRates
from stability.parts import CrossOfEach, Part, cross_choice, cross_fits, cross_has_context, one_part, part, read_by, some_parts
from stability.parts import settings_of as settings_of
from stability.protocol import CurvatureSpec
from stability.registry import Registry, add_plugin
from stability.sampling import GenerateSpec, GenerationSpec, asked_for
from stability.search_space import HalvingSpec, SearchSpec, chosen, halving_asked_for
from stability.tokenizer_spec import TokenizerSpec
from stability.validation import STUDY_NAME, Settings, check_heads, checked

BEHAVIOUR_VERSION = 1  # raised when the same spec would train differently: old runs then keep their ids and are not taken for new ones
ABLATED = {"mechanism": "mechanisms", "residual": "residuals", "optimizer": "optimizers"}  # axes whose parts' settings can vary, and their families


def _axis_of_names(value: Any) -> Any:
    if isinstance(value, dict) and (given := [f"{name}={item!r}" for name, item in value.items() if item]):
        raise ValueError(f"norm.{given[0]}: a norm has no settings; leave it out")
    return tuple(value) if isinstance(value, dict) else value


class ModelSpec(Settings):
    """The size of the transformer."""

    name: Annotated[str, Label()] = Field(description="the size's name in tables, e.g. nano")
    layers: int = Field(ge=1, le=10_000, description="number of blocks")
    width: int = Field(ge=2, le=2**20, description="model width d")
    heads: int = Field(ge=1, description="number of heads H")
    positions: int = Field(ge=2, le=2**24, description="sequence length N that is trained on")
    ffn_multiple: float = Field(default=4.0, gt=0, le=1024, description="hidden width of the MLP as a multiple of d")
    qk_bias: float = Field(default=0.0, description="where attention's query and key biases start; equal ones make the first pattern local (RoPE)")
    embedding_std: Annotated[float, Since(1.0)] = Field(default=1.0, gt=0, description="standard deviation that token embeddings start with")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelSpec:
        check_heads(self.heads, self.width, "model.")
        return self


class ScheduleSpec(Settings):
    """Learning rate over the steps, as a factor of its peak."""

    name: Literal["constant", "linear", "cosine"] = Field(description="shape of the decay after warm-up")
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0")
    final_ratio: float = Field(default=0.1, ge=0, le=1, description="what the decay heads for, over the peak: reached one step after the last (linear, cosine)")


class EvaluationSpec(Settings):
    every_steps: int = Field(default=100, ge=1, description="steps between validations; the first and the last step are always validated")
    sequences: int = Field(default=256, ge=1, description="held-out sequences per validation, the same ones with the same masks every time")


class VerdictSpec(Settings):
    smoothing_steps: int = Field(default=20, ge=1, description="steps of the exponential mean of the training loss that a spike is judged on")
    spike_nats: float = Field(
        default=0.5, gt=0, description="rise of the smoothed loss above its running minimum that counts as a spike, in a loss with little noise"
    )
    # Trains nothing else: a run older than it was judged without (a noisy loss then passed for a spike), and keeps that verdict until it is trained again.
    noise_margin: Annotated[float, Since(8.0)] = Field(
        default=8.0, ge=0, description="standard deviations of the smoothed loss's own batch noise that a rise must exceed as well to be a spike; 0: none"
    )


class AbstractRecipe(Settings):
    """What a sweep and each of its runs share."""

    model: ModelSpec = Field(description="size of the transformer")
    objective: Annotated[Part, one_part("objectives")] = Field(description="what is predicted")
    data: Annotated[Part, one_part("data"), AfterValidator(read_by)] = Field(description="what is read")
    schedule: ScheduleSpec = Field(description="learning-rate schedule")
    steps: int = Field(ge=1, description="optimizer steps")
    batch: int = Field(ge=1, le=2**24, description="sequences per step")
    microbatch: Annotated[int | None, Since(None)] = Field(
        default=None, ge=1, description="sequences whose activations exist at once; a step adds up their gradients; null: all"
    )
    clip_norm: float = Field(gt=0, description="largest global gradient norm that reaches the optimizer")
    evaluation: EvaluationSpec = Field(default=EvaluationSpec(), description="validation cadence and size")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="checkpoint cadence")
    verdict: VerdictSpec = Field(default=VerdictSpec(), description="what counts as a spike")
    guards: Annotated[GuardSpec, Since({})] = Field(default=GuardSpec(), description="what a step does whose numbers are not finite")
    log: Annotated[LogSpec, Since({})] = Field(default=LogSpec(), description="what is logged beside the metrics")
    threads: int = Field(default=1, ge=1, le=4096, description="CPU threads per run; part of a run's identity, since sums depend on it")
    plugins: tuple[str, ...] = Field(default=(), description="importable modules that add parts of your own")

    @model_validator(mode="after")
    def _warmup_fits(self) -> AbstractRecipe:
        if self.schedule.warmup_steps >= self.steps and self.schedule.warmup_steps > 0:
            raise ValueError(f"schedule.warmup_steps={self.schedule.warmup_steps} must be below steps={self.steps}")
        return self

    @model_validator(mode="after")
    def _guards_can_act(self) -> AbstractRecipe:
        self.guards.check(self.clip_norm, self.checkpoint)
        return self

    @model_validator(mode="after")
    def _microbatch_is_a_part(self) -> AbstractRecipe:
        if self.microbatch is not None and self.microbatch >= self.batch:
            raise ValueError(f"microbatch={self.microbatch} must be below batch={self.batch}, of which it is a part; microbatch=null takes the batch whole")
        return self


class RunSpec(AbstractRecipe):
    """One training run, completely: equal specs train equal models."""

    mechanism: Annotated[Part, one_part("mechanisms")] = Field(description="sequence mechanism")
    cross: Annotated[Part | None, Family("mechanisms"), Since(None)] = Field(
        default=None, description="cross mechanism beside it in every block, which reads the objective's context"
    )
    residual: Annotated[Part, one_part("residuals")] = Field(description="residual scheme")
    optimizer: Annotated[Part, one_part("optimizers")] = Field(description="optimizer and its settings but for the learning rate")
    norm: Literal["layernorm", "rmsnorm"] = Field(description="normalisation before each branch")
    lr_peak: float = Field(gt=0, description="peak learning rate")
    seed: int = Field(ge=0, description="seed of initialisation, data order and masks")
    data_fingerprint: str = Field(min_length=1, description="sha256 of the prepared data, which stands for its path in the run's id")
    behaviour: int = Field(default=BEHAVIOUR_VERSION, description="version of the training code's behaviour")

    @field_validator("cross", mode="before")
    @classmethod
    def _resolved(cls, value: Any, info: ValidationInfo) -> Any:
        """The cross mechanism itself. Its lengths are looked at here, where it is known under which key its settings were written."""
        choice, known = cross_choice(value), info.data
        auto = isinstance(choice, CrossOfEach)
        if isinstance(choice, CrossOfEach) and "mechanism" in known:
            choice = choice.beside(known["mechanism"])
        if isinstance(choice, Part) and {"model", "objective"} <= known.keys():
            cross_fits(choice, known["model"].positions, known["objective"], f"cross.{choice.name}." if auto else "cross.")
        return choice

    @model_validator(mode="after")
    def _mechanism_fits(self) -> RunSpec:
        direction = Registry("objectives").load(self.objective.name).direction
        registry = Registry("mechanisms")
        mechanism, settings = registry.load(self.mechanism.name), self.mechanism.settings
        needed = mechanism.fewest_layers(settings)
        if needed > self.model.layers:
            raise ValueError(f"mechanism.{self.mechanism.name}.pattern has {needed} entries for {self.model.layers} layers; give at most {self.model.layers}")
        if direction not in mechanism.supported_directions(settings):
            choices = registry.names(cross=False)
            fitting = [name for name in choices if direction in registry.load(name).supported_directions(registry.load(name).Config())]
            names = f"objective={self.objective.name} needs a {direction} mechanism and {self.mechanism.name} is none"
            raise ValueError(f"{names}; these are: {', '.join(fitting)}")
        if mechanism.needs_edges(settings):
            raise ValueError(
                f"mechanism={self.mechanism.name} with graph=given takes edges= with every batch, and data={self.data.name} has none; choose another graph"
            )
        mechanism.check_positions(settings, self.model.positions)
        return self

    @model_validator(mode="after")
    def _cross_has_its_context(self) -> RunSpec:
        cross_has_context(self.cross, self.objective)
        return self


class SweepSpec(AbstractRecipe):
    """A product of mechanisms, residuals, optimizers, norms, learning rates and seeds, and how to run it."""

    mechanism: Annotated[tuple[Part, ...], some_parts("mechanisms")] = Field(min_length=1, description="sequence mechanisms")
    residual: Annotated[tuple[Part, ...], some_parts("residuals")] = Field(min_length=1, description="residual schemes")
    optimizer: Annotated[tuple[Part, ...], some_parts("optimizers")] = Field(min_length=1, description="optimizers")
    norm: Annotated[tuple[Literal["layernorm", "rmsnorm"], ...], BeforeValidator(_axis_of_names)] = Field(min_length=1, description="normalisations")
    cross: Annotated[Part | CrossOfEach | None, BeforeValidator(cross_choice)] = Field(
        default=None, description="cross mechanism beside each; auto: ca beside attention, cc beside consensus"
    )
    lr: LearningRates = Field(description="peak learning rates")
    search: Annotated[SearchSpec | None, BeforeValidator(chosen)] = Field(default=None, description="fields that vary beside the product; null: none")
    halving: Annotated[HalvingSpec | None, BeforeValidator(halving_asked_for)] = Field(default=None, description="runs left early; reduction=null: none")
    seeds: int = Field(ge=1, le=1000, description="number of seeds, counted from 0")
    ablate: Annotated[tuple[Ablation, ...], BeforeValidator(read_ablations)] = Field(
        default=(), description="settings of parts that vary one at a time around the base, e.g. ablate.sc.window=[2,4,8]"
    )
    hessian: bool = Field(default=True, description="whether α_max is measured after each run")
    curvature: CurvatureSpec = Field(default=CurvatureSpec(), description="how α_max is measured")
    generate: Annotated[GenerationSpec | None, BeforeValidator(asked_for)] = Field(
        default=None, description="samples of each run's last checkpoint and their NLL under an oracle; generate.num=null: none"
    )
    name: str = Field(pattern=STUDY_NAME, max_length=100, description="the study's name, a folder under runs/studies")
    runs_dir: Annotated[str, Place()] = Field(min_length=1, description="folder of the pool of runs")
    launcher: Literal["serial", "ray", "slurm"] = Field(description="what the runs are handed to")
    retry: Literal["failed", "none"] = Field(default="failed", description="failed: the same command tries failed runs again; none: leaves them")
    cpus_per_trial: float | None = Field(default=None, gt=0, description="CPUs that one trial holds (ray); null: as many as it has threads")
    gpus_per_trial: GpuShare = Field(default="auto", description="share of a GPU that one trial holds (ray); auto: as many as fit, by their measured memory")
    devices_per_trial: int = Field(default=1, ge=1, description="devices of one machine that share a run's microbatches, which changes no bit of it")
    shard_parameters: bool = Field(default=False, description="whether they share its parameters and its batch instead; the same run up to rounding")
    ray: RaySpec = Field(default=RaySpec(), description="launcher=ray")
    slurm: SlurmSpec = Field(default=SlurmSpec(), description="launcher=slurm")
    logger: Literal["files", "wandb"] = Field(description="where metrics go beside the run's files")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    report: bool = Field(default=True, description="whether reports/<name>.pdf is made at the end")
    reports_dir: Annotated[str, Place()] = Field(default="reports", min_length=1, description="folder of the PDFs")
    dry_run: bool = Field(default=False, description="print the plan and train nothing")

    @model_validator(mode="after")
    def _devices_have_work(self) -> SweepSpec:
        check_launcher(self.launcher, {"ray": self.ray, "slurm": self.slurm}, self.cpus_per_trial, self.gpus_per_trial)
        whole = [item.name for item in self.optimizer if not Registry("optimizers").load(item.name).elementwise]
        parts = check_shards(self.devices_per_trial, self.batch, whole) if self.shard_parameters else -(-self.batch // (self.microbatch or self.batch))
        check_devices(self.devices_per_trial, self.batch, parts, self.slurm.gpus)
        return self

    @model_validator(mode="after")
    def _ablations_fit(self) -> SweepSpec:
        swept = {axis: [item.name for item in getattr(self, axis)] for axis in ABLATED}
        require_swept(self.ablate, swept, [name for family in ABLATED.values() for name in Registry(family).names()])
        self.ablations()
        return self

    @model_validator(mode="after")
    def _one_way_of_searching(self) -> SweepSpec:
        if self.search is not None and (self.lr.edge is not None or self.ablate):
            raise ValueError(f"search={self.search.name} chooses its own points: leave {'lr=edge' if self.lr.edge is not None else 'ablate'} out, or search")
        if self.halving is not None and (self.search is not None or self.lr.edge is not None):
            raise ValueError("halving leaves runs of a grid early, search and lr=edge need every run to its end; choose one")
        if self.search is not None and self.search.center_lr is None and len(self.lr.rates()) > 1:
            raise ValueError("search: one learning rate is needed that all points have, e.g. lr=1e-3, or a range search.space.lr_peak={low:1e-4,high:1e-1}")
        return self

    def ablations(self) -> tuple[tuple[Ablation, str, list[Variant]], ...]:
        """Each ablation with its axis and its variants, the base's own value among them."""
        axes = [(item, axis, base) for item in self.ablate for axis in ABLATED for base in getattr(self, axis) if base.name == item.part]
        return tuple((item, axis, item.variants(axis, base, partial(part, ABLATED[axis]))) for item, axis, base in axes)

    def curves(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Every kind of run with its variant's label ("" for the base), variants of a base beside it: what has a curve against the learning rate."""
        kinds = itertools.product(self.mechanism, self.residual, self.optimizer, self.norm)
        bases: list[dict[str, Any]] = [dict(zip(("mechanism", "residual", "optimizer", "norm"), kind, strict=True)) for kind in kinds]
        return tuple((label, choice) for base in bases for label, choice in self._around(base))

    def points(self, data_fingerprint: str, rates: Sequence[Sequence[float]] | None = None) -> tuple[tuple[str, RunSpec], ...]:
        """Every run with its variant's label, seeds innermost: a table fills row by row. ``rates``: those of each of `curves`; None: the sweep's own,
        which with lr=edge are those of the first round; a search has one."""
        shared = {name: getattr(self, name) for name in AbstractRecipe.model_fields} | {"cross": self.cross, "data_fingerprint": data_fingerprint}
        curves, center = self.curves(), None if self.search is None else self.search.center_lr
        each = rates if rates is not None else [self.lr.rates() if center is None else (center,)] * len(curves)
        numbers = [[{"lr_peak": lr, "seed": seed} for lr in own for seed in range(self.seeds)] for own in each]
        return tuple((label, checked(RunSpec, shared | choice | number)) for (label, choice), own in zip(curves, numbers, strict=True) for number in own)

    def _around(self, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The base, then each variant of the parts that stand in it."""
        yield "", base
        for item, axis, variants in self.ablations():
            if base[axis].name == item.part:
                yield from ((variant.label, base | {axis: variant.part}) for variant in variants if variant.label)

    def expand(self, data_fingerprint: str) -> tuple[RunSpec, ...]:
        """Every run of the product."""
        return tuple(run for _, run in self.points(data_fingerprint))


SPECS = {"sweep": SweepSpec, "hessian": HessianSpec, "report": ReportSpec, "status": StatusSpec, "probe": ProbeSpec, "generate": GenerateSpec}
SPECS["train_tokenizer"] = TokenizerSpec


def parse(kind: str, values: dict[str, Any]) -> Any:
    """The validated spec of an entry. Plugins named in it are made known first. Errors: ``ValueError``, at most two lines."""
    listed = values.get("plugins") or ()
    for module in listed if isinstance(listed, list | tuple) else ():  # what is no list is refused with the rest
        add_plugin(module)
    return checked(SPECS[kind], values)


def parse_run(values: dict[str, Any]) -> RunSpec:
    """The `RunSpec` behind a ``spec.json`` (or a checkpoint's manifest), plugins included. A field younger than the file has its neutral value."""
    for module in values.get("plugins") or ():
        add_plugin(module)
    return checked(RunSpec, filled(values, RunSpec))
