"""Provide shared parts of the report's tables: splitting, data source, and troubled runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from analysis.drawing.typeset import Cell
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.window_ends import shown_states
from analysis.numbers.windows import TOLERANCE, VALIDATION, Window, windows
from analysis.study import multiples, wording
from analysis.study.load import HAS_RESULT, PENDING, Frame, Study
from analysis.study.reference import references
from analysis.words import plural
from stability.runs.words import EXPLODED, LEARNED_NOTHING


def chunks(items: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Split ``items`` as evenly as possible into parts of at most ``size``: seven columns become 4 + 3, not 6 + 1."""
    count = max(1, math.ceil(len(items) / size))
    return [tuple(part) for part in np.array_split(np.asarray(items, dtype=object), count)]


def narrow(cell: Cell) -> Cell:
    """Return a cell with interval, n and failures on separate lines, for narrow columns.

    Twelve columns of a centimetre fit the page.
    """
    lines = f"{cell.text}\n{cell.detail}".replace("–", "–\n").replace(", ", "\n").replace(" ", "\n")
    text, *below = lines.split("\n")
    return Cell(text, "\n".join(filter(None, below)), cell.bold, cell.whole or cell)


def source(study: Study) -> str:
    """Return the end of every caption: data, tokens and objective of the numbers."""
    named, objective = wording.data(study), wording.objective(study)
    text = (
        "Data fingerprint "
        f"{study.fingerprint}{f' ({named})' if named else ''}.{f' Objective: {objective}.' if objective else ''}"
    )
    text += f" {multiples.TOLD}" if study.is_in_multiples else ""
    weights = wording.weights(study)
    return f"{text} Every run {weights}." if weights else text


def list_failures(runs: Frame) -> list[str]:
    """Return every bad verdict among a cell's runs, e.g. ``["diverged 1/2", "learned nothing 1/2"]``."""
    finite = np.isfinite(runs["val_nll"])
    labels = shown_states(runs).where(~(runs["status"].isin(HAS_RESULT) & ~finite), "non-finite")
    counts = dict(labels[~labels.isin(("stable", "spiked"))].value_counts()) | {"guarded": len(find_guarded(runs))}
    order = ("diverged", "non-finite", "failed", *PENDING, EXPLODED, LEARNED_NOTHING, "guarded")
    return [f"{label} {counts[label]}/{len(runs)}" for label in order if counts.get(label)]


def find_guarded(runs: Frame) -> Frame:
    """Return the runs with a step skipped or a checkpoint restored by guards."""
    return runs[runs["skipped_steps"].fillna(0) + runs["restores"].fillna(0) > 0]


def guarded_note(study: Study) -> str:
    """Describe the guards' actions in this study; "" for none."""
    runs = find_guarded(study.runs)
    if runs.empty:
        return ""
    steps, restores = (
        plural(int(runs[column].sum()), word)
        for column, word in (("skipped_steps", "skipped step"), ("restores", "restore"))
    )
    return (
        f" Guarded: {len(runs)} of {plural(len(study.runs), 'run')}, in which guards answered what ends a run as "
        f"diverged ({steps}, {restores})."
    )


def limit_text(found: Iterable[Window], whose: str, nll: str = "NLL") -> str:
    """Return the limit of windows, e.g. "within 5 % of sa's best NLL", or half of the learning where that acts.

    Args:
        found: windows by own limits.
        whose: possessive of their mechanism.
        nll: name of the loss.
    """
    halves = [each.keeps_half for each in found]
    within, half = f"within {100 * TOLERANCE:g} % of {whose} best {nll}", f"keeping half of {whose} learning"
    return half if halves and all(halves) else f"{within}, {half}" if any(halves) else within


def limits(study: Study, series: Sequence[str], whose: str, column: str = VALIDATION) -> tuple[str, str]:
    """Return the limits of own and of common windows (`limit_text`), those of trained series.

    Args:
        study: the study.
        series: names of the series.
        whose: possessive of a series in the first text; the second one has the reference's name.
        column: validation or generative NLL.
    """
    found, lacking, pairs = windows(study, column=column), reasons_untrained(study), references(study)
    trained = [name for name in series if not lacking[name]]
    own, plain = (
        [each for name in names if (each := found[name].median) is not None]
        for names in (trained, {pairs.get(name, name) for name in trained})
    )
    return limit_text(own, whose), limit_text(plain, f"{study.reference}'s")


def width_text(found: Window) -> str:
    """Write a window's width in decades or its bounds: 1.32, ≥ 1.32 or 1.20–1.68; none if empty, -- of one rate."""
    if found.has_one_rate:
        return "--"
    if found.is_empty:
        return "none"
    if math.isinf(found.width_max):
        return f"≥ {found.width:.2f}"
    if found.width_max > found.width + 0.005:
        return f"{found.width:.2f}–{found.width_max:.2f}"
    return f"{found.width:.2f}"
