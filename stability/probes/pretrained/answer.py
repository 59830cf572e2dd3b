"""Summarise the measured rows of each learning rate in a table and sentences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from stability.curvature import NOT_DEFINED


def answer(rows: pd.DataFrame) -> str:
    """Return a table with a line per rate and state, and its verdicts.

    Verdicts: whether nine steps in ten stay below α_max at each requested rate, any divergence, and the ratio between
    the two states.
    """
    undefined: Any = rows[rows["method"] == NOT_DEFINED]
    defined: Any = rows[rows["method"] != NOT_DEFINED]
    lines = [
        f"{'lr':>9}  {'state':6} {'median α_max':>12} {'10 % quantile':>14} {'stable':>7} {'loss fell':>10}  method, "
        "against differences"
    ]
    states, verdicts = list(dict.fromkeys(defined["state"])), []
    for lr in sorted(set(defined["lr"])):
        for state in states:
            part: Any = defined[(defined["lr"] == lr) & (defined["state"] == state)]
            lines.append(_line(part, lr, state))
            if state == "plain" or "plain" not in states:
                verdicts.append(_verdict(part, lr))
            elif part["alpha_max"].isna().any():
                verdicts.append(_divergence(part, f"lr={lr:g}, state {state}"))
    verdicts += (
        [f"{len(undefined)} steps have no α_max and are left out: {undefined['note'].iloc[0]}"]
        if len(undefined)
        else []
    )
    return "\n".join([*lines, "", *verdicts, *_ratios(defined)])


def _line(part: Any, lr: float, state: str) -> str:
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    stable, fell = 100 * (part["alpha_max"] > lr).mean(), 100 * (part["loss_after"] < part["loss_before"]).mean()
    error = part["rel_error"].dropna()
    check = f"{error.iloc[0]:.1e}" if len(error) else "--"
    return (
        f"{lr:9.3g}  {state:6} {median:12.3g} {low:14.3g} {stable:6.0f}% {fell:9.0f}%  "
        f"{', '.join(dict.fromkeys(part['method']))}, {check}"
    )


def _ratios(rows: pd.DataFrame) -> list[str]:
    """Return a sentence per rate: median α_max in state paper over state plain.

    Medians are over finite positive values; no sentence if a state has none.
    """
    known: Any = rows[np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    sentences = []
    for lr in sorted(set(rows["lr"])):
        paper, plain = (
            known["alpha_max"][(known["lr"] == lr) & (known["state"] == state)] for state in ("paper", "plain")
        )
        if len(paper) and len(plain):
            ratio = f"{paper.median() / plain.median():.2g} times that of state plain"
            sentences.append(
                f"lr={lr:g}: state paper (the warm-up of 5.2.1) has a median α_max {ratio} (finite positive steps, "
                f"n={len(paper)} and {len(plain)})"
            )
    return sentences


def _divergence(part: Any, where: str) -> str:
    lost = int(part["alpha_max"].isna().sum())
    origin = part["note"].dropna().iloc[:1].tolist() if "note" in part else []
    return (
        f"{where}: it diverged. {lost} of {len(part)} recorded steps were lost to a loss or a gradient that is not "
        "finite" + "".join(f": {o}" for o in origin)
    )


def _verdict(part: Any, lr: float) -> str:
    """Describe one rate: nine in ten steps, half, or fewer stay below α_max, or divergence."""
    if part["alpha_max"].isna().any():
        return _divergence(part, f"lr={lr:g}")
    median, low = quantile(part["alpha_max"], 0.5), quantile(part["alpha_max"], 0.1)
    word = (
        "its curvature allows it"
        if low > lr
        else "at the edge: more than one step in ten is beyond"
        if median > lr
        else "too high"
    )
    if math.isinf(low):
        return f"lr={lr:g}: {word}. Along nine steps in ten the curvature is not positive and limits no rate"
    return (
        f"lr={lr:g}: {word}. Half of the steps allow {median:.3g}, nine in ten {low:.3g} ({low / lr:.2g} times the "
        "rate asked about)"
    )


def quantile(values: Any, share: float) -> float:
    """Return the column's value at or just below the quantile; ∞ sorts last.

    A step lost to a non-finite loss counts as 0.
    """
    ordered = np.sort(values.fillna(0.0).to_numpy(dtype=float))
    return float(ordered[math.floor(share * (len(ordered) - 1))])
