"""Find the runs that end a window at either side, and describe the ends of runs for readers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from analysis.numbers.learning import reasons_untrained
from analysis.numbers.windows import windows
from analysis.study.load import ENDED, Column, Frame, Study
from analysis.study.once import once_per_study
from stability.runs.words import EXPLODED, LEARNED_NOTHING, is_exploded, shown_state

# By severity: of two equally frequent outcomes the first one names the end.
OUTCOMES = ("diverged", EXPLODED, "spiked", LEARNED_NOTHING, "stable")
EXPLAINED = (
    "Ends: the most frequent outcome at the first rate outside. Slow: its runs ended stable, but with a higher NLL "
    "than the window admits; learned nothing: no better than the baseline of frequencies; exploded: above the "
    "untrained model's NLL"
)


@dataclass(frozen=True)
class End:
    """One end of a window.

    Attributes:
        reason: most frequent outcome at the first rate outside (stable: "slow"), "no result" or "end of the grid".
        lr: that rate; NaN at the end of the grid.
        runs: runs with this outcome.
        of: runs with a result there.
    """

    reason: str
    lr: float = math.nan
    runs: int = 0
    of: int = 0


@once_per_study
def window_ends(study: Study) -> dict[str, tuple[End, End]]:
    """Return what ends each series' own window at the low and at the high side.

    Series that learned nothing, or without a window, are left out.
    """
    lacking, found = reasons_untrained(study), {}
    for name, each in windows(study).items():
        if each.median is not None and not lacking[name]:
            low, high = (end_at(study.of(name), edge.outside_lr) for edge in (each.median.low, each.median.high))
            found[name] = low, high
    return found


def end_at(runs: Frame, lr: float) -> End:
    """Return the most frequent outcome of the runs at a rate; 0 or ∞: the grid's end, or a rate without a result."""
    if lr == 0 or math.isinf(lr):
        return End("end of the grid")
    there = runs[(runs["lr"] == lr) & runs["status"].isin(ENDED)]
    if there.empty:
        return End("no result", lr)
    ends = shown_states(there)
    counts = {state: int((ends == state).sum()) for state in OUTCOMES}
    most = max(counts, key=lambda state: counts[state])
    return End("slow" if most == "stable" else most, lr, counts[most], len(there))


def shown_states(runs: Frame) -> Column:
    """Return each run's state as tables and sentences name it (`stability.runs.words.shown_state`)."""
    rows = zip(runs["status"], runs["val_nll"], runs["init_nll"], strict=True)
    return pd.Series([shown_state(*row) for row in rows], runs.index, dtype=object, name="status")


def exploded(runs: Frame) -> Column:
    """Return for each run whether its finite NLL lies above that of its untrained model."""
    pairs = zip(runs["val_nll"], runs["init_nll"], strict=True)
    return pd.Series([is_exploded(*pair) for pair in pairs], runs.index, dtype=bool)
