"""Judge mHC-lite's claims (arXiv:2601.05732) on throughput and gradient norms.

Each claim compares two series. If the study lacks the data, the claim's text names the measurement to run. n counts
seeds, for throughput turns. One seed makes no claim; two make "indications" if both agree. Three or more make "results"
if a 95 % interval of the ratio, on a logarithmic scale, excludes equality.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from analysis.claims.claim import Claim, Verdict, word_claim
from analysis.numbers.side_by_side import FEWEST_TURNS, Ratio, ratio
from analysis.numbers.spread import Mean, p_beyond
from analysis.numbers.windows import tabulate
from analysis.study.load import HAS_RESULT, Frame, Study
from analysis.words import lr_text, plural

# norms closer than this count as equal: two schemes with equal starts agree to five digits for a while
SAME_NORM = 0.005
NEGLIGIBLE_SLOWDOWN = 0.05  # our choice: the paper's "negligible" has no number


def throughput_claim(study: Study, other: str, plain: str, *, statement: str, least: float = 1.0) -> Claim:
    """Judge whether ``other`` trains at more than ``least`` times the throughput of ``plain``.

    Only turns measured side by side count.

    Args:
        study: supplies the measured turns.
        other: series to judge.
        plain: reference series.
        statement: the paper's claim.
        least: ratio to exceed; 1.0 tests for a higher throughput.
    """
    subject, found = f"throughput {other} beside {plain}", ratio(study, other, plain)
    if found is None:
        text = (
            f"Not judged: the throughput of {other} beside {plain}. The runs' own clocks hold what else the machine "
            f"did; python -m benchmarks.throughput runs/studies/{study.name} measures them side by side."
        )
        return Claim(subject, "not judged", text, statement)
    numbers = (
        f"{found.median:.3f} times that of {plain}, {_interval_text(found)}, {plural(found.turns, 'turn')} side by "
        f"side on {study.throughput['device']}"
    )
    effect, known = f"{found.median:.3f} times the throughput", _interval_text(found)
    judged = partial(Claim, subject, statement=statement, n=found.turns, effect=effect)
    if found.turns < FEWEST_TURNS:
        text = f"On the throughput of {other} no claim is made with {plural(found.turns, 'turn')} ({numbers})."
        return judged("no claim", text)
    verdict: Verdict = "holds" if found.low > least else "contradicted" if found.high < least else "undecided"
    said = {"holds": "is", "contradicted": "is not", "undecided": "cannot be told to be"}[verdict]
    what = "higher" if least == 1.0 else f"at least {100 * least:.0f} % of it"
    return judged(verdict, f"The throughput of {other} {said} {what} ({numbers}).", interval=known)


def _interval_text(found: Ratio) -> str:
    return (
        f"95 % interval of the median over turns {found.low:.3f} to {found.high:.3f}"
        if found.turns >= FEWEST_TURNS
        else "too few turns for an interval"
    )


def gradient_norm_claim(study: Study, other: str, plain: str, *, statement: str) -> Claim:
    """Judge whether gradients in ``other`` have a smaller norm than in ``plain``.

    Each run contributes its median norm over steps, before clipping. Runs are paired by rate and seed, over rates
    finished by all runs on both sides. The ratio is a geometric mean over rates, per seed.

    Args:
        study: supplies runs and curves.
        other: series to judge.
        plain: reference series.
        statement: the paper's claim.
    """
    subject = f"gradient norm {other} beside {plain}"
    norms = study.curves[study.curves["grad_norm"] > 0].groupby("run_id")["grad_norm"].median()
    tables = [_tabulate(study.of(name), norms) for name in (other, plain)]
    shared = tables[0].index.intersection(tables[1].index)
    seeds = tables[0].columns.intersection(tables[1].columns)
    logs = np.log(tables[0].loc[shared, seeds] / tables[1].loc[shared, seeds]).dropna()
    if logs.empty:
        text = (
            f"Not judged: gradient norms of {other} beside {plain}; at no learning rate did every run of both finish "
            "with norms kept."
        )
        return Claim(subject, "not judged", text, statement)
    per_seed = np.exp(logs.mean(axis=0))
    found, rates = Mean.of(per_seed, is_positive=True), "rate" if len(logs) == 1 else "rates"
    low, high = found.low, found.high
    kind = "range" if found.n < 3 else "95 %"
    verdict: Verdict = "holds" if high < 1 - SAME_NORM else "contradicted" if low > 1 + SAME_NORM else "undecided"
    effect, at = f"{found.mean:.3f} times the norm", ", ".join(map(lr_text, logs.index))
    logs_by_seed = np.log(per_seed)
    below = (np.log1p(-SAME_NORM) - logs_by_seed).tolist()
    above = (logs_by_seed - np.log1p(SAME_NORM)).tolist()
    return word_claim(
        Claim(
            subject,
            "no claim" if found.n < 2 else verdict,
            statement=statement,
            n=found.n,
            effect=effect,
            interval=f"{kind}: {low:.3f} to {high:.3f}" if found.n > 1 else "",
            finding=f"{other}'s gradient norm is {found.mean:.3f} times {plain}'s at the {rates} {at}",
            test=("gradient norm", other, plain),
            p=min(p_beyond(below), p_beyond(above)),
            differences=tuple(below if found.mean < 1 else above),
        )
    )


def _tabulate(runs: Frame, norms: Frame) -> Frame:
    """Return a table, learning rate × seed, restricted to rates finished by every run."""
    kept = runs.groupby("lr").filter(lambda part: part["status"].isin(HAS_RESULT).all())
    norm = kept["run_id"].map(norms)
    return tabulate(kept[norm.notna()], norm.dropna(), "first")
