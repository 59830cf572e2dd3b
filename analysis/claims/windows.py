"""Judge the consensus paper's claims on learning rates and NLL (section 5.1).

The window of sc is wider than sa's and sw's. mix reaches sa's best NLL and has a wider window than sa. Each is judged
on the validation NLL, and on the generative NLL if samples were scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from analysis.claims.claim import Claim, bounds, interval_text, sentence, too_few, weight, would_tell
from analysis.drawing.tables import width_text
from analysis.numbers.comparison import Bests, Comparison, Lost, compare_bests, compare_windows, diverged_everywhere
from analysis.numbers.learning import Learned
from analysis.numbers.windows import GENERATIVE, VALIDATION, SeriesWindows, Window, windows
from analysis.study.load import Study
from analysis.words import listed, plural

# (subject, wider, narrower), by the paper.
WIDER = (("window", "sc", "sa"), ("window sw", "sc", "sw"), ("mix window", "mix", "sa"))
# Best NLLs count as equal within this share of sa's: the largest gap that the paper calls mirrored is 1.2 % (Table 4,
# structure: 3.754 against 3.711).
MARGIN = 0.015
WORDS = {VALIDATION: "", GENERATIVE: " on the generative NLL"}
KIND = {VALIDATION: "validation NLL", GENERATIVE: "generative NLL"}


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


def window_claims(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return the claims on windows and best NLLs between trained mechanisms, for each available NLL."""
    claims = []
    for column in (VALIDATION, GENERATIVE) if scored_by_one(study) else (VALIDATION,):
        of_series = windows(study, column=column)
        found = {name: of_series[side.series] for name, side in sides.items()}
        names = {name: side.name for name, side in sides.items()}
        trained = {name for name, side in sides.items() if side.trained}
        claims += [
            _window_claim(study, (subject, wide, narrow), found, names, column)
            for subject, wide, narrow in WIDER
            if {wide, narrow} <= trained
        ]
        claims += [_best_claim(study, sides["mix"], sides["sa"], column)] if {"mix", "sa"} <= trained else []
    return claims


def scored_by_one(study: Study) -> bool:
    """Return whether generative NLLs exist, all from one oracle: several are not comparable."""
    scored = study.runs[study.runs["gen_nll"].notna()]
    return scored["gen_oracle"].nunique() == 1


def wider(wide: str, narrow: str) -> str:
    """Return a sentence's start, e.g. ``"the paper's claim, a wider stable window of sc than of sa,"``."""
    return f"the paper's claim, a wider stable window of {wide} than of {narrow},"


def _window_claim(
    study: Study, claimed: tuple[str, str, str], found: dict[str, SeriesWindows], names: dict[str, str], column: str
) -> Claim:
    """Judge whether one stable window is wider, by the paired difference in decades.

    ``found``, ``names``: by mechanism. The statement keeps the paper's names.
    """
    subject, wide, narrow = claimed
    statement = f"{wide}'s stable window is wider than {narrow}'s ({KIND[column]})"
    first, second = found[wide], found[narrow]
    wide, narrow = names[wide], names[narrow]
    lost = diverged_everywhere(study, first.series, column), diverged_everywhere(study, second.series, column)
    result, numbers = compare_windows(first, second, lost), _widths((wide, first), (narrow, second))
    numbers += _only_one_diverged((wide, first, lost[0]), (narrow, second, lost[1]))
    known = {"effect": _effect((wide, first), (narrow, second))}
    known |= {"interval": interval_text(result.interval, result.n, "decades")}
    subject += "" if column == VALIDATION else " generative"
    judged = partial(Claim, subject, statement=statement, n=result.n, **known)
    if result.n < 2 or first.median is None or second.median is None:
        return judged("no claim", f"{too_few(result.n)} on {wider(wide, narrow)}{WORDS[column]} is made; {numbers}.")
    if result.n >= 3:
        numbers += f"; 95 % interval of the paired difference {bounds(result.interval)} decades"
    if result.direction == 0:
        text = (
            f"Whether {wide}'s stable window{WORDS[column]} is wider than {narrow}'s stays undecided: "
            f"{result.why_undecided} ({numbers})."
        )
        return judged("undecided", text + would_tell(result.differences))
    relation, verdict, stance = (
        ("wider", "holds", "as") if result.direction > 0 else ("narrower", "contradicted", "unlike what")
    )
    text = (
        f"{weight(result.n)} that {wide}'s stable window{WORDS[column]} is {relation} than "
        f"{narrow}'s{within(result)}, {stance} the paper claims ({numbers})."
    )
    return judged(verdict, text + _open_note(result, (wide, first), (narrow, second)))


def _best_claim(study: Study, mix: Side, sa: Side, column: str) -> Claim:
    """Judge whether mix's best NLL equals sa's: the interval must lie within the margin.

    This is two one-sided tests; a missing significant difference alone is not equality. An interval below the margin
    counts as reaching.
    """
    subject = "mix best NLL" + ("" if column == VALIDATION else " generative")
    statement = f"mix reaches sa's best {KIND[column]} (within {100 * MARGIN:g} %)"
    names = (mix.name, sa.name)
    bests = compare_bests(study, mix.series, sa.series, column)
    if bests is None or bests.result.n < 2:
        n = 0 if bests is None else bests.result.n
        numbers = "" if bests is None else f"; measured: {_best_words(bests, names)}{_lost(bests, names)}"
        text = f"{too_few(n)} on whether {mix.name} reaches {sa.name}'s best {KIND[column]} is made{numbers}."
        return Claim(subject, "no claim", text, statement, n)
    low, high = (100 * bound for bound in bests.result.interval)
    limit, n, effect = 100 * MARGIN, bests.result.n, _best_words(bests, names)
    interval = interval_text((low, high), n, "%")
    judged = partial(Claim, subject, statement=statement, n=n, effect=effect, interval=interval)
    numbers = f"medians: {effect}; paired difference {interval}, margin {limit:g} %{_lost(bests, names)}"
    if low > limit:
        text = f"{weight(n)} that {mix.name} stays behind {sa.name}'s best {KIND[column]}, unlike what the paper claims"
        return judged("contradicted", f"{text} ({numbers}).")
    if high < limit:
        how = (
            f"reaches {sa.name}'s"
            if low > -limit
            else f"reaches {sa.name}'s, and may well lie below it"
            if high > -limit
            else f"lies below {sa.name}'s by more than the margin, so reaches it:"
        )
        text = f"{weight(n)} that {mix.name}'s best {KIND[column]} {how}, as the paper claims ({numbers})."
        return judged("holds", text)
    text = (
        f"Whether {mix.name} reaches {sa.name}'s best {KIND[column]} cannot be told: the paired differences do not lie "
        f"within the margin as a whole ({numbers})."
    )
    return judged("undecided", text + would_tell([100 * each for each in bests.differences], limit))


def _best_words(bests: Bests, names: tuple[str, str]) -> str:
    return ", ".join(
        f"{name} {f'{nll:.3f}' if math.isfinite(nll) else '∞'}"
        for name, nll in zip(names, (bests.first, bests.second), strict=True)
    )


def _lost(bests: Bests, names: tuple[str, str]) -> str:
    """Report the seeds in which a series diverged at every rate; "" if none."""
    told = [
        f"{name} diverged at every rate in {count} of {plural(bests.result.n, 'seed')}"
        for name, count in zip(names, bests.lost, strict=True)
        if count
    ]
    return "".join(f"; {each}" for each in told)


def _effect(*named: tuple[str, SeriesWindows]) -> str:
    return (
        ", ".join(f"{name} {width_text(found.median)}" for name, found in named if found.median is not None)
        + " decades"
    )


def _widths(*named: tuple[str, SeriesWindows]) -> str:
    """Return both widths as text: median line and range over seeds.

    E.g. ``measured: sc 1.32 decades, single seeds 1.25–1.40; sa …``.
    """
    parts = []
    for name, found in named:
        widths = found.seed_widths
        spread = f", single seeds {min(widths):.2f}–{max(widths):.2f}" if len(widths) > 1 else ""
        parts.append(
            f"{name} no window"
            if found.median is None
            else f"{name} {width_text(found.median).replace('≥', 'at least')} decades{spread}"
        )
    return f"measured: {'; '.join(parts)}"


def _only_one_diverged(*named: tuple[str, SeriesWindows, Lost]) -> str:
    """Report seeds with a divergence inside the other's window or at every rate. "" if none."""
    told, seeds = "", sorted(named[0][1].by_seed.keys() & named[1][1].by_seed.keys())
    for (name, found, lost), (other, others, _) in (named, named[::-1]):
        inside = sum(_breaks_within(found.by_seed[seed], others.by_seed[seed]) for seed in seeds)
        told += (
            f"; {name} diverged at a rate inside {other}'s window in {inside} of {plural(len(seeds), 'seed')}"
            if inside
            else ""
        )
        told += (
            f"; {name} diverged at every rate in {len(lost)} of {plural(len(seeds), 'seed')}, a window of width 0"
            if lost
            else ""
        )
    return told


def _breaks_within(one: Window | None, other: Window | None) -> bool:
    """Return whether one window borders on a divergence at a rate inside the other."""
    edges = [edge for edge in (one.low, one.high) if edge.kind == "diverged"] if one is not None else []
    return other is not None and any(other.low.lr <= edge.furthest_lr <= other.high.lr for edge in edges)


def within(*results: Comparison) -> str:
    return " within the swept range" if any(result.scope == "range" for result in results) else ""


def _open_note(result: Comparison, *named: tuple[str, SeriesWindows]) -> str:
    """Say that a window reaches the sweep's end and is a lower bound. "" if none does."""
    opened = []
    for name, found in named:
        assert found.median is not None
        ends = [end for end, is_open in (("low", found.median.open_low), ("high", found.median.open_high)) if is_open]
        opened += [f"{name}'s at the {listed(ends)} end{'s' * (len(ends) > 1)}"] if ends else []
    if not opened:
        return ""
    caveat = "" if result.scope == "whole" else ", and beyond the sweep the order may be another"
    return f" Open windows are lower bounds ({listed(opened)}){caveat}."


def unjudged_window(reason: str) -> Claim:
    """Return the first claim as "not judged", for a missing or untrained sa or sc."""
    claimed = wider("sc", "sa")
    text = f"{reason} {claimed} cannot be judged." if reason else f"{sentence(claimed)} cannot be judged here."
    return Claim("window", "not judged", text, "sc's stable window is wider than sa's (validation NLL)")
