"""Estimate how the best learning rate moves with the size, and predict it at a larger one.

A size is the run's width, layers, steps and batch. A group is a mechanism with its parametrization and other settings;
it has one curve of NLL against rate for each size.

- Best rate of a curve: for each seed the vertex of a parabola in log10 LR through its lowest NLL and up to two
  neighbours on each side; the mean over seeds.
- Law: log10 of the best rate is linear in log2 of each size that varies. Least squares, weighted by the curves'
  errors.
- Back-test: the law of all sizes but the largest, at the largest, beside rules that need no law.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analysis.numbers.at_best_rate import Numbers, numbers_of, sensitivity
from analysis.numbers.best_rates import Best, find_best, find_regret
from analysis.numbers.comparison import Bests, compare_lowest
from analysis.numbers.learning import LITTLE_SHARE
from analysis.numbers.size_laws import AXES, Law, Size, determines_product, find_extra_terms, fit_law
from analysis.numbers.spread import LEVEL, Spread, holm
from analysis.numbers.windows import Window, outcomes, windows
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.reference import unlearned
from analysis.words import join_words

BASES = {"width": "base_width", "layers": "base_depth"}  # settings of a parametrization
PLACES = {"width": "at width {}", "layers": "with {} layers", "steps": "after {} steps", "batch": "at batch {}"}
STANDARD = "standard"
LAW, SMALLEST, LAST = "law", "smallest size’s rate", "last size’s rate"  # rules of the back-test
WIDEST_DECADES = 0.5  # half-width of a useful interval
LARGEST_REGRET = 0.01  # share of the NLL
LEAST_GAIN = 0.3  # nats beyond token frequencies
FEWEST_SIZES = 3
# Published exponents of the best rate. Step Law (Li et al. 2025, arXiv:2503.04715): N^-0.713, N as width² · layers.
# Bjorck et al. 2024 (arXiv:2409.19913): D^-0.32 at a fixed batch. Malladi et al. 2022 (arXiv:2205.10287): √batch.
PUBLISHED = {"width": -1.426, "layers": -0.713, "steps": -0.32, "batch": 0.5}
PUBLISHED_NAMES = {"width": "Step Law", "layers": "Step Law", "steps": "steps^−0.32", "batch": "√batch"}


@dataclass(frozen=True)
class Curve:
    """One group's NLL against learning rate at one size.

    Attributes:
        size: width, layers, steps, batch.
        series: name in its study.
        table: NLL, learning rate × seed; ∞ if diverged.
        best: best rate.
        window: stable window of the median line; None without a finite run.
        gain: distance of the best NLL below the loss without learning (`unlearned`).
        numbers: of the series, at its best measured rate.
        study: supplies the runs.
    """

    size: Size
    series: str
    table: Frame
    best: Best
    window: Window | None
    gain: float
    numbers: Numbers
    study: Study

    @property
    def lack_of_gain(self) -> str:
        """Why the model learned too little for a law; "" if enough. Of a loss that is no NLL a share is asked for."""
        if wording.words(self.study).in_nats:
            few = f"the model learned {max(self.gain, 0):.2f} nats beyond token frequencies; at least {LEAST_GAIN} are"
            return f"{few} asked for" if self.gain < LEAST_GAIN else ""
        start = unlearned(self.study, self.series)
        few = f"the model's loss lies {100 * max(self.gain, 0) / start.nll:.1f} % below the {start.nll_name}"
        return f"{few}; at least {100 * LITTLE_SHARE:g} % are asked for" if self.gain < LITTLE_SHARE * start.nll else ""

    @property
    def best_nll(self) -> float:
        """Lowest median NLL over the measured rates."""
        return self.window.best_nll if self.window else math.inf

    @property
    def edge(self) -> float:
        """log10 of the stable window's upper edge; NaN if the sweep ends inside."""
        return math.nan if self.window is None or self.window.open_high else math.log10(self.window.high.lr)

    @property
    def ratio(self) -> float:
        """log10 of α_max / α at the best measured rate; NaN if not measured."""
        value = self.numbers.ratio.median if self.numbers.ratio.n else math.nan
        return math.log10(value) if value > 0 and math.isfinite(value) else math.nan

    def regret(self, log_lr: float) -> float:
        """Return the nats lost at a rate, median over seeds: NLL there, interpolated in log10 LR, less the lowest.

        ∞ beside a diverged rate; NaN outside the swept rates.
        """
        found = [find_regret(self.table.index, self.table[seed], log_lr) for seed in self.table]
        known = [each for each in found if not math.isnan(each)]
        return float(np.median(known)) if known else math.nan

    def sensitivity(self, rates: Sequence[float]) -> Spread:
        """Return S over some rates, in nats (`at_best_rate.sensitivity`)."""
        return sensitivity(self.study, self.series, rates).spread


@dataclass(frozen=True)
class Trial:
    """A rule's rate for a size whose truth is known.

    Attributes:
        rule: its name.
        log_lr: the rate.
        half: half-width of its interval; ∞ without one.
        error: log10 of the rate over the true best one; NaN if that is open.
        regret: nats lost at the rate, median over seeds.
        share: regret as a share of the lowest NLL.
    """

    rule: str
    log_lr: float
    half: float
    error: float
    regret: float
    share: float

    @property
    def is_inside(self) -> bool:
        """Whether the truth lies in the interval."""
        return abs(self.error) <= self.half


@dataclass(frozen=True)
class Prediction:
    """What a group's law says of a size.

    Attributes:
        size: the target.
        log_lr, half: log10 of the best rate, and half its 80 % interval; NaN without a law.
        edge: log10 of the largest rate within 5 % of the best NLL; NaN if unknown.
        ratio: α_max / α at the predicted rate; NaN if unknown.
        reasons: why it must not be relied on; () for a prediction.
    """

    size: Size
    log_lr: float
    half: float
    edge: float
    ratio: float
    reasons: tuple[str, ...]

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the interval, as rates."""
        return 10 ** (self.log_lr - self.half), 10 ** (self.log_lr + self.half)


@dataclass(frozen=True)
class Group:
    """The curves of one mechanism with its settings, by ascending size."""

    name: str
    curves: tuple[Curve, ...]

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(curve.size for curve in self.curves)

    @property
    def axes(self) -> tuple[int, ...]:
        """Places in `AXES` of the sizes that vary."""
        return tuple(axis for axis in range(len(AXES)) if len({size[axis] for size in self.sizes}) > 1)

    @cached_property
    def law(self) -> Law | None:
        """The law of the best rates; None if one is open."""
        return fit_law_of(self.curves)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """The back-test: the law of the smaller sizes at the largest one, then the rules without a law."""
        *smaller, largest = self.curves
        if len(smaller) < 2 or any(curve.best.open for curve in smaller):
            return ()
        law = fit_law_of(smaller)
        found = [] if law is None else [(LAW, *law.predict(largest.size))]
        first, last = smaller[0], smaller[-1]
        doublings = {axis: math.log2(largest.size[axis] / last.size[axis]) for axis in self.axes}
        halved = last.best.log_lr - math.log10(2) * sum(doublings.values())
        published = sum(PUBLISHED[AXES[axis]] * math.log10(2) * each for axis, each in doublings.items())
        found += [
            (SMALLEST, first.best.log_lr, math.inf),
            (LAST, last.best.log_lr, math.inf),
        ]
        if AXES.index("batch") not in self.axes:
            found.append(("halve per doubling", halved, math.inf))
        names = join_words(dict.fromkeys(PUBLISHED_NAMES[AXES[axis]] for axis in self.axes))
        found.append((names, last.best.log_lr + published, math.inf))
        return tuple(_try(largest, *each) for each in found)

    @property
    def law_trial(self) -> Trial | None:
        """The law's own trial; None if the smaller sizes make no law."""
        return next((trial for trial in self.trials if trial.rule == LAW), None)

    def predict(self, target: Mapping[str, float]) -> Prediction:
        """Return the law's word on a size.

        Args:
            target: values by axis; the others as at the largest size.
        """
        largest = self.curves[-1].size
        size = tuple(float(target.get(axis, largest[place])) for place, axis in enumerate(AXES))
        law = self.law
        log_lr, half = law.predict(size) if law else (math.nan, math.nan)
        edge = _extrapolate(self.curves, [curve.edge for curve in self.curves], size)
        ratio = 10 ** _extrapolate(self.curves, [curve.ratio for curve in self.curves], size)
        reasons = tuple(self._doubts(size, half))
        return Prediction(size, log_lr, half, edge if edge > log_lr else math.nan, ratio, reasons)

    def predict_largest(self) -> Prediction:
        """Return what the smaller sizes say of the largest one."""
        return Group(self.name, self.curves[:-1]).predict(dict(zip(AXES, self.curves[-1].size, strict=True)))

    def _doubts(self, size: Size, half: float) -> Iterable[str]:
        """Yield the reasons against a prediction."""
        for place, axis in enumerate(AXES):
            if place not in self.axes and size[place] != self.curves[-1].size[place]:
                swept = _number(self.curves[-1].size[place])
                yield f"the sweep has {axis} {swept} alone, the target {_number(size[place])}"
            elif place in self.axes and len({each[place] for each in self.sizes}) < FEWEST_SIZES:
                number = len({each[place] for each in self.sizes})
                yield f"{number} values of {axis} make no law; {FEWEST_SIZES} are needed"
        for curve in self.curves:
            if curve.best.open:
                yield f"{self.locate(curve.size)} {curve.best.open}"
            elif curve.lack_of_gain:
                yield f"{self.locate(curve.size)} {curve.lack_of_gain}"
        if self.law is None:
            if not any(curve.best.open for curve in self.curves) and self.axes:
                yield "sizes that grow together cannot be told apart"
            return
        yield from self._doubt_trials()
        for place in self.axes:
            low, high = min(each[place] for each in self.sizes), max(each[place] for each in self.sizes)
            if size[place] > high * high / low or size[place] < low * low / high:
                yield (
                    f"{AXES[place]} {_number(size[place])} is further from {_number(high)} than the sweep spans "
                    f"({_number(low)} to {_number(high)})"
                )
        if WIDEST_DECADES < half < math.inf:  # without an interval there are too few sizes: said above
            yield f"the interval is ±{half:.2f} decades, wider than ±{WIDEST_DECADES}"
        best = [each.best for each in self.curves]
        for one, other in find_extra_terms(self.sizes, [each.log_lr for each in best], [each.error for each in best]):
            if one == other:
                yield f"the best rates bend away from a straight line of {AXES[one]}"
            else:
                yield f"the effects of {AXES[one]} and {AXES[other]} depend on each other"

    def _doubt_trials(self) -> Iterable[str]:
        """Yield where the law of the smaller sizes missed a known one or was costly there."""
        trial = self.law_trial
        tried = [(self.curves[-1], trial)] if trial else []
        for curve, trial in [*tried, *self.axis_trials]:
            place = self.locate(curve.size)
            if math.isfinite(trial.half) and not trial.is_inside:
                yield (
                    f"from the smaller sizes the law misses the best rate {place} by {trial.error:+.2f} decades (80 % "
                    f"interval ±{trial.half:.2f})"
                )
            if math.isinf(trial.share):
                yield f"the law of the smaller sizes leads to diverged runs {place}"
            elif trial.share > LARGEST_REGRET:
                yield (
                    f"the law of the smaller sizes costs {100 * trial.share:.1f} % of the NLL {place}, more than "
                    f"{100 * LARGEST_REGRET:.0f} %"
                )

    @cached_property
    def axis_trials(self) -> tuple[tuple[Curve, Trial], ...]:
        """With two axes, for each the law without its largest value, tried at the largest size that has it."""
        found = []
        for axis in self.axes if len(self.axes) > 1 else ():
            top = max(size[axis] for size in self.sizes)
            smaller = [curve for curve in self.curves if curve.size[axis] < top]
            held_out = [curve for curve in self.curves if curve.size[axis] == top][-1]
            law = fit_law_of(smaller)
            if law is not None and axis in law.axes:
                found.append((held_out, _try(held_out, LAW, *law.predict(held_out.size))))
        return tuple(found)

    @property
    def varies_apart(self) -> bool:
        """Whether two sizes vary, and no runs tell how the effects of both depend on each other."""
        return not determines_product(self.sizes)

    def describe(self, size: Size) -> str:
        """Return a size's varying values, e.g. ``"width 64"``."""
        return join_words(f"{AXES[axis]} {_number(size[axis])}" for axis in self.axes)

    def locate(self, size: Size) -> str:
        """Return a size's varying values as the end of a clause, e.g. ``"at width 64 and after 800 steps"``."""
        return locate({AXES[axis]: size[axis] for axis in self.axes})

    def list_common_rates(self) -> list[float]:
        """Return the rates that every size has."""
        return sorted(set.intersection(*(set(curve.table.index) for curve in self.curves)))

    def regrets(self) -> list[list[float]]:
        """Return the transfer matrix: nats lost at each column's size with the best rate of each row's."""
        return [[there.regret(here.best.log_lr) for there in self.curves] for here in self.curves]


def fit_law_of(curves: Sequence[Curve]) -> Law | None:
    """Return the law of some curves' best rates; None if one is open."""
    best = [curve.best for curve in curves]
    if any(each.open for each in best):
        return None
    resolution = max(each.spacing for each in best)
    return fit_law([curve.size for curve in curves], [each.log_lr for each in best], [each.error for each in best],
                   resolution)  # fmt: skip


def _extrapolate(curves: Sequence[Curve], values: Sequence[float], size: Size) -> float:
    law = fit_law([curve.size for curve in curves], values, [1.0] * len(values), 0.0)
    return law.predict(size)[0] if law else math.nan


def _try(largest: Curve, rule: str, log_lr: float, half: float) -> Trial:
    regret = largest.regret(log_lr)
    return Trial(rule, log_lr, half, log_lr - largest.best.log_lr, regret, regret / abs(largest.best_nll))


def locate(sizes: Mapping[str, float]) -> str:
    """Return sizes, by their axes, as the end of a clause, e.g. ``"with 32 layers"``."""
    found = (PLACES[axis].format(_number(value)).removesuffix("s" * (value == 1)) for axis, value in sizes.items())
    return join_words(found)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


@dataclass(frozen=True)
class Compared:
    """Lowest NLLs of two groups at one size, paired over seeds.

    Attributes:
        reference: the first group.
        other: another one.
        size: the size.
        bests: other's NLLs against the reference's.
        is_decided: whether they differ at the 5 % level, after Holm's correction over all sizes and groups.
    """

    reference: Group
    other: Group
    size: Size
    bests: Bests
    is_decided: bool


def compare_groups(groups: Sequence[Group]) -> list[Compared]:
    """Return the other groups' lowest NLLs, over their own rates, against the first's, by ascending size.

    Left out: sizes that one lacks, where both have the same runs, or where one's best rate is open.
    """
    if not groups:
        return []
    reference, *others = groups
    known = {curve.size: curve for curve in reference.curves if not curve.best.open}
    found: list[tuple[Group, Size, Bests]] = []
    for other in others:
        for curve in other.curves:
            beside = known.get(curve.size)
            if beside is None or curve.best.open or (beside.study, beside.series) == (curve.study, curve.series):
                continue
            bests = compare_lowest(*(each.table.min().to_frame().T for each in (curve, beside)))
            if bests is not None:
                found.append((other, curve.size, bests))
    tested = [place for place, (*_, bests) in enumerate(found) if not math.isnan(bests.result.p)]
    p_of = dict(zip(tested, holm([found[place][2].result.p for place in tested]), strict=True))
    return [
        Compared(reference, other, size, bests, p_of.get(place, math.nan) < LEVEL)
        for place, (other, size, bests) in enumerate(found)
    ]


def has_sizes(study: Study) -> bool:
    """Return whether a study varies a size."""
    return any(_key(axis) in AXES and len(axis["values"]) > 1 for axis in study.spec.get("vary") or ())


def _key(axis: Mapping[str, Any]) -> str:
    return str(axis["field"]).removeprefix("model.")


def find_groups(studies: Sequence[Study]) -> list[Group]:
    """Return the groups of one study, or of several that share everything but the sizes.

    A parametrization's run at its base size is the standard one.

    Two studies may have the same runs at a size, or one of them more.

    Raises:
        ValueError: the studies differ in more than their sizes, or have different runs at one size; one line.
    """
    require_same_recipe(studies)
    found: dict[str, dict[Size, list[Curve]]] = {}
    names_standard = any(_parametrizations(study) != [STANDARD] for study in studies)
    for study in studies:
        asked = _parametrizations(study)
        places = sorted(_places(study), key=lambda place: place[1] != STANDARD)  # the reference comes first
        numbers = numbers_of(study, {series: series for *_, series in places}, {})
        for rest, parametrization, size, series in places:
            names = [parametrization] if parametrization in asked else []
            if parametrization == STANDARD:
                names += [name for name in asked if name != STANDARD and _is_base(study, name, size)]
            for name in names:
                label = " ".join(filter(None, (rest, name if names_standard else "")))
                curve = _make_curve(study, series, size, numbers[series])
                found.setdefault(label, {}).setdefault(size, []).append(curve)
    return [
        Group(name, tuple(_choose_curve(name, each) for _, each in sorted(curves.items())))
        for name, curves in found.items()
    ]


def _choose_curve(name: str, curves: Sequence[Curve]) -> Curve:
    """Return the curve of one size that has the runs of all; of each study, the first counts.

    Raises:
        ValueError: several studies have runs of their own there; one line.
    """
    of_study: dict[int, Curve] = {}
    for curve in curves:
        of_study.setdefault(id(curve.study), curve)
    firsts = list(of_study.values())
    runs = [set(curve.study.of(curve.series)["run_id"]) for curve in firsts]
    whole = next((curve for curve, own in zip(firsts, runs, strict=True) if own >= set.union(*runs)), None)
    if whole is not None:
        return whole
    first = firsts[0]
    second = next(curve for curve, own in zip(firsts, runs, strict=True) if not own <= runs[0])
    size = ", ".join(f"{axis} {_number(value)}" for axis, value in zip(AXES, first.size, strict=True))
    raise ValueError(
        f"{first.study.name} and {second.study.name} both have {name} at {size}, each with runs of its own; give one "
        "of them, or sweep all its rates and seeds under one name="
    )


def _parametrizations(study: Study) -> list[str]:
    return [each.get("name", STANDARD) for each in study.spec.get("parametrization") or [{}]]


SIZES = re.compile(rf" ?\b({'|'.join(AXES)})=(\S+)")
PARAMETRIZATION = re.compile(r" ?\bparametrization=(\S+)")


def _places(study: Study) -> Iterator[tuple[str, str, Size, str]]:
    """Yield each series' name without size and parametrization, its parametrization, its size and its own name."""
    model = study.spec["model"]
    own = {
        "width": model["width"],
        "layers": model["layers"],
        "steps": study.spec["steps"],
        "batch": study.spec["batch"],
    }
    for series in study.series:
        label = str(study.of(series)["model"].iloc[0])
        sizes = own | {key: float(value) for key, value in SIZES.findall(label)}
        known = PARAMETRIZATION.search(label)
        rest = PARAMETRIZATION.sub("", SIZES.sub("", series)).strip()
        yield rest, known[1] if known else STANDARD, tuple(float(sizes[axis]) for axis in AXES), series


def _is_base(study: Study, parametrization: str, size: Size) -> bool:
    """Return whether a size is the base of a parametrization, where its run is the standard one."""
    settings = next(each for each in study.spec["parametrization"] if each.get("name") == parametrization)
    bases = _base_sizes(study, settings)
    return all(size[AXES.index(axis)] == bases[key] for axis, key in BASES.items() if key in bases)


def _base_sizes(study: Study, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parametrization's base sizes: as given, else the smallest of the sweep."""
    varied = {_key(axis): min(axis["values"]) for axis in study.spec.get("vary") or () if _key(axis) in AXES}
    return {
        key: settings[key] or varied.get(axis, study.spec["model"][axis])
        for axis, key in BASES.items()
        if key in settings
    }


def _make_curve(study: Study, series: str, size: Size, numbers: Numbers) -> Curve:
    table, window = outcomes(study, series), windows(study)[series].median
    unigram = unlearned(study, series).nll
    gain = unigram - window.best_nll if window and math.isfinite(unigram) else math.nan
    return Curve(size, series, table, find_best(table), window, gain, numbers, study)


PARTS = (
    "objective",
    "optimizer",
    "residual",
    "norm",
    "ffn",
    "position",
    "linear",
    "precision",
    "clip_norm",
    "microbatch",
)
OF_WIDTH = ("name", "width", "layers", "heads", "head_width")


def require_same_recipe(studies: Sequence[Study]) -> None:
    """Refuse studies that differ in more than their sizes, or whose sizes or rates are unknown.

    Raises:
        ValueError: with one line.
    """
    for study in studies:
        if not {"model", "steps", "batch"} <= study.spec.keys():
            raise ValueError(f"{study.name}: its record lacks the sweep's settings, and so its sizes")
        if study.is_in_multiples:
            raise ValueError(f"{study.name}: its rates are multiples of each optimizer's own; sweep with lr=[…]")
    first, *others = studies
    for other in others:
        here, there = _recipe(first), _recipe(other)
        if odd := [key for key in here if key in there and here[key] != there[key]]:
            raise ValueError(
                f"{first.name} and {other.name} differ in {join_words(odd)}; sizes of one law share everything but "
                f"{join_words(AXES)}"
            )


def _recipe(study: Study) -> dict[str, Any]:
    """Return what the studies of one law share, by name; parts that only one of them has need no partner."""
    spec = study.spec
    schedule, model = dict(spec.get("schedule") or {}), dict(spec.get("model") or {})
    share = schedule.pop("warmup_share", None)
    warmup = share or schedule.pop("warmup_steps", 0) / spec["steps"]
    own = {f"mechanism.{each['name']}": each for each in spec.get("mechanism") or () if isinstance(each, Mapping)}
    for each in spec.get("parametrization") or ():
        own[f"parametrization.{each.get('name', STANDARD)}"] = {**each, **_base_sizes(study, each)}
    recipe = {
        **own,
        "heads": model.get("head_width") or f"{model.get('heads')} heads",
        **{key: spec.get(key) for key in PARTS},
        "data": sorted(set(study.runs["data_fingerprint"])),
        "schedule": (schedule | {"warmup_steps": 0}, round(warmup, 3)),
        "model": {key: value for key, value in model.items() if key not in OF_WIDTH},
    }
    return {key: _drop_off(value) for key, value in recipe.items()}


def _drop_off(value: Any) -> Any:
    """Return plain settings without those that are off: an older record lacks the settings that came later."""
    if isinstance(value, Mapping):
        return {key: _drop_off(each) for key, each in value.items() if each not in (None, False, 0, "none")}
    return [_drop_off(each) for each in value] if isinstance(value, list | tuple) else value
