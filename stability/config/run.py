"""Spec of a run: one model, trained by one optimizer at one learning rate from one seed.

The model has one mechanism, one residual and one norm.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from stability.config.base import Settings
from stability.config.identity import Bare, Family, Since
from stability.config.model import ModelSpec
from stability.config.parts import CrossOfEach, Part, check_cross, one_part, parse_cross
from stability.config.rules import OF_RECIPE, OF_RUN, check_rules
from stability.config.training import (
    CheckpointSpec,
    EvaluationSpec,
    GuardSpec,
    InitSpec,
    LogSpec,
    Precision,
    ScheduleSpec,
    VerdictSpec,
    WeightsSpec,
)

# Increase it if the same spec would train differently: new runs then get other ids than old ones.
BEHAVIOUR_VERSION = 1


class AbstractRecipe(Settings):
    """Settings shared by a sweep and each of its runs."""

    model: ModelSpec = Field(description="size of the transformer")
    objective: Annotated[Part, one_part("objectives")] = Field(description="what is predicted")
    data: Annotated[Part, one_part("data")] = Field(description="what is read")
    ffn: Annotated[Part, one_part("ffns"), Bare(), Since("mlp")] = Field(
        default="mlp", validate_default=True, description="feed-forward network of each block"
    )
    position: Annotated[Part, one_part("positions"), Bare(), Since("rope")] = Field(
        default="rope", validate_default=True, description="how positions are encoded"
    )
    linear: Annotated[Part, one_part("linears"), Bare(), Since("dense")] = Field(
        default="dense", validate_default=True, description="linear maps of mixers and feed-forward networks"
    )
    schedule: ScheduleSpec = Field(description="learning-rate schedule")
    steps: int = Field(ge=1, description="optimizer steps")
    batch: int = Field(ge=1, le=2**24, description="sequences per step")
    microbatch: Annotated[int | None, Since(None)] = Field(
        default=None,
        ge=1,
        description="sequences whose activations exist at once; a step adds up their gradients; null: all",
    )
    clip_norm: float | None = Field(
        gt=0, description="largest global gradient norm that reaches the optimizer; null: no clipping"
    )
    evaluation: EvaluationSpec = Field(default=EvaluationSpec(), description="validation cadence and size")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="checkpoint cadence")
    verdict: VerdictSpec = Field(default=VerdictSpec(), description="what counts as a spike")
    compile: Annotated[bool, Since(False)] = Field(
        default=False,
        description="whether torch.compile compiles the training step's forward and backward pass; its rounding "
        "differs",
    )
    cuda_graphs: Annotated[bool, Since(False)] = Field(
        default=False,
        description="whether the step's forward and backward pass is a CUDA graph, one launch for all of its kernels",
    )
    guards: Annotated[GuardSpec, Since({})] = Field(
        default=GuardSpec(), description="reaction to a step with numbers that are not finite"
    )
    log: Annotated[LogSpec, Since({})] = Field(default=LogSpec(), description="what is logged besides the metrics")
    threads: int = Field(
        default=1, ge=1, le=4096, description="CPU threads per run; part of a run's identity, since sums depend on it"
    )
    plugins: tuple[str, ...] = Field(default=(), description="importable modules that add parts of your own")

    @property
    def clip_limit(self) -> float:
        """Largest gradient norm that reaches the optimizer; ∞ without clipping."""
        return math.inf if self.clip_norm is None else self.clip_norm

    @model_validator(mode="after")
    def _check_recipe(self) -> AbstractRecipe:
        check_rules(OF_RECIPE, self)
        return self


class RunSpec(AbstractRecipe):
    """All settings of one training run: equal specs train equal models."""

    mechanism: Annotated[Part, one_part("mechanisms")] = Field(description="sequence mechanism")
    cross: Annotated[Part | None, Family("mechanisms"), Since(None)] = Field(
        default=None, description="cross mechanism beside it in every block, which reads the objective's context"
    )
    residual: Annotated[Part, one_part("residuals")] = Field(description="residual scheme")
    optimizer: Annotated[Part, one_part("optimizers")] = Field(
        description="optimizer and its settings but for the learning rate"
    )
    norm: Annotated[Part, one_part("norms"), Bare()] = Field(description="normalisation before each branch")
    parametrization: Annotated[Part, one_part("parametrizations"), Bare(), Since("standard")] = Field(
        default="standard",
        validate_default=True,
        description="factors by which initial values, learning rates, decay and ε depend on the size",
    )
    lr_peak: float = Field(gt=0, description="peak learning rate")
    precision: Annotated[Precision, Since("float32")] = Field(
        default="float32",
        description="of training and validation: float32; tf32 (CUDA); bf16: products in bfloat16, weights in float32",
    )
    seed: int = Field(ge=0, description="seed of initialisation, data order and masks")
    data_fingerprint: str = Field(
        min_length=1, description="sha256 of the prepared data; it replaces their path in the run's id"
    )
    init: Annotated[InitSpec | None, Since(None)] = Field(
        default=None, description="checkpoint of another run from which this one continues; null: none"
    )
    weights: Annotated[WeightsSpec | None, Since(None)] = Field(
        default=None, description="initial weights, a sweep's init; null: drawn by its seed"
    )
    behaviour: int = Field(default=BEHAVIOUR_VERSION, description="version of the training code's behaviour")

    @field_validator("cross", mode="before")
    @classmethod
    def _resolve_cross(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the cross mechanism in place of ``auto``."""
        # lengths are checked here because only here is the settings' key on the command line known
        choice, known = parse_cross(value), info.data
        auto = isinstance(choice, CrossOfEach)
        if isinstance(choice, CrossOfEach) and "mechanism" in known:
            choice = choice.choose_for(known["mechanism"])
        if isinstance(choice, Part) and {"model", "objective"} <= known.keys():
            check_cross(
                choice, known["model"].positions, known["objective"], f"cross.{choice.name}." if auto else "cross."
            )
        return choice

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: WeightsSpec | None) -> WeightsSpec | None:
        if value is not None and value.sha256 is None:
            raise ValueError(
                f"weights.sha256: a value is missing; the content of {value.source} is part of the run's id"
            )
        return value

    @model_validator(mode="after")
    def _check_run(self) -> RunSpec:
        check_rules(OF_RUN, self)
        return self
