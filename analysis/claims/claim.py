"""Define a claim: a statement of a paper as the paper makes it, what was found about it in how many seeds, and a
verdict. Data; other files draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
