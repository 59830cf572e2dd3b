"""Define a claim: a paper's statement, the measurement, n and a verdict.

Also formats seeds, bounds and intervals for its sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.numbers.spread import MOST_SEEDS, seeds_needed

Verdict = Literal["holds", "contradicted", "undecided", "no claim", "not judged"]


@dataclass(frozen=True)
class Claim:
    """A paper's statement with its verdict, or a remark about a study.

    Attributes:
        subject: short key, e.g. "window".
        verdict: one of `Verdict`.
        text: one or two sentences.
        statement: the paper's claim in its own terms; "" for a remark, left out of the claims table.
        n: seeds or runs behind the verdict.
        effect: measured value with its unit.
        interval: interval around the effect, with its kind; "" if none.
    """

    subject: str
    verdict: Verdict
    text: str
    statement: str = ""
    n: int = 0
    effect: str = ""
    interval: str = ""


def weight(n: int) -> str:
    """Return the opening phrase for evidence from n ≥ 2 seeds."""
    return f"There are indications ({n} seeds)" if n < 3 else f"The results ({n} seeds) show"


def too_few(n: int) -> str:
    return "A single run each: no claim" if n == 1 else "No seed has results of both: no claim"


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign and a real minus: +0.46, −0.07."""
    return f"{value:+.{digits}f}".replace("-", "−")


def bounds(interval: tuple[float, float], digits: int = 2) -> str:
    """Return an interval as text: ``"+0.10 to +0.46"``, ``"at least +0.10"``, ``"unbounded"``."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return "unbounded"
    if math.isinf(high):
        return f"at least {signed(low, digits)}"
    return f"at most {signed(high, digits)}" if math.isinf(low) else f"{signed(low, digits)} to {signed(high, digits)}"


def interval_text(interval: tuple[float, float], n: int, unit: str, digits: int = 2) -> str:
    """Return an interval with its unit and kind: range (2 seeds) or Student's t (3 or more).

    Args:
        interval: lower and upper end.
        n: paired seeds; below 2 the text is "".
        unit: unit of both ends.
        digits: decimals.
    """
    if n < 2:
        return ""
    return f"{bounds(interval, digits)} {unit}, {'range of 2 seeds' if n < 3 else '95 % interval'}"


def would_tell(differences: Sequence[float], margin: float = math.nan) -> str:
    """Say how many seeds would decide, e.g. ``"… about 7 seeds would be needed to tell."``.

    Returns "" below two seeds, or if a difference is not finite. With a ``margin``, the interval must lie below the
    margin; otherwise 0 must be excluded.
    """
    if len(differences) < 2 or not all(math.isfinite(each) for each in differences):
        return ""
    needed = seeds_needed(differences, margin)
    how_many = f"more than {MOST_SEEDS}" if needed is None else f"about {needed}"
    return f" At this difference and spread {how_many} seeds would be needed to tell."


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]
