"""The ends of runs for readers: recorded states, but `exploded` or `learned nothing` for a plateaued run."""

from __future__ import annotations

import pandas as pd

from analysis.study.load import Column, Frame
from stability.runs.words import is_exploded, shown_state


def shown_states(runs: Frame) -> Column:
    """Return each run's state as tables and sentences name it (`stability.runs.words.shown_state`)."""
    rows = zip(runs["status"], runs["val_nll"], runs["init_nll"], strict=True)
    return pd.Series([shown_state(*row) for row in rows], runs.index, dtype=object, name="status")


def exploded(runs: Frame) -> Column:
    """Return for each run whether its finite NLL lies above that of its untrained model."""
    pairs = zip(runs["val_nll"], runs["init_nll"], strict=True)
    return pd.Series([is_exploded(*pair) for pair in pairs], runs.index, dtype=bool)
