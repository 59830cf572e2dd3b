"""Rank correlation and recall of sentence embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np


def correlations(cosines_M: np.ndarray, scores_M: np.ndarray) -> tuple[float, float]:
    """Return Spearman's and Pearson's correlation; NaN where either is constant.

    Ties have their mean rank.
    """
    from scipy.stats import pearsonr, spearmanr  # takes seconds, which every command would pay

    if not (np.isfinite(cosines_M).all() and np.ptp(cosines_M) > 0 and np.ptp(scores_M) > 0):
        return float("nan"), float("nan")
    found: list[Any] = [spearmanr(cosines_M, scores_M), pearsonr(cosines_M, scores_M)]
    return float(found[0].statistic), float(found[1].statistic)


def recalls(cosines_MM: np.ndarray, is_equal_MM: np.ndarray, ks: tuple[int, ...]) -> list[float]:
    """Return the share of rows whose own column is among the k largest, for each k.

    Ties count against the row's own column, so equal embeddings of everything recall nothing.

    Args:
        cosines_MM: similarity of first sentence i and second sentence j.
        is_equal_MM: whether second sentences i and j are equal; such columns do not compete.
        ks: the k.
    """
    own_M = np.diag(cosines_MM)
    better_M = ((cosines_MM >= own_M[:, None]) & ~is_equal_MM).sum(1)
    return [float((better_M < k).mean()) if np.isfinite(own_M).all() else float("nan") for k in ks]
