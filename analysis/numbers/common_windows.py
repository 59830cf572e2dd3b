"""Compute windows by limits that two series share: the NLL, or the share of what was learned.

A mechanism's own window grows as its best NLL gets worse. The common window, within 5 % of the reference's best NLL,
has one limit for all, so it also shrinks for a mechanism that learns less. Windows at an equal share do neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.numbers.learning import reasons_untrained
from analysis.numbers.windows import VALIDATION, SeriesWindows, Window, median_line, outcomes, window, windows
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.study.reference import frequency_nll, references, unlearned

THRESHOLDS = 80  # points of a curve of widths


@once_per_study
def common_windows(study: Study, column: str = VALIDATION) -> dict[str, SeriesWindows]:
    """Return every series' windows below its reference's limit, in the study's order.

    Each seed's limit is the reference's of the same seed. Seeds without one are left out. The reference's common window
    is its own. A series without a reference is left out, as is one whose reference learned nothing.
    """
    own, pairs, lacking = windows(study, column=column), references(study), reasons_untrained(study)
    found = {}
    for series in study.series:
        reference = own[pairs.get(series, series)]
        is_compared = series in pairs or series in pairs.values()
        if not is_compared or lacking[reference.series] or reference.median is None:
            continue
        table = outcomes(study, series, column)
        by_seed = {
            seed: _below(table[seed], limit)
            for seed in own[series].by_seed
            if (limit := reference.by_seed.get(seed)) is not None
        }
        found[series] = SeriesWindows(series, _below(median_line(table), reference.median), by_seed)
    return found


@once_per_study
def rank_variants(study: Study) -> list[str]:
    """Return the series by the upper edge of their common window, the largest first; [] but in an ablation over rates.

    An open edge counts as the largest swept rate. A series that learned too little for a window, or that never reaches
    the limit, comes last.
    """
    if not (study.runs["variant"] != "").any() or study.runs["lr"].nunique() < 2:
        return []
    found = {name: each.median for name, each in common_windows(study).items()}
    if set(found) != set(study.series):
        return []
    lacking = reasons_untrained(study)
    edges = {
        name: 0.0 if each is None or each.is_empty or lacking[name] else each.high.lr for name, each in found.items()
    }
    return sorted(study.series, key=lambda name: -edges[name])


def shorten_variant(study: Study, series: str) -> str:
    """Return a series' name without the one base of a study: ``clip_norm=1`` of ``sa clip_norm=1``."""
    bases = set(study.runs["base"])
    return series.removeprefix(f"{next(iter(bases))} ") if len(bases) == 1 else series


def _below(line, limit: Window) -> Window | None:
    return window(line.index, line, limit=limit.threshold_nll)


@dataclass(frozen=True)
class EqualShare:
    """One series' windows at the share of learning that another's own windows allow to lose.

    Attributes:
        share: of the nats between best NLL and token frequencies, on the other's median line.
        found: the windows.
    """

    share: float
    found: SeriesWindows


def equal_share(study: Study, first: str, second: str) -> EqualShare | None:
    """Return the first's windows at the second's share, by seed; None if a token-frequency NLL is unknown.

    5 % of a best NLL costs a mechanism that learned less a larger share of its learning. Here both may lose the same
    share, the one that 5 % is for the second. A seed without that share keeps the first's own window.

    Args:
        study: supplies the runs.
        first: name of one series.
        second: name of the other.
    """
    own = windows(study)
    ours, theirs = (unlearned(study, name).nll for name in (first, second))
    median = own[second].median
    if math.isnan(ours) or median is None or math.isnan(_share(median, theirs)):
        return None
    table = outcomes(study, first)
    by_seed = {
        seed: _at_share(table[seed], one, own[second].by_seed.get(seed), (ours, theirs))
        for seed, one in own[first].by_seed.items()
    }
    line = _at_share(median_line(table), own[first].median, median, (ours, theirs))
    return EqualShare(_share(median, theirs), SeriesWindows(first, line, by_seed))


def _share(found: Window | None, unigram: float) -> float:
    """Return the share of its learning that a window allows to lose; NaN without learning."""
    gain = math.nan if found is None else unigram - found.best_nll
    return (found.threshold_nll - found.best_nll) / gain if found is not None and gain > 0 else math.nan


def _at_share(line, own: Window | None, other: Window | None, unigrams: tuple[float, float]) -> Window | None:
    share = _share(other, unigrams[1])
    if own is None or math.isnan(share):
        return own
    return window(line.index, line, limit=own.best_nll + share * (unigrams[0] - own.best_nll))


def widths_by_threshold(study: Study, column: str = VALIDATION) -> dict[str, Frame]:
    """Return each trained series' window width as a function of the NLL threshold.

    The thresholds reach from the lowest NLL to the token-frequency NLL, or to 25 % above the lowest if it is unknown.

    Returns:
        By series: ``threshold`` (nats), ``width`` (decades) on the median line, and ``is_bound``: the window reaches
        the sweep's end or a rate without a result. A curve begins at the series' best NLL.
    """
    lacking, own = reasons_untrained(study), windows(study, column=column)
    lines = {
        name: median_line(outcomes(study, name, column))
        for name in study.series
        if not lacking[name] and own[name].median is not None
    }
    if not lines:
        return {}
    lowest = min(float(line.min()) for line in lines.values())
    unigram = frequency_nll(study.runs) if column == VALIDATION else math.nan
    highest = unigram if unigram > lowest else lowest + 0.25 * abs(lowest)
    found = {}
    for name, line in lines.items():
        limits = [float(line.min()), *(each for each in np.linspace(lowest, highest, THRESHOLDS) if each > line.min())]
        each = [window(line.index, line, limit=limit) for limit in limits]
        rows = [(one.threshold_nll, one.width, one.open_low or one.open_high) for one in each if one is not None]
        found[name] = pd.DataFrame(rows, columns=["threshold", "width", "is_bound"])
    return found
