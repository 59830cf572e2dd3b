"""Show sentence embeddings beside their start: correlation and recall at each series' best rate.

Nothing for a study whose objective ranks no sentences.
"""

from __future__ import annotations

import numpy as np

from analysis.drawing.typeset import Cell, Table
from analysis.measures import select_finished
from analysis.numbers.spread import Mean
from analysis.numbers.windows import windows
from analysis.sections.section import Section, has_data, list_one, make_body, make_printer
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import lr_text

TITLE = "Sentence embeddings beside their start"
PAIRS = (
    "The pairs of Spearman's correlation are each held-out row's own (1) and its first sentence with the next row's "
    "second one (0), so that 0.87 is the most."
)
# column of the runs, name, factor
SCORES = (
    ("val_spearman", "Spearman", 1.0),
    ("val_recall_1", "recall@1 (%)", 100.0),
    ("val_recall_10", "recall@10 (%)", 100.0),
)


def _scores(study: Study) -> list[tuple[str, str, float]]:
    """Return the scores with a value at the start and at the end."""
    runs = study.runs
    return [each for each in SCORES if f"init_{each[0]}" in runs and len(select_finished(runs, each[0]))]


applies = has_data(_scores)


def table(study: Study) -> Table:
    """Return a row for each series: its scores at step 0 and at the end, at the best rate of its loss."""
    scores = _scores(study)
    rows = tuple(_row(study, name, scores) for name in study.series)
    pairs = f" {PAIRS}" if "val_recall_1" in study.runs else ""
    caption = (
        "At step 0, the pooled start, and after training, at the rate with the least "
        f"{wording.words(study).nll}: medians over seeds. Below: the gain, end less start of each seed; mean with "
        f"Student-t 95 % interval (n ≥ 3) or smallest and largest (n = 2); "
        f"bold: above 0.{pairs}"
    )
    return Table(TITLE, caption, ("mechanism", "best LR", *(name for _, name, _ in scores)), rows)


def _row(study: Study, series: str, scores: list[tuple[str, str, float]]) -> tuple[Cell, ...]:
    best = windows(study)[series].median
    if best is None:
        return (Cell(series), Cell("--"), *(Cell("no run finished") for _ in scores))
    runs = study.of(series)
    runs = runs[runs["lr"] == best.best_lr]
    return (Cell(series), Cell(lr_text(best.best_lr)), *(_cell(runs, column, unit) for column, _, unit in scores))


def _cell(runs: Frame, column: str, unit: float) -> Cell:
    """Return start and end, and below them the gain with its interval."""
    finished = select_finished(runs, column)
    finished = finished[np.isfinite(finished[f"init_{column}"])]
    start, end = (unit * finished[name] for name in (f"init_{column}", column))
    if not len(end):
        return Cell("--")
    digits = 3 if unit == 1 else 1
    form = f"{{:+.{digits}f}}".format
    gain = Mean.of(end - start)
    text = f"{start.median():.{digits}f} → {end.median():.{digits}f}"
    return Cell(text, f"{gain.mean:+.{digits}f}; {gain.detail(form)}", gain.n > 1 and gain.low > 0)


TABLES = list_one(table)
SECTION = Section(make_body("Sentence embeddings", TABLES), applies, tables=make_printer(TABLES))
