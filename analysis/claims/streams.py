"""Judge the mHC-lite paper's claims on residual streams' mixing, from the probed matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.claims.claim import Claim, Verdict, judge_interval, judge_mean, signed, word_claim
from analysis.numbers.spread import Mean, Spread, p_of_bounds
from analysis.numbers.windows import SeriesWindows
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.words import lr_text, plural, power

NAME = "streams"
RUN = ["order", "series", "run_lr", "seed"]


def iterations_of(rows: Frame) -> list[float]:
    """Return every Sinkhorn iteration number K among the runs; [] if none uses iterations."""
    return sorted(set(rows.loc[rows["quantity"] == "iterations", "value"]))


def thresholds(rows: Frame) -> dict[str, float]:
    """Return by run the threshold on ln(1/ν) above which ``beyond`` counts outliers.

    Probes without a recorded threshold used K. Runs without Sinkhorn iterations are left out.
    """
    own = rows[rows["quantity"] == "threshold"].groupby("run_id")["value"].first()
    older = rows[rows["quantity"] == "iterations"].groupby("run_id")["value"].first()
    return {str(run_id): float(own.get(run_id, number)) for run_id, number in older.items()}


def example(iterations: int) -> tuple[float, tuple[float, ...]]:
    """Return ln(1/ν) and the column sums for the paper's own example (Section 1).

    The example is [[1,d,d],[1,d,d],[d,1,1]] with d = 1e-13, after Linial et al. (1998). Sinkhorn normalises columns
    before rows.
    """
    d = 1e-13
    logits = np.log(np.array([[1, d, d], [1, d, d], [d, 1, 1]]))
    m = logits.copy()
    for _ in range(iterations):
        m -= np.logaddexp.reduce(m, axis=0, keepdims=True)
        m -= np.logaddexp.reduce(m, axis=1, keepdims=True)
    return float(logits.max() - logits.min()), tuple(float(total) for total in np.exp(m).sum(0))


def reduce_by_run(rows: Frame, matrix: str, quantity: str, which: str) -> Column:
    """Return one number per run, indexed by `RUN`.

    Args:
        rows: probed rows.
        matrix: ``single`` (over all connections) or a product (through the full depth).
        quantity: e.g. ``column_sum``.
        which: reduction: ``largest``, ``share`` or ``error`` (largest distance from 1).
    """
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


EXACT = 1e-9  # in float64: rounding of sums over all connections stays far below, mHC's gap far above
NEGLIGIBLE_SHARE = 1e-3  # of positions; the paper's word is "non-negligible", its number is not in the text at hand
OUTLIER_LOG_RANGE = 30.0  # the authors' threshold
DEEPER_RANGE = "mHC's relative range is larger in deeper models (4.3, Figure 4: 6 against 24 layers)"
DEEPER_COLUMNS = "mHC's composed column sums are further off 1 in deeper models (4.3, Figure 3: 6 against 24 layers)"
EXACTLY = "mHC-lite's mixing matrices and their products are exactly doubly stochastic"


def mixing_claims(study: Study, schemes: dict[str, str], found: dict[str, SeriesWindows]) -> Iterator[Claim]:
    """Yield the claims on doubly stochastic mixing: mHC-lite's exactness, mHC's drift and outliers.

    Args:
        study: supplies the probe.
        schemes: series by residual scheme, in one setting.
        found: windows by series.
    """
    if NAME not in study.probes:
        text = (
            "Not judged: how doubly stochastic the mixing of residual streams is. "
            f"python -m stability.probe what=streams ckpt=runs/studies/{study.name} sequences=64 measures it."
        )
        statement = f"{EXACTLY}, HC's and mHC's are not (4.3)"
        yield Claim("stochasticity", "not judged", text, statement)
        return
    rows = study.probed_at_end(NAME)
    if "mhc_lite" in schemes:
        yield from _exact(rows, schemes["mhc_lite"])
    for scheme in ("mhc", "hc"):
        if scheme in schemes:
            yield from _drift(rows, schemes[scheme], scheme)
    if "mhc" in schemes:
        yield from _outliers(rows, schemes["mhc"], found, wording.words(study).position[1])


def _exact(rows: Frame, series: str) -> Iterator[Claim]:
    """Judge whether all row and column sums equal 1 to rounding. Both single matrices and their product count."""
    own = rows[rows["series"] == series]
    if own.empty:
        return
    errors = {
        matrix: max(reduce_by_run(own, matrix, quantity, "error").max() for quantity in ("column_sum", "row_sum"))
        for matrix in ("single", "product")
    }
    runs, worst = own["run_id"].nunique(), max(errors.values())
    numbers = (
        f"largest distance of a column's or row's sum from 1: {power(errors['single'])} of single matrices, "
        f"{power(errors['product'])} of their product, {plural(runs, 'run')}, in float64; the precision of training "
        "is not part of this"
    )
    verdict: Verdict = "holds" if worst < EXACT else "contradicted"
    are = "are" if verdict == "holds" else "are not"
    text = (
        f"The mixing matrices of {series} and their product through all depth {are} doubly stochastic to rounding "
        f"({numbers})."
    )
    yield Claim(f"stochasticity {series}", verdict, text, f"{EXACTLY} (4.3)", runs, f"≤ {power(worst)}")


def _drift(rows: Frame, series: str, scheme: str) -> Iterator[Claim]:
    """Judge whether the product's column sums are further from 1 than single matrices'."""
    own = rows[rows["series"] == series]
    single, product = (reduce_by_run(own, matrix, "column_sum", "error") for matrix in ("single", "product"))
    if own.empty or product.empty:
        return
    statement = (
        "Finite Sinkhorn iterations leave mHC's column sums off 1, and composed across layers they drift further "
        "(4.3, Figure 3)"
        if scheme == "mhc"
        else "HC's column sums, composed across layers, lie further off 1 than one matrix's (our comparison)"
    )
    if product.max() < EXACT:
        worst, seeds = power(product.max()), product.index.unique("seed").size
        numbers = f"at most {worst} off 1, {plural(len(product), 'run')}"
        text = f"The column sums of {series}, single and multiplied through depth, are 1 to rounding ({numbers})."
        yield Claim(f"drift {series}", "contradicted", text, statement, seeds, f"≤ {worst}")
    else:
        yield _drift_by_seed(single, product, series, statement)


def _drift_by_seed(single: Column, product: Column, series: str, statement: str) -> Claim:
    """Judge drift for inexact columns, paired by run: geometric mean over rates, per seed."""
    logs = np.log(product / single).groupby(level="seed").mean()
    found, differences = Mean.of(np.exp(logs), is_positive=True), tuple(logs)
    worst = [Spread.of(each.groupby(level="seed").median()) for each in (single, product)]
    verdict = judge_interval(found.low, found.high, 1)
    kind = "range" if found.n < 3 else "95 %"
    effect = f"{found.mean:.3g} times as far from 1"
    return word_claim(
        Claim(
            f"drift {series}",
            verdict if found.n > 1 else "no claim",
            statement=statement,
            n=found.n,
            effect=effect,
            interval=f"{kind}: {found.low:.3g} to {found.high:.3g} times" if found.n > 1 else "",
            finding=f"the column sums of {series}'s product lie {effect} as those of its single matrices",
            note=f"At most {power(worst[0].median)} off 1 in single matrices and {power(worst[1].median)} in their "
            "product (medians over seeds).",
            test=("drift", series),
            p=p_of_bounds(differences, differences),
            differences=differences,
        )
    )


def _outliers(rows: Frame, series: str, found: dict[str, SeriesWindows], positions: str) -> Iterator[Claim]:
    """Judge the mean share of outliers at the series' best rate. The paper uses one rate per size.

    ``positions`` is the objective's word for positions.
    """
    median = found[series].median if series in found else None
    own = rows[(rows["series"] == series) & (rows["run_lr"] == (median.best_lr if median else math.nan))]
    if own.empty:
        return
    subject, counted = f"outliers {series}", sorted(set(thresholds(own).values()))
    statement = (
        f"A non-negligible share of tokens has log(1/ν) > {OUTLIER_LOG_RANGE:g} before Sinkhorn in mHC (4.3, Figure 4)"
    )
    if counted != [OUTLIER_LOG_RANGE]:
        others = ", ".join(f"{value:g}" for value in counted)
        text = (
            f"Not judged: outliers of {series} were counted above {others}; python -m stability.probe what=streams "
            "outlier_log_range=30 counts as the paper."
        )
        yield Claim(subject, "not judged", text, statement)
        return
    shares = reduce_by_run(own, "single", "beyond", "share")
    mean, beyond = Mean.of(shares), tuple(shares - NEGLIGIBLE_SHARE)
    low, high = max(mean.low, 0.0), min(mean.high, 1.0)  # a share: without loss of coverage
    verdict = judge_interval(low, high, NEGLIGIBLE_SHARE)
    effect, kind = f"{100 * mean.mean:.3g} % of {positions}", "range" if mean.n < 3 else "95 %"
    claim = Claim(
        subject,
        verdict if mean.n > 1 else "no claim",
        statement=statement,
        n=mean.n,
        effect=effect,
        interval=f"{kind}: {100 * low:.3g} to {100 * high:.3g} %" if mean.n > 1 else "",
        finding=f"in {series} {effect} and connections have ln(1/ν) > {OUTLIER_LOG_RANGE:g}, at "
        f"{lr_text(float(own['run_lr'].iloc[0]))}",
        note=f"Negligible: below {100 * NEGLIGIBLE_SHARE:g} %, our line.",
        test=(subject,),
        p=p_of_bounds(beyond, beyond),
        differences=beyond,
    )
    yield word_claim(claim)


def depth_claims(study: Study) -> Iterator[Claim]:
    """Yield mHC's claims on depth: the deepest model against the shallowest, all else equal.

    Each seed contributes its mean over the rates that both finished. One depth: "not judged".
    """
    if NAME not in study.probes:
        return
    rows = study.probed_at_end(NAME)
    rows = rows[rows["series"].isin(study.runs.loc[study.runs["residual"] == "mhc", "series"])]
    for name, own in rows.groupby(rows["series"].map(_without_layers), sort=False):
        connections = own.groupby("series")["connection"].max() + 1
        if connections.nunique() < 2:
            had = f"this study has one depth ({plural(int(connections.iloc[0]), 'connection')})"
            text = (
                f"Not judged: whether {name}'s range and column sums are worse in deeper models; {had}. The same study "
                "with model.layers=[6,24], probed with what=streams, would judge it."
            )
            yield Claim(f"depth {name}", "not judged", text, DEEPER_COLUMNS)
            continue
        ends = [own[own["series"] == connections.index[int(at)]] for at in (connections.argmin(), connections.argmax())]
        depths = " to ".join(f"{count:.0f}" for count in (connections.min(), connections.max()))
        at = f"from {depths} connections"
        finding = f"{name}'s median ln(1/ν) changes by {{}} {at}"
        claim = Claim(f"depth range {name}", "not judged", statement=DEEPER_RANGE, finding=finding)
        yield _judge_depth(claim, [_middle_range(each) for each in ends], "")
        finding = f"the largest error of {name}'s column sums through all depth changes by {{}} {at}"
        claim = Claim(f"depth columns {name}", "not judged", statement=DEEPER_COLUMNS, finding=finding)
        errors = [np.log10(reduce_by_run(each, "product", "column_sum", "error")) for each in ends]
        yield _judge_depth(claim, errors, "decades")


def _without_layers(series: str) -> str:
    """Return a series' name without its number of layers."""
    return " ".join(word for word in series.split(" ") if not word.startswith("layers="))


def _middle_range(rows: Frame) -> Column:
    """Return the median ln(1/ν) over positions and connections per run, indexed by `RUN`."""
    of_all = rows["connection"].isna() & (rows["matrix"] == "single") & (rows["quantity"] == "log_range")
    return rows[of_all & np.isclose(rows["quantile"], 0.5)].groupby(RUN)["value"].first()


def _judge_depth(claim: Claim, ends: Sequence[Column], unit: str) -> Claim:
    """Judge one quantity by each seed's mean difference, deep minus shallow, over the rates that both have."""
    shallow, deep = (each.groupby(level=["run_lr", "seed"]).first() for each in ends)
    differences = tuple((deep - shallow).dropna().groupby(level="seed").mean())
    if not differences:
        return replace(claim, text="Not judged: at no rate did a seed finish in both depths.", finding="")
    size = f"{signed(float(np.mean(differences)), 2)} {unit}".rstrip()
    named = replace(claim, effect=size, difference=size, test=(claim.subject,), finding=claim.finding.format(size))
    return judge_mean(named, differences, 1, unit)
