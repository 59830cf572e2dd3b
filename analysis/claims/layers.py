"""Judge the consensus paper's statements on graphs, trained layers (`stability.probe`) and settings of sc.

Bounds of the algebraic connectivity (Eqs. 15 and 16, end of section 4) are theorems: one value outside refutes them.
The conditioning of W_qᵀW_k (section 1) is judged over seeds. So are the trends of Table 9, that a larger ξ, rank or
window of sc lowers its validation NLL: from the smallest to the largest value of a study, each at its own best rate,
paired by seed. Each setting is a comparison of its own in Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from analysis.claims.claim import CONSENSUS, Claim, decline, judge_mean, signed, word_claim
from analysis.numbers.ablations import Group, ablations
from analysis.numbers.learning import LITTLE_SHARE
from analysis.study.load import Frame, Study
from analysis.study.reference import unlearned
from analysis.words import lr_text, plural, power

WITHIN = "λ_1 lies within the paper's bounds for "
ROUNDING = 1e-9  # relative error allowed to a computed eigenvalue
CYCLE = "λ_1 of the power of a cycle is 4 Σ sin²(πj/N) (Eq. 15)"
PATH = "λ_1 of the window path lies between 2 Σ sin²(πj/2N) and 4 Σ sin²(πj/2N) (Eq. 16)"
WEIGHTS = (
    "the Fiedler value of a learned graph lies between λ_1 of the plain one times the smallest and the largest "
    "eigenvalue of a weight (end of 4)"
)
CONDITIONING = "W_qᵀW_k of {} becomes ill-conditioned as the learning rate is increased (1)"


def claims(study: Study) -> list[Claim]:
    """Return the claims on the connectivity of graphs, on the conditioning of W_qᵀW_k, and on the trends of Table 9."""
    return [*connectivity_claims(study.probes), *_conditioning_claims(study), *_trend_claims(study)]


def connectivity_claims(probes: Mapping[str, Frame]) -> list[Claim]:
    """Return a claim for each bound with probed graphs; ``probes``: the study's tables by name."""
    made = []
    if "connectivity" in probes:
        graphs, columns = probes["connectivity"], ("connectivity", "bound_low", "bound_high")
        for kind, name, statement in (("cycle", "cycle power", CYCLE), ("window", "window path", PATH)):
            made.append(
                _judge_bounds(f"connectivity {kind}", statement, name, graphs[graphs["graph"] == kind], columns)
            )
    if "spectra" in probes:
        columns = ("fiedler", "fiedler_low", "fiedler_high")
        heads = probes["spectra"].dropna(subset=list(columns))
        made.append(_judge_bounds("connectivity learned", WEIGHTS, "learned graph", heads, columns))
    return [claim for claim in made if claim.n]


def confirms_theorem(claim: Claim) -> bool:
    """Return whether a claim on a bound holds."""
    return claim.verdict == "holds" and claim.finding.startswith(WITHIN)


def _judge_bounds(subject: str, statement: str, name: str, rows: Frame, columns: tuple[str, str, str]) -> Claim:
    """Return the claim that each value lies within its bounds, up to `ROUNDING`."""
    value, low, high = (rows[column].to_numpy(dtype=float) for column in columns)
    within = int(((value >= low * (1 - ROUNDING)) & (value <= high * (1 + ROUNDING))).sum())
    claim = Claim(
        subject,
        "holds" if within == len(rows) else "contradicted",
        statement=statement,
        n=len(rows),
        effect=f"{within} of {len(rows)} within",
        paper=CONSENSUS,
        finding=f"{WITHIN}{within} of {plural(len(rows), name)}",
        note="A theorem: one value outside, by more than 1e-9 of the bound, would refute it.",
    )
    return word_claim(claim)


def _conditioning_claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each series with W_qᵀW_k probed at two rates or more, at terminal checkpoints."""
    if "qk" not in study.probes:
        return
    rows = study.probed_at_end("qk")
    for series in study.series:
        heads = qk_heads(rows[rows["series"] == series])
        if heads["run_lr"].nunique() > 1:
            lost = int((study.of(series)["status"] == "diverged").sum())
            yield _judge_conditioning(series, heads, lost)


def _judge_conditioning(series: str, heads: Frame, diverged: int) -> Claim:
    """Judge one series by the slope of log10(condition) over log10(rate), per seed.

    Per run, the condition is the median over layers and heads.
    """
    condition = np.log10(heads.groupby(["seed", "run_lr"])["condition"].median()).reset_index()
    slopes = [
        float(np.polyfit(np.log10(part["run_lr"]), part["condition"], 1)[0])
        if np.isfinite(part["condition"]).all()
        else math.inf
        for _, part in condition.groupby("seed")
        if len(part) > 1
    ]
    statement = CONDITIONING.format(series)
    if not slopes or not all(map(math.isfinite, slopes)):
        why = "half of the matrices of a run are singular, or no seed has two rates"
        return decline(f"conditioning {series}", statement, why, CONSENSUS)
    mean, typical = math.fsum(slopes) / len(slopes), 10 ** condition.groupby("run_lr")["condition"].median()
    ends = " and ".join(f"{power(typical[lr])} at {lr_text(lr)}" for lr in (typical.index.min(), typical.index.max()))
    lost = f" {plural(diverged, 'diverged run')} left no such checkpoint." if diverged else ""
    claim = Claim(
        f"conditioning {series}",
        "no claim",
        statement=statement,
        effect=f"{signed(mean)} decades a decade of the rate",
        paper=CONSENSUS,
        finding=f"the condition number of {series}'s W_qᵀW_k changes by {signed(mean)} decades a decade of the rate",
        note=f"Medians over layers and heads, at terminal checkpoints: {ends}.{lost}",
        test=("conditioning", series),
    )
    return judge_mean(claim, slopes, 1, "decades a decade")


def qk_heads(rows: Frame) -> Frame:
    """Return spectral norm and condition number of W_qᵀW_k, one row per head.

    The condition number is ∞ for a zero singular value.
    """
    keys = ["order", "series", "run_lr", "seed", "phase", "layer", "head"]
    ends = rows.groupby(keys)["singular_value"].agg(["max", "min"]).reset_index()
    with np.errstate(divide="ignore"):
        return ends.assign(norm=ends["max"], condition=ends["max"] / ends["min"])


def _trend_claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each setting of Table 9 with two values or more; none without an ablation of sc."""
    for each in ablations(study):
        for group in each.groups:
            if group.in_paper and group.numeric and len(group.columns) > 1:
                yield _judge_trend(study, each.base, group)


def _judge_trend(study: Study, base: str, group: Group) -> Claim:
    """Return the claim on one setting."""
    (low, high), values = group.ends, group.changes.tolist()
    subject, start = f"Table 9 {base} {group.setting}", unlearned(study, base)
    statement = f"a larger {group.setting} lowers {base}'s validation NLL (Table 9)"
    why = ""
    if not start.nll - min(low.median, high.median) > LITTLE_SHARE * start.nll:
        why = f"both values learned less than {100 * LITTLE_SHARE:g} % beyond {start.name}"
    elif not all(map(math.isfinite, values)):
        why = f"a run diverged at {group.setting}={(high if high.diverged else low).text}"
    if why or not values:
        return decline(subject, statement, why or "no seed has both values", CONSENSUS)
    mean = math.fsum(values) / len(values)
    claim = Claim(
        subject,
        "no claim",
        statement=statement,
        effect=f"{signed(mean, 3)} nats",
        paper=CONSENSUS,
        finding=f"{base}'s validation NLL changes by {signed(mean, 3)} nats with {group.setting} from {low.text} to "
        f"{high.text}",
        note="Each value at its own best rate." if study.runs["lr"].nunique() > 1 else "All runs have one rate.",
        test=("Table 9", base, group.setting),
    )
    return judge_mean(claim, values, -1, "nats", 3)
