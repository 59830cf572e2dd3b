"""Compute how doubly stochastic the mixing matrices of residual streams are, from what `stability.probe what=streams`
wrote."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis.study.load import Column, Frame

NAME = "streams"
RUN = ["order", "series", "run_lr", "seed"]


def iterations_of(rows: Frame) -> list[float]:
    """Return every number K of Sinkhorn's iterations among the runs; [] where none has any."""
    return sorted(set(rows.loc[rows["quantity"] == "iterations", "value"]))


def thresholds(rows: Frame) -> dict[str, float]:
    """Return, by run with iterations, the ln(1/ν) above which its ``beyond`` counts outliers: as its probe wrote it,
    else K, which a probe took before there was a setting."""
    own = rows[rows["quantity"] == "threshold"].groupby("run_id")["value"].first()
    older = rows[rows["quantity"] == "iterations"].groupby("run_id")["value"].first()
    return {str(run_id): float(own.get(run_id, number)) for run_id, number in older.items()}


def example(iterations: int) -> tuple[float, tuple[float, ...]]:
    """Return ln(1/ν) and the column sums of the paper's own example (Section 1) after Sinkhorn's iterations, columns
    before rows.

    The example is [[1,d,d],[1,d,d],[d,1,1]] with d = 1e-13, after Linial et al. (1998).
    """
    d = 1e-13
    logits = np.log(np.array([[1, d, d], [1, d, d], [d, 1, 1]]))
    m = logits.copy()
    for _ in range(iterations):
        m -= np.logaddexp.reduce(m, axis=0, keepdims=True)
        m -= np.logaddexp.reduce(m, axis=1, keepdims=True)
    return float(logits.max() - logits.min()), tuple(float(total) for total in np.exp(m).sum(0))


def by_run(rows: Frame, matrix: str, quantity: str, which: str) -> Column:
    """Return a number a run by `RUN`: of ``single`` matrices over all connections, of products those through all
    depth."""
    part = rows[(rows["matrix"] == matrix) & (rows["quantity"] == quantity)]
    if matrix == "single":
        part = part[part["connection"].isna()]
    elif len(part):
        ends = part.groupby("run_id")["connection"].transform("max" if matrix == "product" else "min")
        part = part[part["connection"] == ends]
    take: dict[str, Callable[[Column], float]] = {
        "largest": np.max,
        "share": np.max,
        "error": lambda sums: float(np.abs(sums - 1).max()),
    }
    return (
        part.groupby(RUN)["value"].agg(take[which])
        if len(part)
        else pd.Series(dtype=float, index=pd.MultiIndex.from_arrays([[]] * len(RUN), names=RUN))
    )
