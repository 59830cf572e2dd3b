"""Define a claim: a statement, the measurement, n and a verdict; and correct the verdicts of many claims.

A claim's verdict has one form everywhere: "Supported (n = 3): sc's window is 0.64 decades wider than sa's (95 %: ≥
+0.10)." / "Not supported" / "Undecided: needs about 17 seeds in all." / "Not resolved by this grid: …".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.numbers.comparison import MOST_RUNS, Comparison
from analysis.numbers.spread import LEVEL, MOST_SEEDS, holm, mean_interval, p_of_bounds, seeds_needed
from analysis.words import power

Verdict = Literal["holds", "contradicted", "undecided", "unresolved", "no claim", "not judged"]
CONSENSUS = "Stabilizing Transformer Training Through Consensus"
ATTENTIONX, MHC_LITE, TOOLKIT = "AttentionX", "mHC-lite", "Frankenstein Transformer"


@dataclass(frozen=True)
class Claim:
    """A statement with its verdict, or a remark about a study.

    Attributes:
        subject: short key, e.g. "window".
        verdict: one of `Verdict`.
        text: one or two sentences.
        statement: the claim in its own terms; "" for a remark, left out of the claims table.
        n: seeds or runs behind the verdict.
        effect: measured value with its unit.
        interval: interval around the effect, with its kind; "" if none.
        paper: the paper that makes the statement; "" for a comparison with the study's reference.
        finding: the measured relation as a clause; `worded` makes the text from it.
        note: further sentences after the finding.
        difference: measured paired difference with its unit.
        test: the comparison behind the verdict. Claims on the same one are counted once (`correct`).
        p: its p-value; NaN without Student's t.
        differences: paired differences by seed, for the seeds needed; () if some are bounds.
        margin: upper limit of a claimed equality; NaN for a claimed difference.
        about: compared quantity and series, for a comparison with the reference.
        more_runs: further runs of `lr=edge` that would resolve it.
        level: two-sided level for the seeds needed.
        is_primary: whether it was declared before the runs, and so is not corrected.
        corrected: corrected p-value as text, of a verdict that the correction turned to "undecided"; else "".
        equal: what the windows at an equal share of the learning say, of a claim on own windows.
        common: what the common windows say, of a paper's claim on own windows.
    """

    subject: str
    verdict: Verdict
    text: str = ""
    statement: str = ""
    n: int = 0
    effect: str = ""
    interval: str = ""
    paper: str = ""
    finding: str = ""
    note: str = ""
    difference: str = ""
    test: tuple[str, ...] = ()
    p: float = math.nan
    differences: tuple[float, ...] = ()
    margin: float = math.nan
    about: tuple[str, str] = ("", "")
    more_runs: int | None = None
    level: float = LEVEL
    is_primary: bool = False
    corrected: str = ""
    equal: str = ""
    common: str = ""


def verdict_words(claim: Claim) -> str:
    """Return a verdict in words, e.g. "Supported (n = 3)" or "Undecided: needs about 17 seeds in all"."""
    if claim.verdict in ("holds", "contradicted"):
        words = {"holds": "Supported", "contradicted": "Not supported"}
        if claim.n == 2:  # two seeds make no result
            words = {"holds": "Indicated", "contradicted": "Indicated against"}
        return f"{words[claim.verdict]} (n = {claim.n})"
    if claim.verdict == "unresolved":
        runs = f"more than {MOST_RUNS}" if claim.more_runs is None else f"about {claim.more_runs}"
        return f"Not resolved by this grid: lr=edge needs {runs} more runs"
    if claim.verdict == "undecided":
        return f"Undecided{seeds_words(claim)}"
    if claim.verdict == "no claim":
        return "No claim: one seed" if claim.n == 1 else "No claim: no seed has both" if not claim.n else "No claim"
    return "Not judged"


def seeds_words(claim: Claim) -> str:
    """Return the seeds needed as text, e.g. ": needs about 17 seeds in all"; "" if they cannot be estimated."""
    known = claim.differences
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return ""
    needed = seeds_needed(known, claim.margin, claim.level)
    return f": needs {f'more than {MOST_SEEDS}' if needed is None else f'about {needed}'} seeds in all"


def word_claim(claim: Claim) -> Claim:
    """Return a claim with its text: verdict, finding with interval, notes."""
    known = f" ({claim.interval})" if claim.interval else ""
    decided = claim.verdict in ("holds", "contradicted")
    opening = f"{verdict_words(claim)}: {claim.finding}" if decided else f"{verdict_words(claim)}. Measured"
    opening += "" if decided else f"{f' (n = {claim.n})' if claim.n > 1 else ''}: {claim.finding}"
    return replace(claim, text=f"{opening}{known}.{claim.note and ' ' + claim.note}")


def verdict_of(result: Comparison, holds_if: int = 1) -> Verdict:
    """Return the verdict of a paired comparison; ``holds_if``: the direction that supports the statement."""
    if result.n < 2:
        return "no claim"
    if result.direction == 0:
        return "undecided" if result.is_resolved else "unresolved"
    return "holds" if result.direction == holds_if else "contradicted"


def decline(subject: str, statement: str, why: str, paper: str = "") -> Claim:
    """Return a claim that is not judged.

    Args:
        subject: its key.
        statement: the claim in its own terms.
        why: the reason, a clause.
        paper: the paper that makes it.
    """
    return Claim(subject, "not judged", f"{statement}: not judged, since {why}.", statement, paper=paper)


def decline_pair(subject: str, statement: str, names: tuple[str, str], why: str, paper: str = "") -> Claim:
    """Return a claim that is not judged, since one of two series learned too little or has no result.

    Args:
        subject: its key.
        statement: the claim in its own terms.
        names: both series, the reference last.
        why: the reason, as of `analysis.numbers.learning.say_lacking`.
        paper: the paper that makes it.
    """
    text = f"{names[0]} is not compared with {names[1]}: {why}."
    return Claim(subject, "not judged", text, statement, paper=paper)


def judge_interval(low: float, high: float, limit: float) -> Verdict:
    """Return the verdict of an interval on "above a limit".

    Args:
        low: lower end.
        high: upper end.
        limit: "holds" above it, "contradicted" below it.
    """
    return judge_sign((low > limit) - (high < limit))


def judge_sign(sign: float) -> Verdict:
    """Return the verdict of a direction, positive if it supports the statement."""
    return "holds" if sign > 0 else "contradicted" if sign < 0 else "undecided"


def judge_mean(claim: Claim, values: Sequence[float], holds_if: int, unit: str, digits: int = 2) -> Claim:
    """Return a claim with the verdict on a mean over seeds, its interval and its text.

    Three or more seeds: Student's t. Two: both must agree. One: no claim.

    Args:
        claim: the claim without these.
        values: one number per seed.
        holds_if: sign of the mean that supports the statement.
        unit: unit of the interval.
        digits: decimals of the interval.
    """
    number, verdict = len(values), "no claim"
    ends = (min(values), max(values)) if number == 2 else mean_interval(values)
    if number > 1:
        verdict = judge_sign(((ends[0] > 0) - (ends[1] < 0)) * holds_if)
    text = interval_text(ends, number, unit, digits)
    judged = replace(claim, verdict=verdict, n=number, interval=text, differences=tuple(values))
    return word_claim(replace(judged, p=p_of_bounds(values, values)))


def require_both(claim: Claim, second: Claim) -> Claim:
    """Return a claim with a verdict only if a second rule, the one at an equal share of the learning, has it too.

    Both tests must reject, so the larger p-value is theirs together. Where they disagree, the second's interval is the
    one that decides.
    """
    decided = ("holds", "contradicted")
    if claim.verdict not in decided:
        return claim
    p_value = math.nan if math.isnan(claim.p + second.p) else max(claim.p, second.p)
    if second.verdict == claim.verdict:
        return replace(claim, p=p_value)
    claim = replace(claim, interval=f"at an equal share {second.interval}")
    if second.verdict in decided:  # each rule has its own verdict, the opposite of the other's
        return replace(claim, verdict="undecided", differences=(), p=max(p_value, 1.0))
    more_runs, differences = second.more_runs, second.differences
    return replace(claim, verdict=second.verdict, differences=differences, more_runs=more_runs, p=p_value)


def correct(claims: Sequence[Claim], primary: tuple[str, ...] = ()) -> list[Claim]:
    """Return claims with Holm's correction over all comparisons with a p-value.

    A decided claim whose corrected p-value exceeds `LEVEL` becomes undecided. Seeds needed are then estimated at the
    level of a single comparison among all. ``primary``: the comparison declared before the runs, which is not
    corrected; () for none.
    """
    claims = [_mark_primary(claim) if primary and claim.test == primary else claim for claim in claims]
    tests = {claim.test: claim.p for claim in _corrected(claims)}
    p_of = dict(zip(tests, holm(list(tests.values())), strict=True))
    return [_correct_one(claim, p_of[claim.test], len(tests)) if claim.test in p_of else claim for claim in claims]


def _corrected(claims: Sequence[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.test and math.isfinite(claim.p) and not claim.is_primary]


def _mark_primary(claim: Claim) -> Claim:
    note = f"The primary claim, declared with the sweep: not corrected. {claim.note}".strip()
    return word_claim(replace(claim, is_primary=True, note=note))


def _correct_one(claim: Claim, p: float, number: int) -> Claim:
    """Return one claim after the correction; unchanged if it is the only one."""
    if number < 2 or not claim.finding:
        return claim
    claim = replace(claim, level=LEVEL / number)
    if claim.verdict not in ("holds", "contradicted") or p <= LEVEL:
        return word_claim(claim)
    note = f"Alone p = {power(claim.p)}, corrected for {number} comparisons {power(p)}. {claim.note}".strip()
    return word_claim(replace(claim, verdict="undecided", note=note, corrected=f"corrected p = {p:.2g}"))


def count_compared(claims: Iterable[Claim]) -> int:
    """Count the comparisons with a judgement, each once; a statement without a test is none."""
    return len({claim.test for claim in claims if claim.test and claim.verdict != "not judged"})


def count_corrected(claims: Sequence[Claim]) -> int:
    """Count the comparisons that Holm's correction is for."""
    return len({claim.test for claim in _corrected(claims)})


def correction_note(claims: Sequence[Claim]) -> str:
    """Name the correction, the numbers of comparisons and the primary claim, with a space at the end."""
    number, primary = count_corrected(claims), {claim.test for claim in claims if claim.is_primary}
    declared = "".join(f"{claim.text} " for claim in claims if claim.subject == "primary")
    if number < 2:
        return declared
    besides = " besides the primary claim" if primary else ""
    untested = count_compared(claims) - number - len(primary)
    over = f"the {number} comparisons of this report{besides}"
    over += f"; {untested} without a p-value {'is' if untested == 1 else 'are'} not among them" if untested else ""
    needed = f"Seeds needed: to decide at a level of 5 % / {number}. "
    is_needed = any(claim.differences for claim in _corrected(claims))
    undone = "; where it undoes a verdict, the corrected p stands beside" if any(c.corrected for c in claims) else ""
    return (
        f"Verdicts stand after Holm's correction over {over}; intervals are "
        f"uncorrected{undone}. {_untested_note(claims)}{declared}{needed if is_needed else ''}"
    )


def _untested_note(claims: Sequence[Claim]) -> str:
    """Return the number of verdicts without a p-value, with a space at the end; "" without any."""
    decided = [each for each in claims if each.verdict in ("holds", "contradicted") and each.n > 2]
    number = sum(math.isnan(each.p) for each in decided)
    if not number:
        return ""
    have = "verdict has" if number == 1 else "verdicts have"
    return f"{number} {have} no p-value and no correction: each run or graph satisfies the statement or not. "


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign and a real minus: +0.46, −0.07."""
    return f"{value:+.{digits}f}".replace("-", "−")


def bounds(interval: tuple[float, float], digits: int = 2) -> str:
    """Return an interval as text: ``"+0.10 to +0.46"``, ``"≥ +0.10"``, ``"unbounded"``."""
    low, high = interval
    if math.isinf(low) and math.isinf(high):
        return "unbounded"
    if math.isinf(high):
        return f"≥ {signed(low, digits)}"
    return f"≤ {signed(high, digits)}" if math.isinf(low) else f"{signed(low, digits)} to {signed(high, digits)}"


def interval_text(interval: tuple[float, float], n: int, unit: str, digits: int = 2) -> str:
    """Return an interval with its kind and unit: range (2 seeds) or Student's t (3 or more).

    Args:
        interval: lower and upper end.
        n: paired seeds; below 2 the text is "".
        unit: unit of both ends.
        digits: decimals.
    """
    return "" if n < 2 else f"{'range' if n < 3 else '95 %'}: {bounds(interval, digits)} {unit}".rstrip()


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]
