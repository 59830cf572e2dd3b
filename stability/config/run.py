"""A run is a model of one mechanism, residual and norm, trained by one optimizer at one learning rate from one seed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from stability.config.base import Settings
from stability.config.computed import check_kernels
from stability.config.cross import CrossOfEach, cross_choice, cross_fits, cross_has_context
from stability.config.identity import Bare, Family, Since
from stability.config.model import ModelSpec
from stability.config.parts import (
    Part,
    one_part,
    read_by,
    require_schedule,
    require_trainable,
)
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
from stability.registry import Registry

# raised when the same spec would train differently: old runs then keep their ids and are not taken for new ones
BEHAVIOUR_VERSION = 1


class AbstractRecipe(Settings):
    """The settings that a sweep and each of its runs share."""

    model: ModelSpec = Field(description="size of the transformer")
    objective: Annotated[Part, one_part("objectives")] = Field(description="what is predicted")
    data: Annotated[Part, one_part("data"), AfterValidator(read_by)] = Field(description="what is read")
    ffn: Annotated[Part, one_part("ffns"), Bare(), Since("mlp")] = Field(
        default="mlp", validate_default=True, description="feed-forward network of each block"
    )
    position: Annotated[Part, one_part("positions"), Bare(), Since("rope")] = Field(
        default="rope", validate_default=True, description="how positions are told apart"
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
    clip_norm: float = Field(gt=0, description="largest global gradient norm that reaches the optimizer")
    evaluation: EvaluationSpec = Field(default=EvaluationSpec(), description="validation cadence and size")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="checkpoint cadence")
    verdict: VerdictSpec = Field(default=VerdictSpec(), description="what counts as a spike")
    compile: Annotated[bool, Since(False)] = Field(
        default=False,
        description="whether torch.compile makes the training step's forward and backward pass; it rounds otherwise",
    )
    guards: Annotated[GuardSpec, Since({})] = Field(
        default=GuardSpec(), description="what a step does whose numbers are not finite"
    )
    log: Annotated[LogSpec, Since({})] = Field(default=LogSpec(), description="what is logged beside the metrics")
    threads: int = Field(
        default=1, ge=1, le=4096, description="CPU threads per run; part of a run's identity, since sums depend on it"
    )
    plugins: tuple[str, ...] = Field(default=(), description="importable modules that add parts of your own")

    @model_validator(mode="after")
    def _warmup_fits(self) -> AbstractRecipe:
        self.schedule.check(self.steps)
        return self

    @model_validator(mode="after")
    def _positions_are_told_once(self) -> AbstractRecipe:
        adds = Registry("positions").load(self.position.name).adds
        if adds and Registry("objectives").load(self.objective.name).embeds_positions:
            raise ValueError(
                f"objective={self.objective.name} adds a learned vector of each position itself, and so does "
                f"position={self.position.name}; choose position=none for it alone, or position=rope"
            )
        return self

    @model_validator(mode="after")
    def _head_can_be_tied(self) -> AbstractRecipe:
        """Refuse a tied head, or a table of another width, where the embedding is no table of the predicted tokens; and
        a tied head that would start at zero."""
        objective, size = Registry("objectives").load(self.objective.name), self.model
        factorised = size.embedding_width is not None
        if (size.tied or factorised) and not objective.embeds_tokens:
            setting = f"embedding_width={size.embedding_width}" if factorised else "tied=true"
            raise ValueError(
                f"model.{setting} needs an objective that predicts the tokens that it embeds, and "
                f"objective={self.objective.name} does not; choose mlm or ar"
            )
        if self.model.tied and objective(self.objective.settings, objective.any_format(2)).condition is not None:
            raise ValueError(
                f"model.tied=true, but with objective={self.objective.name} the head starts at zero, and the embedding "
                "must not; choose mlm or ar"
            )
        return self

    @model_validator(mode="after")
    def _guards_can_act(self) -> AbstractRecipe:
        self.guards.check(self.clip_norm, self.checkpoint)
        return self

    @model_validator(mode="after")
    def _can_be_compiled(self) -> AbstractRecipe:
        if self.compile and getattr(self.objective.settings, "loss_chunk", None) is not None:
            raise ValueError(
                "compile=true does not go together with objective.loss_chunk, whose chunks are computed again in the "
                "backward pass; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _microbatch_is_a_part(self) -> AbstractRecipe:
        if self.microbatch is not None and self.microbatch >= self.batch:
            raise ValueError(
                f"microbatch={self.microbatch} must be below batch={self.batch}, of which it is a part; "
                "microbatch=null takes the batch whole"
            )
        return self


class RunSpec(AbstractRecipe):
    """One training run, completely: equal specs train equal models."""

    mechanism: Annotated[Part, one_part("mechanisms")] = Field(description="sequence mechanism")
    cross: Annotated[Part | None, Family("mechanisms"), Since(None)] = Field(
        default=None, description="cross mechanism beside it in every block, which reads the objective's context"
    )
    residual: Annotated[Part, one_part("residuals")] = Field(description="residual scheme")
    optimizer: Annotated[Part, one_part("optimizers")] = Field(
        description="optimizer and its settings but for the learning rate"
    )
    norm: Annotated[Part, one_part("norms"), Bare()] = Field(description="normalisation before each branch")
    lr_peak: float = Field(gt=0, description="peak learning rate")
    precision: Annotated[Precision, Since("float32")] = Field(
        default="float32",
        description="of training and validation: float32; tf32 (CUDA); bf16: products in bfloat16, weights in float32",
    )
    seed: int = Field(ge=0, description="seed of initialisation, data order and masks")
    data_fingerprint: str = Field(
        min_length=1, description="sha256 of the prepared data, which stands for its path in the run's id"
    )
    init: Annotated[InitSpec | None, Since(None)] = Field(
        default=None, description="checkpoint of another run that this one goes on from; null: it begins anew"
    )
    weights: Annotated[WeightsSpec | None, Since(None)] = Field(
        default=None, description="weights that it starts from at step 0, a sweep's init; null: those of its seed"
    )
    behaviour: int = Field(default=BEHAVIOUR_VERSION, description="version of the training code's behaviour")

    @field_validator("cross", mode="before")
    @classmethod
    def _resolved(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the cross mechanism itself. Its lengths are looked at here, where it is known under which key its
        settings were written."""
        choice, known = cross_choice(value), info.data
        auto = isinstance(choice, CrossOfEach)
        if isinstance(choice, CrossOfEach) and "mechanism" in known:
            choice = choice.beside(known["mechanism"])
        if isinstance(choice, Part) and {"model", "objective"} <= known.keys():
            cross_fits(
                choice, known["model"].positions, known["objective"], f"cross.{choice.name}." if auto else "cross."
            )
        return choice

    @model_validator(mode="after")
    def _mechanism_fits(self) -> RunSpec:
        """Refuse a mechanism that is not to be trained, or does not fit the model's depth and length, the objective's
        direction, or data without edges."""
        direction = Registry("objectives").load(self.objective.name).direction
        require_trainable("mechanism", self.mechanism)
        registry = Registry("mechanisms")
        mechanism, settings = registry.load(self.mechanism.name), self.mechanism.settings
        needed = mechanism.fewest_layers(settings)
        if needed > self.model.layers:
            depth = f"{self.model.layers} layer{'' if self.model.layers == 1 else 's'}"
            raise ValueError(
                f"mechanism.{self.mechanism.name}.pattern has {needed} entries for {depth}; give model.layers={needed} "
                f"or more, a pattern of at most {self.model.layers}, or mechanisms without one, e.g. mechanism=[sa,sc]"
            )
        if direction not in mechanism.supported_directions(settings):
            choices = registry.names(cross=False, trainable=True)
            fitting = [
                name
                for name in choices
                if direction in registry.load(name).supported_directions(registry.load(name).Config())
            ]
            names = f"objective={self.objective.name} needs a {direction} mechanism and {self.mechanism.name} is none"
            raise ValueError(f"{names}; these are: {', '.join(fitting)}, and mix of these")
        if mechanism.needs_edges(settings):
            raise ValueError(
                f"mechanism={self.mechanism.name} with graph=given takes edges= with every batch, and "
                f"data={self.data.name} has none; choose another graph"
            )
        mechanism.check_positions(settings, self.model.positions)
        mechanism.check_heads(settings, self.model.heads)
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunSpec:
        require_schedule(self.optimizer, self.schedule.name)
        return self

    @model_validator(mode="after")
    def _goes_on_beyond_its_beginning(self) -> RunSpec:
        if self.init is not None and self.init.step >= self.steps:
            raise ValueError(f"init.step={self.init.step} must be below steps={self.steps}")
        return self

    @field_validator("weights")
    @classmethod
    def _weights_are_known_by_their_content(cls, value: WeightsSpec | None) -> WeightsSpec | None:
        if value is not None and value.sha256 is None:
            raise ValueError(f"weights.sha256: a value is missing; what {value.source} holds makes the run's id")
        return value

    @model_validator(mode="after")
    def _linear_maps_are_called(self) -> RunSpec:
        """Refuse a kind of linear map that a mechanism would pass by, taking its weight instead."""
        registry = Registry("mechanisms")
        parts = [("mechanism", self.mechanism), *([] if self.cross is None else [("cross", self.cross)])]
        if not Registry("linears").load(self.linear.name).is_affine:
            for key, item in parts:
                if not registry.load(item.name).calls_linears(item.settings):
                    raise ValueError(
                        f"linear={self.linear.name} stands for maps that {key}={item.name} does not call, since it "
                        "takes their weights itself; choose another mechanism, or linear=dense"
                    )
        return self

    @model_validator(mode="after")
    def _kernels_are_not_asked_too_much(self) -> RunSpec:
        """Refuse what the kernels that parts ask for cannot do."""
        check_kernels(self)
        return self

    @model_validator(mode="after")
    def _cross_has_its_context(self) -> RunSpec:
        cross_has_context(self.cross, self.objective)
        if self.cross is not None:
            require_trainable("cross", self.cross)
        return self
