"""Convert learning rates in a study with `lr=scaled` into multiples of each optimizer's reference rate.

Rates of two optimizers have different units. After conversion no table or figure mixes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    Frame = Any
    Column = Any
else:
    Frame, Column = pd.DataFrame, pd.Series

# Columns in units of a learning rate, in all tables.
RATES = (
    "lr", "alpha", "alpha_max", "parity_alpha_max", "critical_lr", "best_lr", "best_low", "best_high", "verdict_lr",
    "verdict_next_lr", "nll_lr", "nll_next_lr", "lowest_lr", "highest_lr",
)  # fmt: skip
TEXTS = ("verdict_exceptions", "nll_exceptions")  # rates separated by spaces
ROUNDING = 0.006  # largest relative error of a rate rounded to three digits
TOLD = "LR and α_max are multiples of each optimizer's reference rate."


def references(manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return each optimizer's reference rate from ``study.json``; {} if not recorded."""
    return dict(manifest.get("lr_references") or {})


def are_rates_of_their_own(manifest: Mapping[str, Any]) -> bool:
    """Return whether a study swept multiples of differing reference rates."""
    return bool(manifest.get("lr_multiples")) and len(set(references(manifest).values())) > 1


def convert_tables(
    frames: Mapping[str, Frame], extra: Mapping[str, Mapping[str, Frame]], manifest: Mapping[str, Any]
) -> tuple[dict[str, Frame], dict[str, dict[str, Frame]]]:
    """Return a study's tables with `convert`ed rates.

    Args:
        frames: required tables by name, as read by `analysis.study.load`.
        extra: optional tables by kind and name.
        manifest: content of ``study.json``.
    """
    own, nominal, runs = references(manifest), manifest["lr_multiples"], frames["runs"]
    by_run = {run: own[name] for run, name in zip(runs["run_id"], runs["optimizer"], strict=True) if name in own}
    found = {name: convert(each, by_run, nominal if name == "runs" else ()) for name, each in frames.items()}
    more = {
        kind: {name: convert(each, by_run, nominal if kind == "searches" else ()) for name, each in tables.items()}
        for kind, tables in extra.items()
    }
    return found, more


def convert(frame: Frame, by_run: Mapping[str, float], nominal: Sequence[float] = ()) -> Frame:
    """Return a table with its `RATES` divided by each run's reference rate.

    Args:
        frame: table with ``run_id``.
        by_run: reference rate by run id.
        nominal: swept multiples, for tables of runs' rates: a rate rounded to three digits becomes its multiple again.
            Other rates (`lr=edge`) are rounded to three digits. () for measurements: no rounding.
    """
    if "run_id" not in frame or frame.empty:
        return frame
    scale = frame["run_id"].map(by_run).astype(float).fillna(1.0)
    changed = {name: frame[name] / scale for name in RATES if name in frame}
    if nominal:
        changed = {name: column.map(lambda rate: _nearest(rate, nominal)) for name, column in changed.items()}
    for name in (each for each in TEXTS if each in frame):
        changed[name] = pd.Series(
            [
                " ".join(f"{_nearest(float(rate) / by, nominal):g}" for rate in text.split())
                for text, by in zip(frame[name], scale, strict=True)
            ],
            index=frame.index,
            dtype=object,
        )
    return frame.assign(**changed)


def _nearest(rate: float, nominal: Sequence[float]) -> float:
    """Return the swept multiple equal to a rate up to rounding. Other rates are rounded to three digits."""
    if pd.isna(rate) or not nominal:
        return rate
    best = min(nominal, key=lambda each: abs(each - rate))
    return best if abs(best - rate) <= ROUNDING * best else float(f"{rate:.3g}")
