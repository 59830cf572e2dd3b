"""Define a claim: a statement of a paper as the paper makes it, what was found about it in how many seeds, and a
verdict. Data; other files draw it. And word the seeds, bounds and intervals of its sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.numbers.spread import MOST_SEEDS, seeds_needed

Verdict = Literal["holds", "contradicted", "undecided", "no claim", "not judged"]


@dataclass(frozen=True)
class Claim:
    """A claim's one or two sentences (``text``) on a ``subject``, with what they amount to.

    ``statement``: what the paper says, in its own terms; "" for a remark that is no claim of a paper's, which stands in
    no table of claims. ``n``: the seeds, or runs, that the verdict stands on. ``effect``: what was measured, with its
    unit. ``interval``: of the effect, with what kind of interval it is; "" where there is none.
    """

    subject: str
    verdict: Verdict
    text: str
    statement: str = ""
    n: int = 0
    effect: str = ""
    interval: str = ""


def weight(n: int) -> str:
    """Say how firmly n ≥ 2 seeds let one speak."""
    return f"There are indications ({n} seeds)" if n < 3 else f"The results ({n} seeds) show"


def too_few(n: int) -> str:
    return "A single run each: no claim" if n == 1 else "No seed has results of both: no claim"


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign, and a real minus: +0.46, −0.07."""
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
    """Return an interval with its unit and what kind it is: of two seeds their range, of three or more Student's t."""
    if n < 2:
        return ""
    return f"{bounds(interval, digits)} {unit}, {'range of 2 seeds' if n < 3 else '95 % interval'}"


def would_tell(differences: Sequence[float], margin: float = math.nan) -> str:
    """Say how many seeds would decide, e.g. ``" At this spread about 7 seeds would tell."``; "" where the differences
    are not known exactly, or are of fewer than two seeds."""
    if len(differences) < 2 or not all(math.isfinite(each) for each in differences):
        return ""
    needed = seeds_needed(differences, margin)
    how_many = f"more than {MOST_SEEDS}" if needed is None else f"about {needed}"
    return f" At this difference and spread {how_many} seeds would be needed to tell."


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]
