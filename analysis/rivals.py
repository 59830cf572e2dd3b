"""How a scheme compares with the plain one that its paper measures it against (residual schemes with the plain residual, AttentionX with attention): best NLL,
accuracy where there is one, and stable window, seed by seed, under the rules of `claims`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from analysis.compare import Comparison, compare_windows, decide
from analysis.load import FINISHED, SETTING_AXES, Frame, Study
from analysis.spread import listed, plural
from analysis.stability_window import SeriesWindows
from analysis.tables import width_text

PLAIN = "identity"
RIVALS = {"attentionx": "sa"}  # mechanisms, and what their papers compare them with
FURTHER = {"mhc_lite": "mhc"}  # residual schemes, and what their papers compare them with beside the plain one
COMPARED = {"best NLL": ("val_nll", -1, "NLL", ".3f"), "best accuracy": ("val_accuracy", 1, "accuracy", ".4f")}  # column, which way is better, word, digits
Sentence = tuple[str, str, str]  # subject, verdict, text


def compares_residuals(study: Study) -> bool:
    """Whether residual schemes stand beside the plain one, or beside the one of `FURTHER`."""
    residuals = set(study.runs["residual"])
    return (PLAIN in residuals and len(residuals) > 1) or any({name, plain} <= residuals for name, plain in FURTHER.items())


def compares_mechanisms(study: Study) -> bool:
    return any({name, plain} <= set(study.runs["mechanism"]) for name, plain in RIVALS.items())


def another_question(study: Study) -> bool:
    """Whether a study without consensus runs compares something else."""
    return "sc" not in set(study.runs["mechanism"]) and (compares_residuals(study) or compares_mechanisms(study))


def scale_of_the_papers(study: Study) -> str:
    """Of what the study's question comes from."""
    if not another_question(study):
        return "the paper's models have 35 to 385 million parameters"
    papers = ["mHC-lite's models are nanoGPT's of 6 to 24 layers and width 512 to 1,024, trained on 1.3 billion tokens"] if compares_residuals(study) else []
    return "; ".join(papers + (["AttentionX's are a ViT-small and GPT-2"] if compares_mechanisms(study) else []))


def sentences(study: Study, found: Mapping[str, SeriesWindows], shortfalls: Mapping[str, str]) -> Iterator[Sentence]:
    """About each scheme beside the plain one of the same mechanism and otherwise equal setting, then beside the one of `FURTHER`. ``shortfalls``: by series,
    why it learned too little ("" where it did not)."""
    judged: set[str] = set()
    for plain, others in _pairs(study):
        for other in others:
            named = f"{other} beside {plain}" if other in judged else other
            judged.add(other)
            if lacking := [name for name in (plain, other) if shortfalls[name]]:
                yield f"trained {named}", "not judged", f"{other} is not compared with {plain}: {listed(lacking)} learned too little."
                continue
            for subject, (column, *_) in COMPARED.items():
                if study.runs[column].notna().any():
                    yield (f"{subject} {named}", *_best(study, subject, other, plain))
            yield (f"window {named}", *_window(found[other], found[plain]))


def _pairs(study: Study) -> Iterator[tuple[str, list[str]]]:
    """A plain series and those that differ from it in their residual alone (of `FURTHER` too), or in their mechanism alone where that has it for a rival."""
    base = study.runs[study.runs["variant"] == ""].drop_duplicates("series")
    for axis, plain_of in (("residual", lambda name: PLAIN), ("residual", FURTHER.get), ("mechanism", RIVALS.get)):
        shared = [each for each in ("mechanism", *SETTING_AXES) if each not in (axis, "variant")]
        for _, group in base.groupby(shared, sort=False, dropna=False):
            named = dict(zip(group[axis], group["series"], strict=True))
            for plain in named:
                others = {series for name, series in named.items() if name != plain and plain_of(name) == plain}
                if others:
                    yield named[plain], [series for series in study.series if series in others]


def _best(study: Study, subject: str, other: str, plain: str) -> tuple[str, str]:
    """Verdict and text on each seed's best over the rates that both were trained at."""
    column, better, word, digits = COMPARED[subject]
    tables = [_finished(study.of(name), column) for name in (other, plain)]
    rates, seeds = (sorted(set(getattr(tables[0], axis)) & set(getattr(tables[1], axis))) for axis in ("index", "columns"))
    bests = [(better * table.loc[rates, seeds]).max(axis=0) * better for table in tables]
    pairs = [(a, b) for a, b in zip(*bests, strict=True) if math.isfinite(a) and math.isfinite(b)]
    differences = [a - b for a, b in pairs]
    numbers = "medians: " + " against ".join(f"{median:{digits}}" for median in np.median(pairs, axis=0)) if pairs else "no seed has both"
    if len(pairs) < 2:
        return "no claim", f"On the best {word} of {other} and {plain}, no claim is made with {plural(len(pairs), 'seed')} ({numbers})."
    direction, interval = decide(differences, differences)
    low, high = (f"{bound:+{digits}}".replace("-", "−") for bound in interval)
    numbers += f"; paired difference {low} to {high}, n={len(pairs)}{', 95 % interval' if len(pairs) > 2 else ''}"
    wanted = "lower" if better < 0 else "higher"
    if direction == 0:
        return "undecided", f"Whether {other} reaches a {wanted} {word} than {plain} at its best rate stays undecided ({numbers})."
    relation, verdict = ("lower" if direction < 0 else "higher"), ("holds" if direction * better > 0 else "contradicted")
    return verdict, f"{_weight(len(pairs))} that {other} reaches a {relation} {word} than {plain}, each at its best rate ({numbers})."


def _finished(runs: Frame, column: str) -> Frame:
    """Learning rate × seed; NaN where a run ended badly."""
    kept = runs[runs["status"].isin(FINISHED)]
    return kept.pivot_table(index="lr", columns="seed", values=column, aggfunc="first")


def _window(other: SeriesWindows, plain: SeriesWindows) -> tuple[str, str]:
    """Verdict and text."""
    result: Comparison = compare_windows(other, plain)
    widths = [f"{each.series} {width_text(each.median).replace('≥', 'at least')} decades" for each in (other, plain) if each.median is not None]
    numbers = "; ".join(widths)
    both = f"{other.series}'s stable window is {{}} than {plain.series}'s"
    if result.n < 2:
        return "no claim", f"On the stable windows of {other.series} and {plain.series}, no claim is made with {plural(result.n, 'seed')} ({numbers})."
    if result.direction == 0:
        return "undecided", f"Whether {both.format('wider')} stays undecided: {result.why_undecided} ({numbers})."
    within = " within the swept range" if result.scope == "range" else ""
    relation, verdict = ("wider", "holds") if result.direction > 0 else ("narrower", "contradicted")
    return verdict, f"{_weight(result.n)} that {both.format(relation)}{within} ({numbers})."


def _weight(n: int) -> str:
    return f"There are indications ({n} seeds)" if n < 3 else f"The results ({n} seeds) show"
