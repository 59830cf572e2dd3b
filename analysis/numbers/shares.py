"""Compute the window of a share that an objective validates, e.g. of its accuracy: the learning rates around the best
one at which it is at least 95 % of the best."""

from __future__ import annotations

from analysis.numbers.windows import SeriesWindows, median_line, outcomes, window
from analysis.study.load import Frame, Study

KEPT = 0.95  # of the best share
RECALL = "recall"  # the objective that is judged by its answers


def compares_recall(study: Study) -> bool:
    """Return whether every run of a study is judged by its answers."""
    return not study.is_search and set(study.runs["objective"]) == {RECALL}


def shortfalls(study: Study, series: str, column: str) -> Frame:
    """Return a table, LR × seed, of each run's share with its sign turned, so that less is better as of an NLL: ∞ where
    the run diverged, NaN where there is no result."""
    return outcomes(study, series, column).map(lambda share: share if share == float("inf") else -share)


def share_windows(study: Study, column: str) -> dict[str, SeriesWindows]:
    """Return the windows of every series of a study, in the study's order, on the share in ``column``; as
    `analysis.numbers.windows.windows` on the NLL, whose ``best_nll`` and ``threshold_nll`` are the negative of a share
    here."""
    found = {}
    for series in study.series:
        table = shortfalls(study, series, column)
        line = median_line(table)
        by_seed = {
            int(seed): window(table.index, table[seed], 1 - KEPT) for seed in table.columns if table[seed].notna().any()
        }
        found[series] = SeriesWindows(series, window(line.index, line, 1 - KEPT), by_seed)
    return found
