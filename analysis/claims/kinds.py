"""Say in words how kinds of run compare that are each taken at a learning rate of their own (optimizers, mechanisms),
computed from `analysis.numbers.kinds`; and what is said of a study's optimizers.

Every run counts, and those that diverged come first. Each is compared with the plain one seed by seed, each at a best
rate of its own, by the rules of the claims: one seed, nothing is said; two, both must agree; three or more, Student's
95 % interval of the paired differences must exclude 0. Nothing is corrected for the number of comparisons, and it is
said how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.numbers.comparison import TIE_DECADES, decide
from analysis.numbers.kinds import Bounds, Numbers
from analysis.numbers.optimizers import groups, numbers_of, others_of, plain_of
from analysis.numbers.side_by_side import mean_time
from analysis.study.load import Study
from analysis.words import listed, plural

MOST_RATES = 4  # named one by one


@dataclass(frozen=True)
class Quantity:
    """A number that kinds are compared by. ``more``, ``less``: what one has whose number is greater, or smaller;
    ``form``: writes a difference; ``tie``: differences up to it are none."""

    key: str
    opening: str
    more: str
    less: str
    form: Callable[[float], str]
    tie: float = 0.0


NLL = Quantity("nll", "NLL at the best rate", "higher", "lower", lambda value: f"{value:+.3f}")
ROOM = Quantity(
    "room",
    "Decades from the best rate to where the NLL leaves 5 % of the best",
    "more",
    "fewer",
    lambda value: f"{value:+.2f}",
    TIE_DECADES,
)
WINDOW = Quantity("window", "Stable window (decades)", "wider", "narrower", lambda value: f"{value:+.2f}", TIE_DECADES)
RATIO = Quantity(
    "ratio", "α_max over the rate, at the best rate", "larger", "smaller", lambda value: f"×{10**value:.2g}"
)
SENSITIVITY = Quantity(
    "sensitivity", "Sensitivity to the learning rate (nats)", "larger", "smaller", lambda value: f"{value:+.3f}"
)


@dataclass(frozen=True)
class Difference:
    """A paired difference of a kind from the plain one. ``direction``: +1, −1, or 0 where the interval does not
    tell; ``text``: its median over seeds and its interval."""

    direction: int
    n: int
    text: str


def divergences(numbers: list[Numbers], unit: str = "") -> str:
    """Say how many runs diverged, of which kinds and at which rates, the most first. ``unit``: what rates are told
    in."""
    total, lost = sum(each.num_runs for each in numbers), sum(each.num_diverged for each in numbers)
    if not lost:
        return f"None of {plural(total, 'run')} diverged."
    some = sorted((each for each in numbers if each.num_diverged), key=lambda each: -each.num_diverged)
    told = [f"{each.name} {each.num_diverged} of {each.num_runs} ({_where(each)})" for each in some]
    none = [each.name for each in numbers if not each.num_diverged]
    rest = f" None of {listed(none)}." if none else ""
    return f"Of {plural(total, 'run')}, {lost} diverged{unit and f', rates being {unit}'}: {'; '.join(told)}.{rest}"


def _where(each: Numbers) -> str:
    """Say at which rates a kind's runs diverged, each with its count, or where they are many from which on."""
    lost = {rate: f"{count}/{of}" for rate, (count, of) in each.diverged.items() if count}
    if len(lost) > MOST_RATES:
        return f"at {len(lost)} of {len(each.diverged)} rates, from {min(lost):.3g} to {max(lost):.3g}"
    return ", ".join(f"{text} at {rate:.3g}" for rate, text in lost.items())


def best(numbers: list[Numbers], noun: str) -> str:
    """Name the lowest NLL, and the kinds (each a ``noun``) of which every run diverged, or whose best rate lies at an
    end of what was swept."""
    known = sorted((each for each in numbers if each.nll.n), key=lambda each: each.nll.median)
    if not known:
        return f"No {noun} has a finite NLL."
    text = f"Lowest NLL at the best rate: {known[0].name}, {_with_interval(known[0])}"
    text += f"; highest: {known[-1].name}, {_with_interval(known[-1])}." if len(known) > 1 else "."
    lost = [each.name for each in numbers if not each.nll.n]
    text += f" Without any: {listed(lost)}." if lost else ""
    ends = [each.name for each in known if each.best in (min(each.diverged), max(each.diverged))]
    if ends and any(len(each.diverged) > 1 for each in known):
        text += (
            f" The best rate is the first or the last that was swept of {listed(ends)}: a better one may lie beyond."
        )
    return text


def _with_interval(each: Numbers) -> str:
    return f"{each.nll.median:.3f} ({each.nll.detail()})"


def compared(quantity: Quantity, numbers: list[Numbers], plain: Numbers) -> str:
    """Say of one quantity which kinds differ from the plain one beyond the interval; "" where nothing is known."""
    found = {
        each.name: difference(quantity, each.by_seed[quantity.key], plain.by_seed[quantity.key])
        for each in numbers
        if each is not plain
    }
    known = {name: each for name, each in found.items() if each.n > 1}
    if not known:
        return ""
    parts = []
    for direction, word in ((1, quantity.more), (-1, quantity.less)):
        own = [f"{name} {each.text}" for name, each in known.items() if each.direction == direction]
        parts += [f"{word} of {listed(own)}"] if own else []
    alike = [name for name, each in known.items() if not each.direction]
    parts += [f"not told apart: {listed(alike)}"] if alike else []
    absent = [name for name, each in found.items() if each.n < 2]
    parts += [f"too few seeds: {listed(absent)}"] if absent else []
    return f"{quantity.opening}, against {plain.name}'s seed by seed: {'; '.join(parts)}."


def difference(quantity: Quantity, own: Mapping[int, Bounds], plain: Mapping[int, Bounds]) -> Difference:
    """Return the paired difference over the seeds that both have; where numbers are bounds, by what they leave
    possible. A seed in which one of the two diverged at every rate has no number: then all seeds must agree."""
    seeds = sorted(own.keys() & plain.keys())
    lows = [_less(own[seed][0], plain[seed][1]) for seed in seeds]
    highs = [_less(own[seed][1], plain[seed][0]) for seed in seeds]
    if lost := sum(low == high and math.isinf(low) for low, high in zip(lows, highs, strict=True)):
        agreed = 1 if min(lows) > quantity.tie else -1 if max(highs) < -quantity.tie else 0
        text = f"(one of the two diverged at every rate in {lost} of {len(seeds)} seeds)"
        return Difference(agreed, len(seeds), text)
    direction, interval = decide(lows, highs, quantity.tie)
    middles = [_middle(low, high) for low, high in zip(lows, highs, strict=True)]
    ends = " to ".join(
        quantity.form(end) if math.isfinite(end) else f"{end:.0f}".replace("inf", "∞") for end in interval
    )
    middle = float(np.median(middles)) if middles else math.nan
    return Difference(
        direction, len(seeds), f"{quantity.form(middle)} ({ends})" if math.isfinite(middle) else f"({ends})"
    )


def _middle(low: float, high: float) -> float:
    """Return the middle of what is possible; the one end where the other is open."""
    return (low + high) / 2 if math.isfinite(low + high) else low if math.isfinite(low) else high


def _less(first: float, second: float) -> float:
    """Return first − second; 0 where both are the same infinity."""
    return 0.0 if first == second else first - second


def rule(numbers: list[Numbers], plain: Numbers) -> str:
    """Say by which rule differences are told, and how many comparisons there are."""
    seeds = len(plain.by_seed["nll"])
    others = len(numbers) - 1
    how = (
        "With one seed nothing is said of differences"
        if seeds < 2
        else "With two seeds a difference is told where both agree, which is an indication"
        if seeds == 2
        else f"A difference is told where the 95 % interval of the {seeds} paired differences excludes 0; in "
        "parentheses that interval"
    )
    return f"{how}. Each is compared with {plain.name} alone, {plural(others, 'comparison')} a quantity, uncorrected."


def step_ratio(each: Numbers, plain: Numbers) -> float:
    """Return the median over the common seeds of the time of a step over the plain one's; NaN without any."""
    ratios = [each.step_s[seed] / plain.step_s[seed] for seed in each.step_s.keys() & plain.step_s.keys()]
    known = [ratio for ratio in ratios if math.isfinite(ratio)]
    return float(np.median(known)) if known else math.nan


QUANTITIES = (NLL, ROOM, RATIO, SENSITIVITY)


def optimizers_reading(study: Study) -> list[str]:
    """Return the sentences on each group of optimizers; [] where the study does not compare any."""
    found = groups(study)
    return [
        (f"{others_of(study, group)}: " if len(found) > 1 else "") + text
        for group in found
        for text in _of_optimizers(study, numbers_of(study, group))
    ]


def _of_optimizers(study: Study, numbers: Mapping[str, Numbers]) -> list[str]:
    plain, ordered = plain_of(numbers), list(numbers.values())
    texts = [divergences(ordered, "multiples of the reference"), best(ordered, "optimizer")]
    texts += [text for quantity in QUANTITIES if (text := compared(quantity, ordered, plain))]
    return [*texts, rule(ordered, plain), *_costs(study, ordered, plain)]


def _costs(study: Study, numbers: list[Numbers], plain: Numbers) -> list[str]:
    """Say which optimizers keep the least and the most, and take the shortest and the longest steps."""
    parts = []
    known = [each for each in numbers if math.isfinite(each.optimizer_bytes)]
    sized = sorted(known, key=lambda each: each.optimizer_bytes)
    if sized:
        ends = listed(dict.fromkeys(f"{each.name} {each.optimizer_bytes:.2f}" for each in (sized[0], sized[-1])))
        parts.append(f"Bytes of state a parameter, least and most: {ends}.")
    ratios = [
        mean_time(study, each.series, plain.series) if study.throughput else step_ratio(each, plain) for each in numbers
    ]
    timed = [(each, ratio) for each, ratio in zip(numbers, ratios, strict=True) if math.isfinite(ratio)]
    if len(timed) > 1:
        timed.sort(key=lambda pair: pair[1])
        ends = listed(f"{each.name} {ratio:.2f}" for each, ratio in (timed[0], timed[-1]))
        clock = "mean of turns side by side" if study.throughput else "by the runs' own clocks"
        parts.append(f"Time of a step over {plain.name}'s, shortest and longest: {ends}, {clock}.")
    return parts
