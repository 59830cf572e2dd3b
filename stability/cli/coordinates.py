"""Read the words of ``stability.probe what=coordinates``: a sweep's words, for a check without a study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stability.cli.compose import compose_values
from stability.cli.words import Invocation, Word
from stability.config.base import AXES
from stability.config.parse import parse
from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.registry import Registry, near_misses

if TYPE_CHECKING:
    from stability.corpora.base import AbstractCorpus

WHAT = "coordinates"
OWN = ("what", "ckpt")  # words of the probe; all others are a sweep's
DEFAULTS = Invocation.of([
    "mechanism=[sa]", "objective=ar", "model.layers=2", "model.head_width=16", "seeds=3", "steps=5", "lr=1e-2",
    "schedule=constant", "clip_norm=null", "name=coordinates", "hessian=false", "launcher=serial",
])  # fmt: skip
TAKEN = (
    "mechanism", "residual", "norm", "optimizer", "parametrization", "model", "ffn", "position", "linear", "cross",
    "objective", "data", "seeds", "lr", "batch", "steps", "threads", "plugins", "device", "runs_dir", "reports_dir",
)  # fmt: skip
SIZES = ("model.width", "model.layers")
SHORTEST = 3  # steps: changes are judged from here on
TINY = 1e-12  # Adam's ε, far below every gradient


def is_asked(invocation: Invocation) -> bool:
    """Return whether the words ask for the coordinate check."""
    return any(word.key == "what" and word.value == WHAT for word in invocation.words)


def read_recipe(invocation: Invocation) -> SweepSpec:
    """Return the check's recipe: a sweep over one size, without weight decay, with a tiny ε.

    Raises:
        ValueError: a word is invalid or not of the check; one or two lines.
    """
    words = [word for word in invocation.words if word.key not in OWN]
    for word in words:
        if word.group not in TAKEN:
            raise ValueError(f"{word}: what={WHAT} does not take {word.group}; {near_misses(word.group, TAKEN)}")
    typed = {word.key for word in words} | {"lr" for word in words if word.group == "lr"}
    typed |= {"model.head_width" for word in words if word.key == "model.heads"}
    defaults = (word for word in DEFAULTS.words if word.key not in typed)
    spec = parse(SweepSpec, _with_bases(compose_values(SweepSpec, Invocation((*defaults, *words)))))
    _check(spec)
    return spec.model_copy(update={"optimizer": tuple(_undecayed(each, words) for each in spec.optimizer)})


def _with_bases(values: dict[str, Any]) -> dict[str, Any]:
    """Return a sweep's values with the model's width as base of parametrizations without one, if depth varies."""
    widths = [axis["field"] for axis in values.get("vary", []) if axis["field"] == "model.width"]
    given = {
        name: settings | {"base_width": settings["base_width"] or values["model"]["width"]}
        if "base_width" in settings and not widths
        else settings
        for name, settings in values["parametrization"].items()
    }
    return values | {"parametrization": given}


def _check(spec: SweepSpec) -> None:
    fields = [axis.field for axis in spec.vary]
    if len(fields) != 1 or fields[0] not in SIZES or len(spec.vary[0].values) < 2:
        given = f"; given: {', '.join(fields)}" if fields else ""
        raise ValueError(
            f"what={WHAT} compares sizes: give several widths or depths, model.width=[64,128,256,512] or "
            f"model.layers=[2,4,8,16]{given}"
        )
    if spec.lr.edge is not None or spec.lr.scaled or len(spec.lr.rates()) != 1:
        raise ValueError(f"what={WHAT} takes one learning rate for all sizes, e.g. lr=1e-2")
    if spec.steps < SHORTEST:
        raise ValueError(f"steps={spec.steps}: what={WHAT} judges changes from step {SHORTEST} on; give steps=5")
    if spec.seeds < 2:
        raise ValueError(f"seeds={spec.seeds}: what={WHAT} needs an interval over seeds; give seeds=3")


def _undecayed(part: Part, words: list[Word]) -> Part:
    """Return an optimizer without weight decay and with a tiny ε, unless these are typed."""
    if Registry("optimizers").load(part.name).update_family is None:
        return part
    plain = {"weight_decay": 0.0, "epsilon": TINY, "rest_epsilon": TINY}
    typed = {word.key for word in words}
    changes = {
        key: value
        for key, value in plain.items()
        if key in type(part.settings).model_fields and f"optimizer.{part.name}.{key}" not in typed
    }
    return part.model_copy(update={"settings": part.settings.model_copy(update=changes)})


def list_models(spec: SweepSpec) -> tuple[dict[RunSpec, list[dict[str, Any]]], AbstractCorpus]:
    """Return every model to train, with the leading columns of its rows, and the data.

    A model of the base size, where a parametrization is the standard one, has columns for each of them.
    """
    field, models = spec.vary[0].key, {}
    from stability.plan.plan import Plan  # imports torch

    plans = [Plan.of(spec.model_copy(update={"parametrization": (each,)})) for each in spec.parametrization]
    for parametrization, plan in zip(spec.parametrization, plans, strict=True):
        for _, run in plan.points:
            columns = {axis: getattr(run, axis).name for axis in AXES} | {
                "parametrization": parametrization.name,
                "field": field,
                "size": getattr(run.model, field),
                "seed": run.seed,
                "lr": run.lr_peak,
                "batch": run.batch,
                "positions": run.model.positions,
                "objective": run.objective.name,
                "data": run.data.name,
            }
            models.setdefault(run, []).append(columns)
    return models, plans[0].corpus


def model_label(columns: dict[str, Any]) -> str:
    """Return the name of one model for progress lines."""
    names = [columns[axis] for axis in AXES]
    return f"{'/'.join(names)} {columns['field']}={columns['size']} seed={columns['seed']}"
