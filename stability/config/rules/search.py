"""Rules of a sweep's axes: rates, searches and ablations fit each other, the launcher and the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability.config.ablation import ALONE, OF_RECIPE, SINGLE, value_text
from stability.config.base import AXES
from stability.config.scale import STANDARD, check_fields, require_base
from stability.config.search import AshaSpec, PbtSpec, SearchSpec
from stability.primary import PLAIN, QUANTITIES, NamedSeries, find_named, rank_mechanism
from stability.registry import Registry, near_misses

if TYPE_CHECKING:
    from stability.config.sweep import SweepSpec


def ablated_parts_are_swept(sweep: SweepSpec) -> None:
    """Refuse an ablation of a part not selected exactly once, and invalid variants."""
    names = [item.name for axis in AXES for item in getattr(sweep, axis)]
    names += [getattr(sweep, field).name for field in SINGLE]
    known = [name for family in (*AXES.values(), *SINGLE.values()) for name in Registry(family).names()]
    for ablation in sweep.ablate:
        if ablation.part in AXES and len(getattr(sweep, ablation.part)) > 1:
            raise ValueError(
                f"{ablation.path}: this sweep selects several already; add the others to {ablation.part}=[…]"
            )
        if ablation.part in ALONE and ablation.setting:
            held = getattr(sweep, ablation.part)
            named = held[0].name if ablation.part in AXES else getattr(held, "name", "")
            advice = f"; its settings: ablate.{named}.{ablation.setting}=[…]" if named else ""
            raise ValueError(f"{ablation.path}: {ablation.part} varies as a whole, ablate.{ablation.part}=[…]{advice}")
        if ablation.part in (*OF_RECIPE, *ALONE):
            continue
        if ablation.part not in known and ablation.part not in names:
            raise ValueError(
                f"ablate.{ablation.part}: no such part; "
                f"{near_misses(ablation.part, tuple(dict.fromkeys((*names, *OF_RECIPE, *ALONE, *known))))}"
            )
        if names.count(ablation.part) != 1:
            what = "is not among" if ablation.part not in names else "stands for several parts of"
            raise ValueError(f"{ablation.path}: {ablation.part} {what} what this sweep selects ({', '.join(names)})")
    sweep.ablations()


def searches_exclude_each_other(sweep: SweepSpec) -> None:
    """Refuse conflicts between search, lr=edge, lr=scaled and ablate, and equal rates."""
    search, lr = sweep.search, sweep.lr
    if isinstance(search, AshaSpec) and lr.edge is not None:
        raise ValueError("search=asha stops runs early, and lr=edge needs every run to its end; choose one")
    if search is not None and (lr.edge is not None or (sweep.ablate and not isinstance(search, AshaSpec))):
        raise ValueError(
            f"search={search.name} chooses its own points: leave "
            f"{'lr=edge' if lr.edge is not None else 'ablate'} out, or search"
        )
    if lr.scaled and search is not None and search.center_lr is not None:
        raise ValueError(
            "lr.scaled=true gives each optimizer rates of its own, and search.space.lr_peak gives all the same "
            "range; leave one of the two out"
        )
    sweep.rates()


def sizes_vary_alone(sweep: SweepSpec) -> None:
    """Refuse fields that cannot vary, and sizes beside a search or an ablation."""
    fields = [axis.field for axis in sweep.vary]
    check_fields(fields)
    require_base(sweep.parametrization, fields)
    named = next((each.name for each in sweep.parametrization if each.name != STANDARD), None)
    if named is not None and "model.width" in fields and sweep.model.head_width is None:
        raise ValueError(
            f"parametrization={named} with several widths needs heads of one width: add model.head_width=16, in place "
            "of model.heads"
        )
    if named is not None and sweep.lr.scaled:
        raise ValueError(
            f"lr=scaled gives each optimizer rates of its own size, and parametrization={named} compares rates across "
            "sizes; give the rates themselves, e.g. lr=range"
        )
    if sweep.vary and (sweep.search is not None or sweep.ablate):
        other = "ablate" if sweep.search is None else f"search={sweep.search.name}"
        raise ValueError(f"{sweep.vary[0].field}={value_text(sweep.vary[0].values)} varies beside {other}; choose one")


def search_fits_sweep(sweep: SweepSpec) -> None:
    """Refuse a search unfit for the launcher, the schedule or the number of rates."""
    search, num_rates = sweep.search, len(sweep.lr.rates())
    if search is None:
        return
    if isinstance(search, SearchSpec) and search.center_lr is None and num_rates > 1:
        raise ValueError(
            "search: give one learning rate for all points, e.g. lr=1e-3, or a range, "
            "search.space.lr_peak={low:1e-4,high:1e-1}"
        )
    if not isinstance(search, SearchSpec) and num_rates < 2:
        raise ValueError(f"search={search.name} compares learning rates, and there is one; give several: lr=range")
    if isinstance(search, AshaSpec) and sweep.launcher in ("serial", "slurm") and not search.waits(sweep.launcher):
        raise ValueError(
            f"search.synchronous=false needs launcher=ray, and this is launcher={sweep.launcher}; add launcher=ray, or "
            "leave it out"
        )
    if isinstance(search, PbtSpec) and sweep.schedule.name != "constant":
        raise ValueError(
            f"search=pbt finds the schedule itself: schedule={sweep.schedule.name} must be schedule=constant"
        )


def reference_is_swept(sweep: SweepSpec) -> None:
    """Refuse a reference that is no mechanism of the sweep."""
    names = tuple(part.name for part in sweep.mechanism)
    if sweep.reference is not None and sweep.reference not in names:
        raise ValueError(
            f"reference={sweep.reference}: not a mechanism of this sweep; {near_misses(sweep.reference, names)}"
        )


PARTS = ("mechanism", "residual", "norm", "optimizer")  # of a series' name, in its order


def primary_can_be_judged(sweep: SweepSpec) -> None:
    """Refuse a primary claim of an unknown form, on no part of the sweep, or that fits several comparisons."""
    if sweep.primary is None:
        return
    name, _, quantity = sweep.primary.rpartition(".")
    if not name or quantity not in QUANTITIES:
        raise ValueError(
            f"primary={sweep.primary}: give PART.QUANTITY, e.g. primary=sc.window; quantities: {', '.join(QUANTITIES)}"
        )
    series, words = _list_series(sweep), name.split()
    known = tuple(dict.fromkeys(word for each in series for word in each.words()))
    if lacking := next((word for word in words if word not in known), None):
        raise ValueError(f"primary={sweep.primary}: {lacking} is no part of this sweep; {near_misses(lacking, known)}")
    found, compared = find_named(series, words), [each.name for each, is_compared in series.items() if is_compared]
    fitting = [name for name in found if name in compared] if compared else found
    if len(fitting) != 1 and (compared or not found):
        fits = f"fits {len(fitting)} comparisons, of {', '.join(fitting)}" if fitting else "fits no comparison"
        example = (fitting or compared or [each.name for each in series])[0]
        example = f"'primary=\"{example}.{quantity}\"'"
        raise ValueError(f"primary={sweep.primary} {fits}; name one, e.g. {example}")


def _list_series(sweep: SweepSpec) -> dict[NamedSeries, bool]:
    """Return a sweep's series, named as in a report, and whether a report compares each with the reference."""
    names = {axis: list(dict.fromkeys(part.name for part in getattr(sweep, axis))) for axis in PARTS}
    reference = sweep.reference or min(names["mechanism"], key=rank_mechanism)
    variants = {variant.label for _, _, found in sweep.ablations() for variant in found if variant.label}
    series = {}
    for label, choice in sweep.curves():
        parts = {axis: choice[axis].name for axis in PARTS}
        scaled = (
            [] if choice["parametrization"].name == STANDARD else [f"parametrization={choice['parametrization'].name}"]
        )
        shown = [parts[axis] for axis in PARTS if axis == "mechanism" or len(names[axis]) > 1]
        variant = label if label in variants else ""
        is_plain = all(parts[axis] == plain or plain not in names[axis] for axis, plain in PLAIN.items())
        named = NamedSeries(" ".join([*shown, *label.split(), *scaled]), tuple(parts.values()), variant)
        series[named] = bool(variant) or parts["mechanism"] != reference or not is_plain
    return series


OF_SWEEP = (
    reference_is_swept,
    sizes_vary_alone,
    ablated_parts_are_swept,
    primary_can_be_judged,
    searches_exclude_each_other,
    search_fits_sweep,
)
