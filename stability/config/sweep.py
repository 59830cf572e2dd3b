"""Spec of a sweep: a product of runs, and how to run it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from stability.config.ablation import ALONE, OF_RECIPE, SINGLE, Ablation, Build, Variant
from stability.config.ablation import read as read_ablations
from stability.config.base import AXES, LONGEST_NAME, STUDY_NAME, check_numbers, validate
from stability.config.curvature import CurvatureSpec
from stability.config.generation import GenerationSpec, parse_generation
from stability.config.identity import Place
from stability.config.launchers import GpuShare, RaySpec, SlurmSpec
from stability.config.parts import CrossOfEach, Part, parse_cross, part, some_parts
from stability.config.rates import LearningRates
from stability.config.rules import OF_SWEEP, check_rules
from stability.config.run import AbstractRecipe, RunSpec
from stability.config.scale import ScaleAxis, list_sizes, read_axes, settle_base
from stability.config.search import AnySearch, convert_halving, parse_search
from stability.config.settled import resolve_auto
from stability.config.training import Precision, WandbSpec, WeightsSpec, parse_weights
from stability.registry import Registry

Logger = Literal["files", "wandb", "tensorboard", "mlflow"]


def _make_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class SweepSpec(AbstractRecipe):
    """A product of parts, learning rates and seeds, and how to run it.

    The parts are mechanisms, residuals, optimizers, norms and parametrizations.
    """

    mechanism: Annotated[tuple[Part, ...], some_parts("mechanisms")] = Field(
        min_length=1, description="sequence mechanisms"
    )
    residual: Annotated[tuple[Part, ...], some_parts("residuals")] = Field(min_length=1, description="residual schemes")
    optimizer: Annotated[tuple[Part, ...], some_parts("optimizers")] = Field(min_length=1, description="optimizers")
    norm: Annotated[tuple[Part, ...], some_parts("norms")] = Field(min_length=1, description="normalisations")
    parametrization: Annotated[tuple[Part, ...], some_parts("parametrizations")] = Field(
        default=("standard",),
        validate_default=True,
        min_length=1,
        description="factors by which initial values, learning rates, decay and ε depend on the size",
    )
    cross: Annotated[Part | CrossOfEach | None, BeforeValidator(parse_cross)] = Field(
        default=None, description="cross mechanism beside each; auto: ca beside attention, cc beside consensus"
    )
    precision: Annotated[tuple[Precision, ...], BeforeValidator(_make_tuple)] = Field(
        default=("float32",),
        min_length=1,
        description="float32, tf32 (CUDA) or bf16; of several the first is the base, the others variants of it",
    )
    lr: LearningRates = Field(description="peak learning rates")
    search: Annotated[AnySearch | None, BeforeValidator(parse_search)] = Field(
        default=None, description="search that chooses among the product's runs, or beyond them; null: none"
    )
    init: Annotated[WeightsSpec | None, BeforeValidator(parse_weights)] = Field(
        default=None, description="finished run whose weights every run starts from; init.source=null: none"
    )
    seeds: int = Field(default=1, ge=1, le=1000, description="number of seeds, counted from first_seed")
    first_seed: int = Field(
        default=0, ge=0, description="lowest seed; above a known study's seeds it repeats that study with new draws"
    )
    ablate: Annotated[tuple[Ablation, ...], BeforeValidator(read_ablations)] = Field(
        default={},
        validate_default=True,
        description="settings that vary one at a time around the base, e.g. ablate.sc.window=[2,4,8], "
        "ablate.clip_norm=[null], ablate.optimizer=[stable_adamw] or ablate.ffn=[moe]",
    )
    vary: Annotated[tuple[ScaleAxis, ...], BeforeValidator(lambda axes: axes or ())] = Field(
        default={},
        validate_default=True,
        description="fields that take several values, each with a curve of its own, e.g. "
        "vary.schedule.warmup_steps=[0,100]; model.width=[32,64], model.layers, steps and batch take lists themselves",
    )
    hessian: bool = Field(default=True, description="whether α_max is measured after each run")
    curvature: CurvatureSpec = Field(default=CurvatureSpec(), description="how α_max is measured")
    generate: Annotated[GenerationSpec | None, BeforeValidator(parse_generation)] = Field(
        default=None,
        description="samples of each run's last checkpoint and their NLL under an oracle; generate.num=null: none",
    )
    name: str = Field(
        pattern=STUDY_NAME, max_length=LONGEST_NAME, description="the study's name, a folder under runs/studies"
    )
    replace: bool = Field(
        default=False,
        description="whether the study of this name reports this command's runs alone; its other runs stay on record",
    )
    runs_dir: Annotated[str, Place()] = Field(default="runs", min_length=1, description="folder of the pool of runs")
    launcher: Literal["auto", "serial", "ray", "slurm"] = Field(
        default="auto",
        description="where the runs are executed; auto: serial if one run of a grid is missing on a CPU, else ray",
    )
    retry: Literal["failed", "none"] = Field(
        default="failed", description="failed: the same command tries failed runs again; none: leaves them"
    )
    cpus_per_trial: float | None = Field(
        default=None, gt=0, description="CPUs per trial (ray); null: as many as it has threads"
    )
    gpus_per_trial: GpuShare = Field(
        default="auto",
        description="share of a GPU per trial (ray); auto: as many trials as fit, by their measured memory",
    )
    devices_per_trial: int = Field(
        default=1,
        ge=1,
        description="devices of one machine that share a run's microbatches; the result is the same bit for bit",
    )
    shard_parameters: bool = Field(
        default=False,
        description="whether these devices share its parameters and its batch instead; the same run up to rounding",
    )
    ray: RaySpec = Field(default=RaySpec(), description="launcher=ray")
    slurm: SlurmSpec = Field(default=SlurmSpec(), description="launcher=slurm")
    logger: Annotated[tuple[Logger, ...], BeforeValidator(_make_tuple)] = Field(
        default=("files",),
        min_length=1,
        description="where metrics go beside the run's files: one, or several in brackets",
    )
    wandb: WandbSpec = Field(default=WandbSpec(), description="logger=wandb")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="mechanism that the report compares the others with; null: sa, else the first one",
    )
    primary: str | None = Field(
        default=None,
        min_length=1,
        description="WORDS.QUANTITY, e.g. sc.window, 'sc width=256.window' or 'qk_norm=rmsnorm.window', in "
        "the words of a report's names: the one claim declared before the runs; Holm corrects all others",
    )
    report: bool = Field(default=True, description="whether reports/<name>.pdf is made at the end")
    reports_dir: Annotated[str, Place()] = Field(default="reports", min_length=1, description="folder of the PDFs")
    tables: Literal["best", "all"] = Field(
        default="best", description="what is printed at the end: the best rates in 25 lines, or every table"
    )
    dry_run: bool = Field(default=False, description="print the plan and train nothing")
    plan_gpu: Literal["a40", "a100", "h100", "h200"] | None = Field(
        default=None,
        description="the GPU that a plan estimates hours and memory for; null: runs are timed here, or for an H100",
    )
    _choices: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _read_older_words(cls, values: Any) -> Any:
        return convert_halving(values) if isinstance(values, dict) and "halving" in values else values

    @model_validator(mode="before")
    @classmethod
    def _read_axes(cls, values: Any) -> Any:
        return read_axes(values) if isinstance(values, dict) else values

    @field_validator("precision")
    @classmethod
    def _check_precisions(cls, value: tuple[Precision, ...]) -> tuple[Precision, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"precision=[{','.join(value)}] names one twice; give each once")
        return value

    @field_validator("logger")
    @classmethod
    def _check_loggers(cls, value: tuple[Logger, ...]) -> tuple[Logger, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"logger=[{','.join(value)}] names one twice; give each once")
        return value

    @model_validator(mode="after")
    def _check_sweep(self) -> SweepSpec:
        check_rules(OF_SWEEP, self)
        return self

    def resolve_auto(self) -> SweepSpec:
        """Return a copy with each ``impl=auto`` resolved (`stability.config.settled`), and reasons in `choices`."""
        changes, choices = resolve_auto(self)
        if not changes:
            return self
        found = validate(SweepSpec, {name: getattr(self, name) for name in SweepSpec.model_fields} | changes)
        found._choices = choices
        return found

    @property
    def choices(self) -> tuple[str, ...]:
        """One line for each ``impl=auto``: the choice and its reason."""
        return self._choices

    @property
    def sinks(self) -> tuple[str, ...]:
        """Names of the metric loggers besides the run's own files."""
        return tuple(name for name in self.logger if name != "files")

    def ablations(self) -> tuple[tuple[Ablation, str, list[Variant]], ...]:
        """Return each ablation with its axis and its variants, including the base's value."""
        held = ((item, *each) for item in self.ablate for each in self._ablated(item))
        return tuple((item, field, item.variants(field, base, build)) for item, field, base, build in held)

    def _ablated(self, item: Ablation) -> Iterator[tuple[str, Any, Build]]:
        """Yield the run's field that an ablation changes, its value in the base, and what makes such a value."""
        if item.part in AXES:
            yield item.part, getattr(self, item.part)[0], partial(part, AXES[item.part])
        elif item.part == "objective":
            yield item.part, self.objective, partial(part, "objectives")
        elif item.part in SINGLE:
            yield item.part, getattr(self, item.part), partial(part, SINGLE[item.part])
        elif item.part in OF_RECIPE:
            base = getattr(self, item.part)
            yield item.part, base, partial(validate, type(base), path=item.part)
        elif item.part in ALONE:
            yield item.part, getattr(self, item.part), partial(self._check_field, item.part)
        else:
            for axis, family in (AXES | SINGLE).items():
                held = getattr(self, axis) if axis in AXES else (getattr(self, axis),)
                yield from ((axis, base, partial(part, family)) for base in held if base.name == item.part)

    def _check_field(self, name: str, value: Any) -> Any:
        """Return a field's value; ValueError with one line if it is invalid."""
        check_numbers(type(self), {name: value})
        return value

    def curves(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Return every kind of run as (variant label, part by axis); the label is "" for a base.

        Each kind has one curve over learning rates. Variants follow their base.
        """
        kinds = itertools.product(*(getattr(self, axis) for axis in AXES))
        bases: list[dict[str, Any]] = [dict(zip(AXES, kind, strict=True)) for kind in kinds]
        return tuple((label, choice) for base in bases for label, choice in self._vary(base))

    def rates(self) -> tuple[tuple[float, ...], ...]:
        """Return the learning rates of each of `curves`, in ascending order.

        With lr=edge they are the first round's, with lr=scaled those of the curve's optimizer. A search over rates has
        a single one, the range's middle.
        """
        center, registry = None if self.search is None else self.search.center_lr, Registry("optimizers")
        return tuple(
            self.lr.rates_of(registry.load(choice["optimizer"].name).lr_reference) if center is None else (center,)
            for _, choice in self.curves()
        )

    def list_seeds(self) -> range:
        """Return every run's seed, once each."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def kinds(self) -> tuple[tuple[str, RunSpec], ...]:
        """Return each of `curves` as (variant label, run).

        The runs have learning rate 1, seed 0 with that seed's own weights, and a placeholder fingerprint.

        Raises:
            ValueError: a run breaks a rule; the first broken rule's message.
        """
        shared = {name: getattr(self, name) for name in AbstractRecipe.model_fields} | {
            "cross": self.cross,
            "data_fingerprint": "unread",
            "lr_peak": 1.0,
            "seed": 0,
        }
        return tuple((label, _make_run(shared | choice)) for label, choice in self.curves())

    def points(
        self, data_fingerprint: str, rates: Sequence[Sequence[float]] | None = None
    ) -> tuple[tuple[str, RunSpec], ...]:
        """Return every run with its variant's label, seeds innermost: a table fills row by row.

        Args:
            data_fingerprint: sha256 of the prepared data.
            rates: learning rates of each of `kinds`; None: the sweep's own (`rates`).
        """
        shared = {"data_fingerprint": data_fingerprint, "weights": self.init}
        each = self.rates() if rates is None else rates
        return tuple(
            (label, kind.model_copy(update=shared | {"lr_peak": float(lr), "seed": seed}))
            for (label, kind), own in zip(self.kinds(), each, strict=True)
            for lr in own
            for seed in self.list_seeds()
        )

    def _vary(self, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield for each size the base, then its other precisions, then the variants of its parts."""
        for size, fields in list_sizes(self, self.vary):
            scaled = base | {"parametrization": self._settle(base["parametrization"], fields)}
            if scaled["parametrization"] is None:
                continue
            for label, choice in self._vary_parts(scaled | fields):
                yield " ".join(filter(None, (size, label))), choice

    def _settle(self, parametrization: Part, fields: dict[str, Any]) -> Part | None:
        """Return a parametrization with its base sizes; at the base size the standard one.

        Args:
            parametrization: as given.
            fields: changed fields of a run of some size.

        Returns:
            None for a run of the base size whose standard one is in the sweep as well.
        """
        # a value that is no number is refused later, with the run that has it
        sizes = {axis.field: [value for value in axis.values if isinstance(value, int)] for axis in self.vary}
        smallest = {field: min(values) for field, values in sizes.items() if values}
        found = settle_base(parametrization, self.model, fields.get("model", {}), smallest)
        is_twice = found.name != parametrization.name and any(each.name == found.name for each in self.parametrization)
        return None if is_twice else found

    def _vary_parts(self, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        first, *others = self.precision
        base = base | {"precision": first}
        yield "", base
        yield from ((f"precision={name}", base | {"precision": name}) for name in others)
        for item, axis, variants in self.ablations():
            if axis not in AXES or axis == item.part or base[axis].name == item.part:
                yield from ((variant.label, base | {axis: variant.part}) for variant in variants if variant.label)

    def expand(self, data_fingerprint: str) -> tuple[RunSpec, ...]:
        """Return every run of the product."""
        return tuple(run for _, run in self.points(data_fingerprint))


def _make_run(values: dict[str, Any]) -> RunSpec:
    """Return a validated run with its numbers of heads and of warm-up steps, whether or not they came from shares."""
    run = validate(RunSpec, values)
    model = run.model.model_copy(update={"head_width": None})
    return run.model_copy(update={"model": model, "schedule": run.schedule.settle(run.steps)})
