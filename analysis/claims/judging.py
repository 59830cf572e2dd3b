"""Judge a study's mechanisms against its reference, then the papers' claims, as sentences and tables.

Comparisons with the reference: `reference`. The consensus paper's claims: low-pass filters (2.2) here, `layers` (1, 4,
Table 9), `windows` (5.1) and `steps` (5.2.1). Other papers' claims: `rivals`, `mixers` and `recall`. Warnings:
`signals`. Rules:

- A mechanism without learning is "untrained" (criteria: `learning`). No claim is made about untrained mechanisms.
  Little learning is named.
- One seed: no claim. Two seeds: "indicated", if both agree. Three or more: "supported", if the Student-t 95 % interval
  of the paired differences excludes 0. For equality the whole interval must lie within the margin. Otherwise the claim
  is undecided, and the number of seeds needed is given if the spread allows an estimate.
- Many claims: Holm's correction over all comparisons with a p-value but the declared primary one (`claim.correct`).
- A difference of windows that the grid's brackets allow to vanish is not resolved (`comparison`).
- An open window is a lower bound; `compare` treats the undecided cases. Diverged runs count (`step_shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from analysis.claims import layers, lengths, mixers, quantization, recall, rivals, signals
from analysis.claims.claim import (
    ATTENTIONX,
    CONSENSUS,
    MHC_LITE,
    TOOLKIT,
    Claim,
    Verdict,
    correct,
    correction_note,
    verdict_words,
    word_claim,
)
from analysis.claims.pairs import compares_mechanisms, compares_residuals
from analysis.claims.reference import find_primary, reference_claims
from analysis.claims.steps import steps_claims, suboptimal_claims
from analysis.claims.windows import Side, window_claims
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.learning import Learned, little, most_learned, reasons_untrained
from analysis.numbers.mixers import compares_mixers
from analysis.numbers.spread import Mean, p_of_bounds
from analysis.numbers.windows import NOT_RUN, SeriesWindows, windows
from analysis.study import wording
from analysis.study.load import HAS_RESULT, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import count_range, join_words, lr_text, plural

DETAIL_LINE = 72  # characters below an effect
LITTLE, TRAINED = "little learned", "trained "  # subject of a remark, and how others begin


@once_per_study
def judge(study: Study) -> tuple[Claim, ...]:
    """Return the comparisons with the reference, then the papers' claims, then remarks.

    Only papers whose mechanisms are in the study have claims. The consensus paper's are judged in every setting: one
    combination of optimizer, residual, … if they vary; in ablations only the base.
    """
    found, lacking = windows(study), reasons_untrained(study)
    remarks, papers = [], []
    for setting in sorted(set(study.runs.loc[study.runs["variant"] == "", "setting"])):
        names = set(study.runs.loc[study.runs["setting"] == setting, "series"])
        sides = _sides(study, [found[name] for name in study.series if name in names])
        prefix = f"Setting {setting}: " if setting else ""
        remarks += [replace(claim, text=prefix + claim.text) for claim in _remarks(study, sides)]
        papers += [_name_setting(claim, prefix) for claim in _judge_consensus(study, sides)]
    papers += [*low_pass_claims(study), *layers.claims(study)]
    if compares_residuals(study) or compares_mechanisms(study) or compares_mixers(study):
        papers += [*rivals.claims(study, found, lacking), *mixers.claims(study, lacking)]
    papers += [*recall.claims(study), *quantization.claims(study), *lengths.claims(study), *signals.claims(study)]
    compared = reference_claims(study)
    primary, remark = _find_primary(study, compared)
    remarks += [Claim("primary", "not judged", remark)] if remark else []
    claims = correct([*compared, *papers], primary)
    return (*claims, *remarks, *_coverage(study), _scale(study, papers))


def _find_primary(study: Study, compared: Sequence[Claim]) -> tuple[tuple[str, ...], str]:
    """Return the comparison that Holm does not correct, () for none, and a sentence on the declared claim, or "".

    A claim counts as declared beforehand if no run of the study had ended by then.
    """
    name = study.spec.get("primary")
    if not name:
        return (), ""
    found, declared = find_primary(study, compared), study.study.get("declared")
    if len(found) != 1:
        fits = f"fits {len(found)} comparisons ({join_words(found.values())})" if found else "fits no comparison"
        return (), f"The declared primary claim, {name}, {fits}: all are corrected."
    late = f"The primary claim, {name}, is corrected as the others are: "
    if declared is None:
        return (), f"{late}its record lacks when it was declared."
    on, runs = f" on {declared['at'][:10]}" if declared.get("at") else "", plural(declared["runs"], "run")
    if not declared["ended"]:
        text = f"The primary claim, {name}, is not corrected: none of {runs} had ended when it was declared{on}."
        return next(iter(found)), text
    if declared["ended"] == declared["runs"]:
        return (), f"{late}all {runs} known by then had ended when its record began{on}."
    return (), f"{late}{declared['ended']} of {runs} had ended when it was declared{on}, or when they joined its study."


def _name_setting(claim: Claim, prefix: str) -> Claim:
    """Return a claim that names its setting in statement and text; a remark has no statement."""
    statement, finding = (text and prefix + text for text in (claim.statement, claim.finding))
    return replace(claim, text=prefix + claim.text, statement=statement, finding=finding)


def _judge_consensus(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return the consensus paper's claims on one setting; [] without sc.

    Order: windows and best NLLs, α_max. α_max needs a trained sc and another mechanism.
    """
    if "sc" not in sides:
        return []
    claims = list(window_claims(study, sides))
    others = [side for name, side in sides.items() if name != "sc" and (side.trained or side.only_diverged)]
    if sides["sc"].trained and others:
        claims += [*steps_claims(study, sides), *suboptimal_claims(study, sides)]
    return claims


def _sides(study: Study, found: list[SeriesWindows]) -> dict[str, Side]:
    """Return one setting's mechanisms by name, with windows, learning and shortfall."""
    learned = [Learned.of(study, each) for each in found]
    most = most_learned(learned)
    sides = {}
    for each, nats in zip(found, learned, strict=True):
        runs = study.of(each.series)
        mechanism, name = (str(runs[column].iloc[0]) for column in ("mechanism", "label"))
        lost = bool((runs["status"] == "diverged").all())
        sides[mechanism] = Side(mechanism, name, each.series, each, nats, nats.shortfall(most), lost)
    return sides


def _remarks(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return remarks on untrained mechanisms, and on those with little learning."""
    claims = [
        Claim(f"{TRAINED}{side.name}", "not judged", f"{side.name} {_describe_untrained(study, side)}.")
        for side in sides.values()
        if side.shortfall
    ]
    few = little({side.name: side.learned for side in sides.values() if side.trained})
    return [*claims, *([Claim(LITTLE, "no claim", few)] if few else [])]


def list_learning_remarks(study: Study) -> list[str]:
    """Return the remarks on mechanisms that learned nothing, too little or little, as sentences."""
    remarks = [claim for claim in judge(study) if not claim.statement]
    return [claim.text for claim in remarks if claim.subject == LITTLE or claim.subject.startswith(TRAINED)]


def _describe_untrained(study: Study, side: Side) -> str:
    """Describe the treatment of an untrained mechanism.

    If all runs diverged, its steps still count as 0 % stable.
    """
    if side.only_diverged:
        return "diverged in every run: no claim is made about its window and its NLL, and its steps count as 0 % stable"
    why = f"is {NOT_RUN}" if set(study.of(side.series)["status"]) == {"queued"} else side.shortfall
    return f"{why}: no claim is made about its window, its NLL and its α_max"


@once_per_study
def claims_table(study: Study) -> Table | None:
    """Return a table with every paper's claim: n, effect with interval, verdict; or None."""
    judged = [claim for claim in judge(study) if claim.paper and claim.statement]
    if not judged:
        return None
    papers = list(dict.fromkeys(each.paper for each in judged))
    rows = tuple(
        (
            Cell(each.statement, each.paper if len(papers) > 1 else ""),
            Cell(str(each.n)),
            _effect_cell(each),
            _verdict_cell(each),
        )
        for each in judged
    )
    caption = (
        f"Claims of {join_words(f'“{paper}”' for paper in papers)}, and what was measured. n: paired seeds (of runs of "
        "suboptimal loss: curves, a mechanism with a seed). Effect: mean paired difference over seeds; below it its "
        "interval, which decides: a claimed difference must exclude 0, a claimed equality lie within the margin. "
        f"{_explain_lines(judged)}{correction_note(judge(study))}{_describe_runs(study)}"
    )
    title, header = "Claims of papers", ("statement", "n", "effect", "verdict")
    align, widths = ("left", "right", "left", "left"), ("2.1fr", "auto", "2.8fr", "1.3fr")
    return Table(title, caption, header, rows, (), align, widths)


def _effect_cell(claim: Claim) -> Cell:
    """Return the mean difference, below it its interval, each one's level, and the other rules for windows."""
    lines = [claim.interval]
    if _has_levels(claim):
        lines.append(f"each: {claim.effect}")
    if claim.equal and not claim.interval.startswith("at an equal share"):
        lines.append(f"equal share: {claim.equal}")
    lines += [f"common: {claim.common}"] if claim.common else []
    return Cell(claim.difference or claim.effect or "--", "\n".join(_pack(filter(None, lines))))


def _pack(parts: Iterable[str]) -> list[str]:
    """Return the parts as lines of at most `DETAIL_LINE` characters, or of one part that is longer."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= DETAIL_LINE:
            lines[-1] += f"; {part}"
        else:
            lines.append(part)
    return lines


def _has_levels(claim: Claim) -> bool:
    """Return whether the effect is each mechanism's level, beside the difference of both."""
    return bool(claim.difference) and not claim.difference.startswith(claim.effect)


def _explain_lines(judged: Sequence[Claim]) -> str:
    """Describe the further lines of `_effect_cell`, with a space at the end; "" without any."""
    said = {
        "Each: medians over seeds, of % stable means. ": any(
            each.difference not in ("", each.effect) for each in judged
        ),
        "Equal share: the same for windows that lose an equal share of what was learned, the one that 5 % of its NLL "
        "costs the narrower side of the claim; a verdict needs both. ": any(each.equal for each in judged),
        "Common: the widths of the common windows. ": any(each.common for each in judged),
    }
    return "".join(text for text, is_there in said.items() if is_there)


def _verdict_cell(claim: Claim) -> Cell:
    """Return the verdict, below it the seeds or runs needed."""
    words, _, needed = verdict_words(claim).partition(": ")
    return Cell(words, "\n".join(filter(None, (claim.corrected, needed))))


def _describe_runs(study: Study) -> str:
    """Describe how the study's runs differ from the papers'."""
    runs = study.runs
    asked = (
        f"{join_words(sorted(set(runs['objective'])))} on {join_words(sorted(set(runs['data'])))} with "
        f"{join_words(sorted(set(runs['optimizer'])))}"
    )
    return f"Not the papers' runs: here {count_range(runs['num_params'])} parameters, {asked}."


def _coverage(study: Study) -> list[Claim]:
    """Return a remark on runs without results; [] if every run has one."""
    counts = study.runs["status"].value_counts()
    missing = [
        f"{counts[status]} {status}"
        for status in ("failed", "running", "interrupted", "stopped", "queued")
        if status in counts
    ]
    if not missing:
        return []
    text = (
        f"Of {plural(len(study.runs), 'run')}, {join_words(missing)}: these are no results, and a window next to one "
        "counts as open."
    )
    return [Claim("coverage", "not judged", text)]


def _scale(study: Study, papers: list[Claim]) -> Claim:
    """Return a remark on the runs' parameters, steps, tokens and seeds, and on the papers' scale."""
    finished = study.runs[study.runs["status"].isin(HAS_RESULT)]
    runs = finished if len(finished) else study.runs
    steps = count_range(runs["num_steps"])
    theirs = [scale for paper, scale in SCALES.items() if paper in {claim.paper for claim in papers}]
    text = (
        f"All this is at {count_range(runs['num_params'])} parameters, {steps} step{'' if steps == '1' else 's'} and "
        f"{count_range(runs['num_tokens'])} {wording.words(study).counted} per run, "
        f"{plural(study.runs['seed'].nunique(), 'seed')}{''.join(f'; {scale}' for scale in theirs)}."
    )
    return Claim("scale", "not judged", text)


SCALES = {
    CONSENSUS: "the models of “Stabilizing Transformer Training Through Consensus” have 35 to 385 million parameters",
    MHC_LITE: "mHC-lite's are nanoGPT's of 6 to 24 layers, trained in bfloat16 on 1.3 billion tokens",
    ATTENTIONX: "AttentionX's are a ViT-small and GPT-2",
    TOOLKIT: "the annexes of “Frankenstein Transformer” report language models of a billion parameters and more",
}
LOW_PASS = (
    "{} filters without oscillation: its step η is at most 1/(2λ_max), so that higher frequencies shrink more (2.2)"
)


def low_pass_claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each series with consensus spectra probed at its best rate."""
    if "spectra" not in study.probes:
        return
    rows = study.probed_at_end("spectra")
    rows = rows[rows["step_limit"].notna()]
    found = windows(study)
    for series in study.series:
        best = found[series].median
        own = rows[(rows["series"] == series) & (rows["run_lr"] == (best.best_lr if best else None))]
        if len(own):
            yield _low_pass_claim(series, own)


def _low_pass_claim(series: str, rows: Frame) -> Claim:
    """Judge one series by 2ηλ_max at its best rate. Per seed, the median over layers, heads and sequences."""
    logs = np.log((rows["step_size"] / rows["step_limit"]).groupby(rows["seed"]).median()).tolist()
    step = Mean.of(np.exp(logs), is_positive=True)
    gain, left = rows["gain"].median(), (rows["variance_after"] / rows["variance_before"]).median()
    verdict: Verdict = "holds" if step.high <= 1 else "contradicted" if step.low > 1 else "undecided"
    effect = f"2ηλ_max = {step.mean:.2g}"
    note = (
        f"Median over layers and heads, geometric mean over {plural(step.n, 'seed')}, at "
        f"{lr_text(float(rows['run_lr'].iloc[0]))}; largest factor of a frequency {gain:.2g}; the layer leaves "
        f"{100 * left:.0f} % of the variance between positions."
    )
    claim = Claim(
        f"low-pass {series}",
        verdict if step.n > 2 else "no claim",
        statement=LOW_PASS.format(series),
        n=step.n,
        effect=effect,
        interval=f"95 %: {step.low:.2g} to {step.high:.2g}" if step.n > 2 else "",
        paper=CONSENSUS,
        finding=f"the trained graph step of {series} has {effect}; above 1 it overshoots at high frequencies",
        note=note,
        test=("low-pass", series),
        p=p_of_bounds(logs, logs),
        differences=tuple(logs),
    )
    return word_claim(claim)
