"""How residual schemes compare with the plain residual in one study: best NLL and stable window, seed by seed, under the rules of `claims`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from analysis.compare import Comparison, compare_windows, decide
from analysis.load import SETTING_AXES, Study
from analysis.spread import listed, plural
from analysis.stability_window import SeriesWindows, outcomes
from analysis.tables import width_text

PLAIN = "identity"
Sentence = tuple[str, str, str]  # subject, verdict, text


def compares_residuals(study: Study) -> bool:
    """Whether plain and other residual schemes stand beside each other."""
    residuals = set(study.runs["residual"])
    return PLAIN in residuals and len(residuals) > 1


def sentences(study: Study, found: Mapping[str, SeriesWindows], shortfalls: Mapping[str, str]) -> Iterator[Sentence]:
    """About each scheme beside the plain one of the same mechanism and otherwise equal setting. ``shortfalls``: by series, why it learned too little ("" where
    it did not)."""
    for plain, others in _pairs(study):
        for other in others:
            if lacking := [name for name in (plain, other) if shortfalls[name]]:
                yield f"residual {other}", "not judged", f"{other} is not compared with {plain}: {listed(lacking)} learned too little."
                continue
            yield _best(study, other, plain)
            yield _window(found[other], found[plain])


def _pairs(study: Study) -> Iterator[tuple[str, list[str]]]:
    """A plain series and those that differ from it in their residual alone."""
    axes = ["mechanism", *(axis for axis in SETTING_AXES if axis not in ("residual", "variant"))]
    rows = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    for _, group in rows.groupby(axes, sort=False, dropna=False):
        plain = group.loc[group["residual"] == PLAIN, "series"]
        others = set(group.loc[group["residual"] != PLAIN, "series"])
        if len(plain):
            yield str(plain.iloc[0]), [name for name in study.series if name in others]


def _best(study: Study, other: str, plain: str) -> Sentence:
    """Each seed's lowest NLL over the rates that both were trained at."""
    tables = [outcomes(study, name) for name in (other, plain)]
    rates, seeds = (sorted(set(getattr(tables[0], axis)) & set(getattr(tables[1], axis))) for axis in ("index", "columns"))
    lowest = [table.loc[rates, seeds].min(axis=0) for table in tables]
    pairs = [(a, b) for a, b in zip(*lowest, strict=True) if math.isfinite(a) and math.isfinite(b)]
    differences = [a - b for a, b in pairs]
    subject, numbers = f"best NLL {other}", "{}: {:.3f} against {:.3f}".format("medians", *np.median(pairs, axis=0)) if pairs else "no seed has both"
    if len(pairs) < 2:
        return subject, "no claim", f"On the best NLL of {other} and {plain}, no claim is made with {plural(len(pairs), 'seed')} ({numbers})."
    direction, interval = decide(differences, differences)
    numbers += f"; paired difference {_signed(interval[0])} to {_signed(interval[1])}, n={len(pairs)}{', 95 % interval' if len(pairs) > 2 else ''}"
    if direction == 0:
        return subject, "undecided", f"Whether {other} reaches a lower NLL than {plain} at its best rate stays undecided ({numbers})."
    relation, verdict = ("lower", "holds") if direction < 0 else ("higher", "contradicted")
    return subject, verdict, f"{_weight(len(pairs))} that {other} reaches a {relation} NLL than {plain}, each at its best rate ({numbers})."


def _window(other: SeriesWindows, plain: SeriesWindows) -> Sentence:
    result: Comparison = compare_windows(other, plain)
    widths = [f"{each.series} {width_text(each.median).replace('≥', 'at least')} decades" for each in (other, plain) if each.median is not None]
    subject, numbers = f"window {other.series}", "; ".join(widths)
    both = f"{other.series}'s stable window is {{}} than {plain.series}'s"
    if result.n < 2:
        return subject, "no claim", f"On the stable windows of {other.series} and {plain.series}, no claim is made with {plural(result.n, 'seed')} ({numbers})."
    if result.direction == 0:
        return subject, "undecided", f"Whether {both.format('wider')} stays undecided: {result.why_undecided} ({numbers})."
    within = " within the swept range" if result.scope == "range" else ""
    relation, verdict = ("wider", "holds") if result.direction > 0 else ("narrower", "contradicted")
    return subject, verdict, f"{_weight(result.n)} that {both.format(relation)}{within} ({numbers})."


def _weight(n: int) -> str:
    return f"There are indications ({n} seeds)" if n < 3 else f"The results ({n} seeds) show"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
