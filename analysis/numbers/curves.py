"""Compute the learning curve of each series and rate: the median over its seeds of their smoothed training losses."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import pandas as pd

from analysis.study.load import Column, Frame

Key = tuple[str, float]  # series and rate
Losses = TypeVar("Losses", Column, Frame)


def smoothed(loss: Losses, width: int | None = None) -> Losses:
    """Return the centred running mean over ``width`` steps (a twentieth of the run), of each column by itself;
    non-finite losses are left out, not averaged in."""
    finite = loss.where(np.isfinite(loss))
    return finite.rolling(width or max(1, len(loss) // 20), center=True, min_periods=1).mean().where(finite.notna())


def median_curves(rows: Frame, width: int) -> dict[Key, Frame]:
    """Return by series and rate the columns median, low, high by step, of the losses of its runs, which differ in their
    seed, smoothed over ``width`` steps; median NaN where half of them or more have diverged.

    ``rows``: a row a step, with ``run_id series run_lr step loss diverged``. What has no finite loss has no rows.
    """
    finite = rows[np.isfinite(rows["loss"])].sort_values(["run_id", "step"], kind="stable")
    keys = list(rows.groupby(["series", "run_lr"]).indices)
    if finite.empty:
        return dict.fromkeys(keys, pd.DataFrame(columns=["median", "low", "high"], dtype=float))
    # all runs at once: side by side, what is finite of each without gaps
    place = finite.groupby("run_id").cumcount()
    table = finite.assign(place=place).pivot(index="place", columns="run_id", values="loss")
    means = smoothed(table, width).to_numpy()[place, table.columns.get_indexer(finite["run_id"])]
    lines = finite.assign(loss=means).pivot(index="step", columns="run_id", values="loss")
    runs = finite.groupby("run_id")[["series", "run_lr", "diverged", "step"]].last().loc[lines.columns]
    is_over = np.greater.outer(lines.index.to_numpy(), runs["step"].to_numpy()) & runs["diverged"].to_numpy(dtype=bool)
    own = [runs["series"], runs["run_lr"]]
    middle = lines.mask(is_over, math.inf).T.groupby(own).median().T
    low, high = lines.T.groupby(own).min().T, lines.T.groupby(own).max().T
    found = {key: pd.DataFrame({"median": middle[key], "low": low[key], "high": high[key]}) for key in low}
    none = next(iter(found.values())).iloc[:0]
    return {key: _known(found[key]) if key in found else none for key in keys}


def _known(line: Frame) -> Frame:
    """Return the steps at which a run is left; its median only where it is finite."""
    line = line[line["low"].notna()]
    return line.assign(median=line["median"].where(np.isfinite(line["median"])))
