"""Reduce the probed singular values of W_qᵀW_k to one number per head."""

from __future__ import annotations

import numpy as np

from analysis.study.load import Frame


def qk_heads(rows: Frame) -> Frame:
    """Return spectral norm and condition number of W_qᵀW_k, one row per head.

    The condition number is ∞ for a zero singular value.
    """
    keys = ["order", "series", "run_lr", "seed", "phase", "layer", "head"]
    ends = rows.groupby(keys)["singular_value"].agg(["max", "min"]).reset_index()
    with np.errstate(divide="ignore"):
        return ends.assign(norm=ends["max"], condition=ends["max"] / ends["min"])
