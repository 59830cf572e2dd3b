"""Describe in words how optimizers or mechanisms compare, each at its own best rate.

The numbers come from `analysis.numbers.at_best_rate`. All runs count; diverged runs are reported first. Each kind is
compared with the plain one seed by seed, under the claims' rules. One seed: no statement. Two: both must agree. Three
or more: Student's 95 % interval of the paired differences must exclude 0, after Holm's correction over all kinds and
quantities of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from analysis.numbers.at_best_rate import Bounds, Numbers
from analysis.numbers.comparison import TIE_DECADES, decide_with_lost, p_of_agreement
from analysis.numbers.optimizers import compares_optimizers_alone, find_plain, groups, name_setting, numbers_of
from analysis.numbers.side_by_side import mean_time
from analysis.numbers.spread import LEVEL, holm, p_of_bounds
from analysis.study.load import Study
from analysis.words import join_words, plural

MOST_RATES = 4  # longer lists are shortened to a range


@dataclass(frozen=True)
class Quantity:
    """A number for comparing kinds.

    Attributes:
        key: entry in `Numbers.by_seed`.
        opening: start of the sentence.
        more, less: word for the kind with the greater or smaller number.
        form: formats a difference.
        tie: largest absolute difference treated as equal.
    """

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
RATIO = Quantity(
    "ratio", "α_max over the rate, at the best rate", "larger", "smaller", lambda value: f"×{10**value:.2g}"
)
SENSITIVITY = Quantity(
    "sensitivity", "Sensitivity to the learning rate (nats)", "larger", "smaller", lambda value: f"{value:+.3f}"
)


@dataclass(frozen=True)
class Difference:
    """A paired difference between a kind and the plain one.

    Attributes:
        direction: +1, −1, or 0 if undecided.
        n: paired seeds.
        text: mean over seeds with its interval.
        p: p-value of the direction; NaN below three seeds.
    """

    direction: int
    n: int
    text: str
    p: float = math.nan


def divergences(numbers: list[Numbers], unit: str = "") -> str:
    """Report the number of diverged runs by kind and rate, most first.

    ``unit`` names the rates' unit.
    """
    total, lost = sum(each.num_runs for each in numbers), sum(each.num_diverged for each in numbers)
    if not lost:
        return f"None of {plural(total, 'run')} diverged."
    some = sorted((each for each in numbers if each.num_diverged), key=lambda each: -each.num_diverged)
    told = [f"{each.name} {each.num_diverged} of {each.num_runs} ({_list_divergences(each)})" for each in some]
    none = [each.name for each in numbers if not each.num_diverged]
    rest = f" None of {join_words(none)}." if none else ""
    return f"Of {plural(total, 'run')}, {lost} diverged{unit and f', rates being {unit}'}: {'; '.join(told)}.{rest}"


def _list_divergences(each: Numbers) -> str:
    """List the rates with diverged runs and their counts; above `MOST_RATES` rates only the range."""
    lost = {rate: f"{count}/{of}" for rate, (count, of) in each.diverged.items() if count}
    if len(lost) > MOST_RATES:
        return f"at {len(lost)} of {len(each.diverged)} rates, from {min(lost):.3g} to {max(lost):.3g}"
    return ", ".join(f"{text} at {rate:.3g}" for rate, text in lost.items())


def best(numbers: list[Numbers], noun: str) -> str:
    """Name the lowest NLL, kinds without one, and best rates at the sweep's ends.

    ``noun`` names a kind, e.g. "optimizer".
    """
    known = sorted((each for each in numbers if each.nll.n), key=lambda each: each.nll.median)
    if not known:
        return f"No {noun} has a finite NLL."
    text = f"Lowest NLL at the best rate: {known[0].name}, {_nll_text(known[0])}"
    text += f"; highest: {known[-1].name}, {_nll_text(known[-1])}." if len(known) > 1 else "."
    lost = [each.name for each in numbers if not each.nll.n]
    text += f" Without any: {join_words(lost)}." if lost else ""
    ends = [each.name for each in known if each.best in (min(each.diverged), max(each.diverged))]
    if ends and any(len(each.diverged) > 1 for each in known):
        text += f" The best rate of {join_words(ends)} is the first or the last swept: a better one may lie beyond."
    return text


def _nll_text(each: Numbers) -> str:
    return f"{each.nll.median:.3f} ({each.nll.detail()})"


Differences = dict[str, dict[str, Difference]]  # by the quantity's key and the kind's name


def differences(numbers: list[Numbers], plain: Numbers) -> Differences:
    """Return every kind's differences from the plain one; a direction is 0 where Holm's correction undoes it.

    Args:
        numbers: all kinds.
        plain: reference kind, one of ``numbers``.
    """
    found = {
        quantity.key: {
            each.name: difference(quantity, each.by_seed[quantity.key], plain.by_seed[quantity.key])
            for each in numbers
            if each is not plain
        }
        for quantity in QUANTITIES
    }
    tested = [each for of_kind in found.values() for each in of_kind.values() if math.isfinite(each.p)]
    p_of = dict(zip(map(id, tested), holm([each.p for each in tested]), strict=True))
    return {
        key: {
            name: each if p_of.get(id(each), 0.0) <= LEVEL else replace(each, direction=0)
            for name, each in of_kind.items()
        }
        for key, of_kind in found.items()
    }


def count_tests(found: Differences) -> int:
    """Return the number of comparisons with a p-value."""
    return sum(math.isfinite(each.p) for of_kind in found.values() for each in of_kind.values())


def compare(quantity: Quantity, found: Mapping[str, Difference], plain: Numbers) -> str:
    """Return a sentence on the kinds that differ from the plain one; "" without data.

    Args:
        quantity: the compared number.
        found: each kind's difference, of `differences`.
        plain: reference kind.
    """
    known = {name: each for name, each in found.items() if each.n > 1}
    if not known:
        return ""
    parts = []
    for direction, word in ((1, quantity.more), (-1, quantity.less)):
        own = [f"{name} {each.text}" for name, each in known.items() if each.direction == direction]
        parts += [f"{word} of {join_words(own)}"] if own else []
    alike = [name for name, each in known.items() if not each.direction]
    parts += [f"no significant difference: {join_words(alike)}"] if alike else []
    absent = [name for name, each in found.items() if each.n < 2]
    parts += [f"too few seeds: {join_words(absent)}"] if absent else []
    return f"{quantity.opening}, against {plain.name}'s seed by seed: {'; '.join(parts)}."


def difference(quantity: Quantity, own: Mapping[int, Bounds], plain: Mapping[int, Bounds]) -> Difference:
    """Return the paired difference over the common seeds, from lower and upper bounds.

    If one side diverged at every rate in some seed, that seed has no number, and the sign test decides; in every seed,
    the divergence itself does.

    Args:
        quantity: supplies the tie and the format.
        own: bounds by seed.
        plain: the reference's bounds by seed.
    """
    seeds = sorted(own.keys() & plain.keys())
    lows = [_less(own[seed][0], plain[seed][1]) for seed in seeds]
    highs = [_less(own[seed][1], plain[seed][0]) for seed in seeds]
    direction, interval, lost = decide_with_lost(lows, highs, quantity.tie)
    if lost:
        text = f"(one of the two diverged at every rate in {lost} of {len(seeds)} seeds)"
        if lost == len(seeds):
            return Difference(direction, lost, text)
        return Difference(direction, len(seeds), text, p_of_agreement(lows, highs, quantity.tie))
    middles = [_middle(low, high) for low, high in zip(lows, highs, strict=True)]
    ends = " to ".join(
        quantity.form(end) if math.isfinite(end) else f"{end:.0f}".replace("inf", "∞") for end in interval
    )
    middle = float(np.mean(middles)) if middles else math.nan
    text = f"{quantity.form(middle)} ({ends})" if math.isfinite(middle) else f"({ends})"
    return Difference(direction, len(seeds), text, p_of_bounds(lows, highs, quantity.tie))


def _middle(low: float, high: float) -> float:
    """Return the bounds' midpoint, or the finite bound if one is infinite."""
    return (low + high) / 2 if math.isfinite(low + high) else low if math.isfinite(low) else high


def _less(first: float, second: float) -> float:
    """Return first − second; 0 if both are the same infinity."""
    return 0.0 if first == second else first - second


def rule(tests: int, plain: Numbers) -> str:
    """Return the decision rule in words; ``tests``: number of comparisons with a p-value."""
    seeds = len(plain.by_seed["nll"])
    corrected = f", after Holm's correction over {tests} comparisons" if tests > 1 else ""
    how = (
        "With one seed nothing is said of differences"
        if seeds < 2
        else "With two seeds a difference is told where both agree, which is an indication"
        if seeds == 2
        else f"A difference is told where the 95 % interval of the {seeds} paired differences excludes 0{corrected}; "
        "in parentheses the uncorrected interval"
    )
    return f"{how}. Each is compared with {plain.name} alone."


def step_ratio(each: Numbers, plain: Numbers) -> float:
    """Return the median step time relative to the plain one's, over common seeds. NaN if none."""
    ratios = [each.step_s[seed] / plain.step_s[seed] for seed in each.step_s.keys() & plain.step_s.keys()]
    known = [ratio for ratio in ratios if math.isfinite(ratio)]
    return float(np.median(known)) if known else math.nan


QUANTITIES = (NLL, ROOM, RATIO, SENSITIVITY)


def optimizers_reading(study: Study) -> list[str]:
    """Return the sentences on each group of optimizers; [] if the study compares none."""
    found = groups(study)
    return [
        (f"{name_setting(study, group)}: " if len(found) > 1 else "") + text
        for group in found
        for text in _compare_optimizers(study, numbers_of(study, group))
    ]


def say_best_nlls(study: Study) -> str:
    """Say which optimizers' best NLLs are told apart from the plain one's; "" but for optimizers alone, with seeds."""
    if not compares_optimizers_alone(study):
        return ""
    numbers = numbers_of(study, study.series)
    plain = find_plain(numbers)
    found = differences(list(numbers.values()), plain)
    known = {name: each for name, each in found[NLL.key].items() if each.n > 1}
    if not known:
        return ""
    told = compare(NLL, {name: each for name, each in known.items() if each.direction}, plain).rstrip(".")
    corrected = f" after Holm's correction over {tests} comparisons" if (tests := count_tests(found)) > 1 else ""
    return f"{told or f'No best NLL is told apart from that of {plain.name}'}{corrected}."


def _compare_optimizers(study: Study, numbers: Mapping[str, Numbers]) -> list[str]:
    plain, ordered = find_plain(numbers), list(numbers.values())
    texts = [divergences(ordered, "multiples of the reference"), best(ordered, "optimizer")]
    found = differences(ordered, plain)
    texts += [text for quantity in QUANTITIES if (text := compare(quantity, found[quantity.key], plain))]
    return [*texts, rule(count_tests(found), plain), *_costs(study, ordered, plain)]


def _costs(study: Study, numbers: list[Numbers], plain: Numbers) -> list[str]:
    """Name the optimizers with the smallest and largest state, and the shortest and longest steps."""
    parts = []
    known = [each for each in numbers if math.isfinite(each.optimizer_bytes)]
    sized = sorted(known, key=lambda each: each.optimizer_bytes)
    if sized:
        ends = join_words(dict.fromkeys(f"{each.name} {each.optimizer_bytes:.2f}" for each in (sized[0], sized[-1])))
        parts.append(f"Bytes of state a parameter, least and most: {ends}.")
    ratios = [
        mean_time(study, each.series, plain.series) if study.throughput else step_ratio(each, plain) for each in numbers
    ]
    timed = [(each, ratio) for each, ratio in zip(numbers, ratios, strict=True) if math.isfinite(ratio)]
    if len(timed) > 1:
        timed.sort(key=lambda pair: pair[1])
        ends = join_words(f"{each.name} {ratio:.2f}" for each, ratio in (timed[0], timed[-1]))
        clock = "mean of turns side by side" if study.throughput else "by the runs' own clocks"
        parts.append(f"Time of a step over {plain.name}'s, shortest and longest: {ends}, {clock}.")
    return parts
