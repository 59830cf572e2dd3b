"""Judge the claims of the papers on residual schemes and AttentionX, and compare the best values of two series.

Comparisons are made seed by seed under the rules in `analysis.claims.judging`. mHC-lite (arXiv:2601.05732) is compared
with mHC, AttentionX with attention under the same mask. Claims on throughput and gradient norms follow: n counts seeds,
for throughput turns, and three or more decide if a 95 % interval of the ratio, on a logarithmic scale, excludes
equality. If the study lacks the data, the claim's text names the measurement to run. `streams` has the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from analysis.claims.claim import (
    ATTENTIONX,
    MHC_LITE,
    Claim,
    Verdict,
    decline_pair,
    interval_text,
    judge_interval,
    judge_sign,
    signed,
    word_claim,
)
from analysis.claims.pairs import (
    FURTHER,
    RIVALS,
    Measure,
    Pair,
    alike,
    compares_mechanisms,
    compares_residuals,
    find_measures,
    pairs_of,
)
from analysis.claims.streams import depth_claims, mixing_claims
from analysis.numbers.comparison import decide
from analysis.numbers.learning import say_lacking
from analysis.numbers.side_by_side import FEWEST_TURNS, ratio
from analysis.numbers.spread import Mean, p_beyond, p_of_bounds
from analysis.numbers.windows import SeriesWindows, tabulate
from analysis.study import wording
from analysis.study.load import HAS_RESULT, Frame, Study
from analysis.words import lr_text, plural

# our margin for "on par": the paper gives none; its Table 1 has validation losses 0.019 below mHC's to 0.006 above
PAR_NATS = 0.01
# norms closer than this count as equal: two schemes with equal starts agree to five digits for a while
SAME_NORM = 0.005
NEGLIGIBLE_SLOWDOWN = 0.05  # our choice: the paper's "negligible" has no number
UNITS = {"val_nll": "nats"}
PAPERS = {"attentionx": ATTENTIONX, "mhc_lite": MHC_LITE}
LOWER_NORM = {
    "mhc": "mHC-lite's gradient norm is slightly lower than mHC's (4.1, Figure 2)",
    "hc": "mHC-lite's gradient norm is lower than HC's (our comparison)",
}
SAME_MASK = "attention's of the same mask"
STATEMENTS = {
    ("mhc_lite", "mhc", "NLL"): "mHC-lite's loss is on par with mHC's or lower (4.1, Table 1)",
    ("attentionx", "sa", "NLL"): f"AttentionX's validation loss is lower than {SAME_MASK} (4.2, Figure 1)",
    ("attentionx", "sa", "accuracy"): f"AttentionX's validation accuracy is higher than {SAME_MASK} (4.1, Table 1)",
}


def compares_schemes(study: Study) -> bool:
    """Return whether a study without consensus runs compares residual schemes or rival mechanisms."""
    return "sc" not in set(study.runs["mechanism"]) and (compares_residuals(study) or compares_mechanisms(study))


def claims(study: Study, found: Mapping[str, SeriesWindows], shortfalls: Mapping[str, str]) -> list[Claim]:
    """Return the papers' claims on schemes: best values, then throughput, gradient norms, mixing and depth.

    Args:
        study: the study to judge.
        found: windows by series.
        shortfalls: reason for too little learning by series, "" for a trained one.
    """
    made, judged = [], set()
    several = sum(pair.names[0] in RIVALS and pair.states for pair in pairs_of(study)) > 1
    for pair in pairs_of(study):
        named = f"{pair.other} beside {pair.plain}" if pair.other in judged else pair.other
        judged.add(pair.other)
        made += _name_setting(study, pair.other, _about(study, pair, named, shortfalls, several))
    return [*_report_unmatched(study), *made, *_beyond_loss(study, found)]


def _about(study: Study, pair: Pair, named: str, shortfalls: Mapping[str, str], several: bool) -> Iterator[Claim]:
    """Yield a paper's claims on one pair's best NLL and accuracy; of ``several`` rivals a statement names the one."""
    lacking = [name for name in (pair.plain, pair.other) if shortfalls[name]]
    for measure in find_measures(study) if pair.states else []:
        statement = STATEMENTS.get((*pair.names, measure.word), "")
        if not statement:
            continue
        statement += f": {pair.other}" if several and pair.names[0] in RIVALS else ""
        paper = PAPERS[pair.names[0]]
        if lacking:
            yield decline_pair(
                f"trained {named}", statement, (pair.other, pair.plain), say_lacking(study, lacking), paper
            )
        else:
            yield best_claim(study, f"best {measure.word} {named}", measure, pair, statement, paper=paper)


def _name_setting(study: Study, series: str, claims: Iterable[Claim]) -> Iterator[Claim]:
    """Yield claims whose statement names their setting, beside the residual connection, if the study has several."""
    base = study.runs[study.runs["variant"] == ""]
    scheme = base.loc[base["series"] == series, ["setting", "residual"]]
    words = "" if scheme.empty else " ".join(w for w in scheme.iloc[0, 0].split(" ") if w != scheme.iloc[0, 1])
    for claim in claims:
        yield replace(claim, statement=f"{words}: {claim.statement}") if words and claim.statement else claim


def _report_unmatched(study: Study) -> Iterator[Claim]:
    """Yield a "not judged" for each AttentionX without same-mask attention to compare."""
    pairs = [pair for pair in pairs_of(study) if pair.names[0] in RIVALS]
    for other in dict.fromkeys(pair.other for pair in pairs):
        if any(pair.states for pair in pairs if pair.other == other):
            continue
        text = (
            f"Not judged: {other} against attention with the same mask, which this study does not hold; "
            "ablate.sa.mask_diagonal=[false,true] would judge it."
        )
        statement = STATEMENTS["attentionx", "sa", "NLL"]
        yield Claim(f"same mask {other}", "not judged", text, statement, paper=ATTENTIONX)


def _beyond_loss(study: Study, found: Mapping[str, SeriesWindows]) -> Iterator[Claim]:
    """Yield AttentionX's throughput claims, and mHC-lite's on throughput, gradient norm, mixing and depth."""
    judged = [pair for pair in pairs_of(study) if pair.names[0] in RIVALS and pair.states]
    for pair in judged:
        of_which = f": {pair.other}" if len(judged) > 1 else ""
        statement = f"AttentionX's computational overhead is negligible (3.2){of_which}"
        least = 1 - NEGLIGIBLE_SLOWDOWN
        claim = throughput_claim(study, pair.other, pair.plain, statement=statement, least=least)
        yield replace(claim, paper=ATTENTIONX)
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    for _, group in alike(base, "residual"):
        schemes = {str(name): str(series) for name, series in zip(group["residual"], group["series"], strict=True)}
        judged_schemes = _name_setting(study, group["series"].iloc[0], _judge_schemes(study, schemes, found))
        yield from (replace(claim, paper=MHC_LITE) for claim in judged_schemes)
    yield from (replace(claim, paper=MHC_LITE) for claim in depth_claims(study))


def _judge_schemes(study: Study, schemes: Mapping[str, str], found: Mapping[str, SeriesWindows]) -> Iterator[Claim]:
    """Yield mHC-lite's claims on the residual schemes of one setting; ``schemes``: series by scheme."""
    if lite := schemes.get("mhc_lite"):
        for plain in (name for name in FURTHER["mhc_lite"] if name in schemes):
            title = {"mhc": "mHC", "hc": "HC"}[plain]
            faster = f"mHC-lite's throughput is higher than {title}'s without any kernel of its own (4.2, Figure 5)"
            yield throughput_claim(study, lite, schemes[plain], statement=faster)
            yield gradient_norm_claim(study, lite, schemes[plain], statement=LOWER_NORM[plain])
    if {"mhc", "mhc_lite", "hc"} & schemes.keys():
        yield from mixing_claims(study, dict(schemes), dict(found))


def best_claim(study: Study, about: str, measure: Measure, pair: Pair, statement: str, *, paper: str = "") -> Claim:
    """Judge a pair by each seed's best value over common learning rates.

    A seed with diverged runs only has an infinitely bad best.

    Args:
        study: supplies the runs.
        about: subject of the claim.
        measure: compared number.
        pair: both series.
        statement: the claim; "on par" in it selects the test with margin `PAR_NATS`.
        paper: the paper that makes it.
    """
    column, better, word, digits, limit, is_share = measure
    other, plain = pair.other, pair.plain
    pairs = _best_pairs(study, measure, pair)
    differences = [a - b for a, b in pairs]
    direction, (low, high) = decide(differences, differences, limit=limit)
    n, is_par = len(pairs), "on par" in statement
    verdict: Verdict = "no claim" if n < 2 else _judge_par(low, high) if is_par else judge_sign(direction * better)
    decimals, unit = int(digits[1]), UNITS.get(column, "") if wording.words(study).in_nats else ""
    unit, percent = ("points", " %") if is_share else (unit, "")
    low, high = measure.factor * low, measure.factor * high  # as printed
    size = measure.factor * float(np.mean(differences)) if pairs else math.nan
    middles = measure.factor * np.median(pairs, axis=0) if pairs else ()
    medians = " against ".join(f"{median:{digits}}{percent}" for median in middles)
    difference = f"{signed(size, decimals)} {unit}".rstrip() if pairs else ""
    notes = [f"Medians: {medians}." if medians else "", _lost(pairs, other, plain), pair.remark]
    beyond = [each - PAR_NATS for each in differences] if is_par else differences
    rates = [set(_outcomes(study.of(name), measure.column, math.inf).index) for name in (pair.other, pair.plain)]
    return word_claim(
        Claim(
            about,
            verdict,
            statement=statement,
            n=n,
            effect=difference if is_share or not pairs else signed(size, decimals),
            interval=interval_text((low, high), n, unit, decimals),
            paper=paper,
            finding=f"{other}'s best {word} {_relation(size, decimals, unit)} {plain}'s"
            + ("" if rates[0] == rates[1] else f" at their {plural(len(rates[0] & rates[1]), 'common rate')}")
            + (f", margin {PAR_NATS:g} {unit}" if is_par else ""),
            note=" ".join(filter(None, notes)),
            difference=difference,
            test=("par" if is_par else "best", column, other, plain),
            p=p_of_bounds(beyond, beyond),
            differences=tuple(differences),
            margin=PAR_NATS if is_par else math.nan,
        )
    )


def _relation(size: float, decimals: int, unit: str) -> str:
    """Return a difference as words, e.g. ``"is 0.100 nats lower than"``."""
    if not math.isfinite(size):
        return "is not comparable with" if math.isnan(size) else "is infinitely far from"
    number = f"{abs(size):.{decimals}f} {unit}".rstrip()
    return f"is {number} {'lower' if size < 0 else 'higher'} than"


def _best_pairs(study: Study, measure: Measure, pair: Pair) -> list[tuple[float, float]]:
    """Return both series' best values by seed, over common rates; seeds without either are left out."""
    worst = -measure.better * math.inf
    tables = [_outcomes(study.of(name), measure.column, worst) for name in (pair.other, pair.plain)]
    rates, seeds = (
        sorted(set(getattr(tables[0], axis)) & set(getattr(tables[1], axis))) for axis in ("index", "columns")
    )
    bests = [(measure.better * table.loc[rates, seeds]).max(axis=0) * measure.better for table in tables]
    return [
        (a, b)
        for a, b in zip(*bests, strict=True)
        if not (math.isnan(a) or math.isnan(b) or math.isinf(a) and math.isinf(b))
    ]


def _judge_par(low: float, high: float) -> Verdict:
    """Return the verdict for "on par or lower": the interval (nats) against the margin."""
    return "holds" if high < PAR_NATS else "contradicted" if low > PAR_NATS else "undecided"


def _lost(pairs: list[tuple[float, float]], other: str, plain: str) -> str:
    """Report the seeds in which a series diverged at every rate; "" if none."""
    lost = {name: sum(math.isinf(pair[place]) for pair in pairs) for place, name in enumerate((other, plain))}
    return " ".join(
        f"{name} diverged at every rate in {count} of {plural(len(pairs), 'seed')}."
        for name, count in lost.items()
        if count
    )


def _outcomes(runs: Frame, column: str, diverged: float) -> Frame:
    """Return a table, learning rate × seed: finished values, ``diverged``, or NaN without a result."""
    value = runs[column].where(runs["status"].isin(HAS_RESULT)).where(runs["status"] != "diverged", diverged)
    return tabulate(runs[value.notna()], value.dropna(), "first")


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
    is_judged = found.turns >= FEWEST_TURNS
    asked = "" if least == 1.0 else f", {least:g} times is claimed"
    return word_claim(
        Claim(
            subject,
            judge_interval(found.low, found.high, least) if is_judged else "no claim",
            statement=statement,
            n=found.turns,
            effect=f"{found.median:.3f} times the throughput",
            interval=f"95 % of the median: {found.low:.3f} to {found.high:.3f}" if is_judged else "",
            finding=f"the throughput of {other} is {found.median:.3f} times {plain}'s{asked}",
            note=f"n: turns side by side on {study.throughput['device']}.",
            test=("throughput", f"{least:g}", other, plain),
            p=found.p_beyond(least) if is_judged else math.nan,
        )
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
