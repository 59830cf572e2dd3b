"""Judge whether one stable window is wider than another, and the consensus paper's claims on them (section 5.1).

By the paper the window of sc is wider than sa's and sw's, and mix reaches sa's best NLL with a wider window. These
claims are judged by each mechanism's own window, on the validation NLL, and on the generative NLL if samples were
scored. A verdict needs the windows at an equal share of what was learned, too: both must agree. On the generative NLL
they are unknown, and there is no verdict. A line says what the common window, by the reference's limit, has to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from analysis.claims.claim import (
    CONSENSUS,
    Claim,
    bounds,
    interval_text,
    require_both,
    sentence,
    signed,
    verdict_of,
    word_claim,
)
from analysis.drawing.tables import limit_text, width_text
from analysis.numbers.common_windows import EqualShare, common_windows, equal_share
from analysis.numbers.comparison import (
    UNRESOLVED,
    Bests,
    Comparison,
    Lost,
    compare_bests,
    compare_windows,
    find_lost_seeds,
)
from analysis.numbers.learning import Learned, say_lacking
from analysis.numbers.spread import p_of_bounds
from analysis.numbers.windows import GENERATIVE, NLL_NAMES, VALIDATION, SeriesWindows, Window, windows
from analysis.study.load import Study
from analysis.study.reference import references
from analysis.words import join_words, plural

# (subject, wider, narrower), by the paper.
WIDER = (("window", "sc", "sa"), ("window sw", "sc", "sw"), ("mix window", "mix", "sa"))
# Best NLLs count as equal within this share of sa's: the largest gap that the paper calls mirrored is 1.2 % (Table 4,
# structure: 3.754 against 3.711).
MARGIN = 0.015
ONE_RULE = (
    "By 5 % of the best NLL alone, which makes no verdict: the generative NLL of a model without learning is unknown, "
    "and with it the windows at an equal share of the learning."
)
SAME_RULE = "the same limit, half of the learning"


@dataclass(frozen=True)
class Side:
    """One mechanism in one setting, with its windows and learning.

    ``shortfall`` is the reason for too little learning, "" for a trained mechanism.
    """

    mechanism: str
    name: str  # in sentences: the mechanism, for an ablation's base with its kind
    series: str
    found: SeriesWindows
    learned: Learned
    shortfall: str
    only_diverged: bool = False  # every run diverged, none is missing

    @property
    def trained(self) -> bool:
        return not self.shortfall


def window_claims(study: Study, sides: Mapping[str, Side]) -> Iterator[Claim]:
    """Yield the paper's claims on windows and best NLLs, for mechanisms in the study and each available NLL."""
    for column in (VALIDATION, GENERATIVE) if has_one_oracle(study) else (VALIDATION,):
        tail = "" if column == VALIDATION else " generative"
        for subject, wide, narrow in WIDER:
            if {wide, narrow} <= sides.keys():
                statement = f"{wide}'s stable window is wider than {narrow}'s ({NLL_NAMES[column]})"
                yield _paper_claim(study, subject + tail, statement, (sides[wide], sides[narrow]), column)
        if {"mix", "sa"} <= sides.keys():
            statement = f"mix reaches sa's best {NLL_NAMES[column]} (within {100 * MARGIN:g} %)"
            yield _best_claim(study, "mix best NLL" + tail, statement, (sides["mix"], sides["sa"]), column)


def has_one_oracle(study: Study) -> bool:
    """Return whether generative NLLs exist, all from one oracle: several are not comparable."""
    scored = study.runs[study.runs["gen_nll"].notna()]
    return scored["gen_oracle"].nunique() == 1


def _refuse(study: Study, subject: str, statement: str, sides: tuple[Side, Side]) -> Claim | None:
    """Return "not judged" if a side learned too little or has no result, else None.

    Args:
        study: supplies the runs.
        subject: key of the claim.
        statement: the paper's claim.
        sides: both mechanisms.
    """
    lacking = {side.series: side.name for side in sides if not side.trained}
    text = f"Not judged: {say_lacking(study, lacking)}."
    return Claim(subject, "not judged", text, statement, paper=CONSENSUS) if lacking else None


def _paper_claim(study: Study, subject: str, statement: str, sides: tuple[Side, Side], column: str) -> Claim:
    """Judge by the own windows, with a line on the common ones."""
    pair, names = (sides[0].series, sides[1].series), (sides[0].name, sides[1].name)
    if study.runs["lr"].nunique() < 2:
        text = "Not judged: a single learning rate has no window."
        return Claim(subject, "not judged", text, statement, paper=CONSENSUS)
    return _refuse(study, subject, statement, sides) or window_claim(
        study, subject, statement, pair, names=names, column=column, paper=CONSENSUS, is_with_common=True
    )


def window_claim(
    study: Study,
    subject: str,
    statement: str,
    pair: tuple[str, str],
    *,
    names: tuple[str, str] = ("", ""),
    column: str = VALIDATION,
    is_common: bool = False,
    paper: str = "",
    is_with_common: bool = False,
) -> Claim:
    """Judge whether the first series' stable window is wider, by the paired difference in decades.

    Args:
        study: supplies the runs.
        subject: key of the claim.
        statement: the claim.
        pair: both series.
        names: their names in sentences; by default the series.
        column: validation or generative NLL.
        is_common: whether the common windows are compared, not each one's own.
        paper: the paper that makes the statement.
        is_with_common: whether a line says what the common windows have to say.
    """
    found = common_windows(study, column) if is_common else windows(study, column=column)
    names = (names[0] or pair[0], names[1] or pair[1])
    first, second = (found[series] for series in pair)
    lost = find_lost_seeds(study, pair[0], column), find_lost_seeds(study, pair[1], column)
    result = compare_windows(first, second, lost)
    named = ((names[0], first), (names[1], second))
    equal = None if is_common or column != VALIDATION else equal_share(study, *pair)
    claim = Claim(
        subject,
        verdict_of(result),
        statement=statement,
        n=result.n,
        effect=f"{_widths(named)} decades",
        interval=interval_text(result.interval, result.n, "decades"),
        paper=paper,
        finding=_finding(result, named, f"{'common' if is_common else 'own'} window{_name_track(column)}"),
        difference=_difference(result),
        test=("common" if is_common else "own", column, *pair),
        p=result.p,
        differences=result.differences,
        more_runs=result.more_runs,
    )
    notes = [_explain(result), _grid(result), *_divergences(named, lost), _open_ends(result, named)]
    if equal is not None and first.keeps_half and second.keeps_half:
        claim = replace(claim, equal=SAME_RULE)
        notes.insert(0, f"At an equal share of what was learned: {SAME_RULE}. So this is no second rule.")
    elif equal is not None:
        claim, note = _agree(claim, compare_windows(equal.found, second, lost), equal, named)
        notes.insert(0, note)
    elif column != VALIDATION and claim.verdict in ("holds", "contradicted"):
        claim = replace(claim, verdict="no claim", p=math.nan, differences=())
        notes.insert(0, ONE_RULE)
    common = common_line(study, pair, names, column) if is_with_common else ""
    said = common.partition(": ")[2].removesuffix(".")
    return word_with_notes(replace(claim, common=said), [*notes, common])


def _agree(claim: Claim, result: Comparison, equal: EqualShare, named: Named) -> tuple[Claim, str]:
    """Return the claim with a verdict only if the windows at an equal share have it too, and a sentence on these."""
    (name, _), (other, theirs) = named
    verdict = verdict_of(result)
    said = {"holds": "wider", "contradicted": "narrower", "unresolved": "not resolved by this grid"}
    note = (
        f"At an equal share of what was learned ({100 * equal.share:.0f} %, as {other}'s own window allows): "
        f"{_widths(((name, equal.found), (other, theirs)))} decades, {said.get(verdict, 'undecided')}."
    )
    interval = interval_text(result.interval, result.n, "decades")
    words = ", ".join(filter(None, (_difference(result), interval, said.get(verdict, "undecided"))))
    claim = replace(claim, equal=words)
    second = replace(claim, verdict=verdict, interval=interval, differences=result.differences, p=result.p)
    return require_both(claim, replace(second, more_runs=result.more_runs)), note


def word_with_notes(claim: Claim, notes: list[str]) -> Claim:
    """Return a claim with its text and the non-empty notes as sentences."""
    return word_claim(replace(claim, note=" ".join(filter(None, notes))))


def common_line(study: Study, pair: tuple[str, str], names: tuple[str, str], column: str = VALIDATION) -> str:
    """Return a sentence on both common windows; "" without a reference.

    Args:
        study: supplies the runs.
        pair: both series.
        names: their names in the sentence.
        column: validation or generative NLL.
    """
    found = common_windows(study, column)
    if not set(pair) <= found.keys():
        return ""
    limiting = windows(study, column=column)[references(study).get(pair[1], pair[1])].median
    limit = limit_text([limiting] if limiting else [], f"{study.reference}'s", NLL_NAMES[column])
    lost = find_lost_seeds(study, pair[0], column), find_lost_seeds(study, pair[1], column)
    result = compare_windows(found[pair[0]], found[pair[1]], lost)
    verdict = {"holds": "wider", "contradicted": "narrower", "unresolved": "not resolved by this grid"}
    said = verdict.get(verdict_of(result), "undecided")
    widths = _widths(((names[0], found[pair[0]]), (names[1], found[pair[1]])))
    return f"{sentence(limit)}: {widths} decades, {said}."


def _name_track(column: str) -> str:
    return "" if column == VALIDATION else f" on the {NLL_NAMES[column]}"


Named = tuple[tuple[str, SeriesWindows], tuple[str, SeriesWindows]]


def _widths(named: Named) -> str:
    """Return widths as text, e.g. ``"sc 1.45, sa none"``."""
    return ", ".join(f"{name} {'--' if each.median is None else width_text(each.median)}" for name, each in named)


def _difference(result: Comparison) -> str:
    """Return the mean paired difference or its bounds, e.g. ``"+0.42 decades"``; "" if unknown."""
    low, high = result.size
    if math.isnan(low) or (math.isinf(low) and math.isinf(high)):
        return ""
    if math.isfinite(low) and math.isfinite(high) and high - low < 0.005:
        return f"{signed(low)} decades"
    return f"{bounds(result.size)} decades"


def _finding(result: Comparison, named: Named, what: str) -> str:
    """Return the measured relation as a clause, e.g. ``"sc's own window is 0.42 decades wider than sa's"``."""
    (first, _), (second, _) = named
    low, high = result.size
    within = " within the swept range" if result.scope == "range" else ""
    if not math.isfinite(low) and not math.isfinite(high):
        return f"{what} of {first} and {second}: {_widths(named)} decades"
    known = [end for end in (low, high) if math.isfinite(end)]
    if result.direction == 0 and low < 0 < high:
        return f"{first}'s {what} less {second}'s is between {signed(low)} and {signed(high)} decades{within}"
    sign = 1 if sum(known) >= 0 else -1
    ends = sorted(abs(end) for end in known)
    size = f"{ends[0]:.2f} to {ends[-1]:.2f}" if ends[-1] - ends[0] > 0.005 else f"{ends[0]:.2f}"
    size = f"at least {size}" if len(known) == 1 else size
    return f"{first}'s {what} is {size} decades {'wider' if sign > 0 else 'narrower'} than {second}'s{within}"


def _explain(result: Comparison) -> str:
    """Return the reason for no verdict if the number of seeds does not say it all."""
    told = result.n < 2 or not result.why_undecided or result.why_undecided == UNRESOLVED or result.differences
    return "" if told else f"{sentence(result.why_undecided)}."


def _grid(result: Comparison) -> str:
    """Return what the measured rates alone say of an unresolved difference."""
    if result.is_resolved:
        return ""
    low, high = result.grid
    return f"The measured rates alone, without interpolation, allow {signed(low)} to {signed(high)} decades."


def _divergences(named: Named, losts: tuple[Lost, Lost]) -> Iterator[str]:
    """Yield sentences on seeds with a divergence inside the other's window, or at every rate."""
    seeds = sorted(named[0][1].by_seed.keys() & named[1][1].by_seed.keys())
    for (name, found), (other, others), lost in (
        (*named, losts[0]),
        (*named[::-1], losts[1]),
    ):
        inside = sum(_breaks_within(found.by_seed[seed], others.by_seed[seed]) for seed in seeds)
        of = plural(len(seeds), "seed")
        if inside:
            yield f"{name} diverged at a rate inside {other}'s window in {inside} of {of}."
        if lost:
            yield f"{name} diverged at every rate in {len(lost)} of {of}, a window of width 0."


def _breaks_within(one: Window | None, other: Window | None) -> bool:
    """Return whether one window borders on a divergence at a rate inside the other."""
    edges = [edge for edge in (one.low, one.high) if edge.kind == "diverged"] if one is not None else []
    return other is not None and any(other.low.lr <= edge.furthest_lr <= other.high.lr for edge in edges)


def _open_ends(result: Comparison, named: Named) -> str:
    """Say that a window reaches the sweep's end and is a lower bound. "" if none does."""
    opened = []
    for name, found in named:
        if found.median is None:
            continue
        ends = [end for end, is_open in (("low", found.median.open_low), ("high", found.median.open_high)) if is_open]
        opened += [f"{name}'s at the {join_words(ends)} end{'s' * (len(ends) > 1)}"] if ends else []
    if not opened:
        return ""
    caveat = "" if result.scope == "whole" else ", and beyond the sweep the order may be another"
    return f"Open windows are lower bounds ({join_words(opened)}){caveat}."


def _best_claim(study: Study, subject: str, statement: str, sides: tuple[Side, Side], column: str) -> Claim:
    """Judge whether mix's best NLL equals sa's: the interval must lie within the margin.

    This is two one-sided tests; a missing significant difference alone is not equality. An interval below the margin
    counts as reaching.
    """
    if (absent := _refuse(study, subject, statement, sides)) is not None:
        return absent
    mix, sa = sides
    names = (mix.name, sa.name)
    judged = partial(Claim, subject, statement=statement, paper=CONSENSUS)
    bests = compare_bests(study, mix.series, sa.series, column)
    if bests is None:
        return word_claim(judged(verdict="no claim", finding=f"no best {NLL_NAMES[column]} of both"))
    limit, n, effect = 100 * MARGIN, bests.result.n, _best_words(bests, names)
    beyond = [100 * each - limit for each in bests.differences]
    low, high = (100 * bound for bound in bests.result.interval)
    verdict = "no claim" if n < 2 else "contradicted" if low > limit else "holds" if high < limit else "undecided"
    size = 100 * bests.result.size[0]
    side = (
        f"lies {abs(size):.2f} % {'above' if size > 0 else 'below'}"
        if math.isfinite(size)
        else "is infinitely far from"
    )
    finding = f"{mix.name}'s best {NLL_NAMES[column]} {side} {sa.name}'s, margin {limit:g} %"
    claim = judged(
        verdict=verdict,
        n=n,
        effect=effect,
        interval=interval_text((low, high), n, "%"),
        finding=finding,
        difference=f"{signed(size)} %" if math.isfinite(size) else "",
        test=("margin", column, mix.series, sa.series),
        p=p_of_bounds(beyond, beyond),
        differences=tuple(100 * each for each in bests.differences),
        margin=limit,
    )
    return word_with_notes(claim, [f"Medians: {effect}.", *_report_lost_seeds(bests, names)])


def _best_words(bests: Bests, names: tuple[str, str]) -> str:
    return ", ".join(
        f"{name} {f'{nll:.3f}' if math.isfinite(nll) else '∞'}"
        for name, nll in zip(names, (bests.first, bests.second), strict=True)
    )


def _report_lost_seeds(bests: Bests, names: tuple[str, str]) -> list[str]:
    """Report the seeds in which a series diverged at every rate; [] if none."""
    return [
        f"{name} diverged at every rate in {count} of {plural(bests.result.n, 'seed')}."
        for name, count in zip(names, bests.lost, strict=True)
        if count
    ]
