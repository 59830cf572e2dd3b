"""Tabulate an NLL's summands, validation and generative, as in the consensus paper's Table 4.

Nothing for a study without them.
"""

from __future__ import annotations

import numpy as np

from analysis.drawing.typeset import Cell, Table
from analysis.measures import CELL_RULE, finished_medians, nll_cell, select_finished
from analysis.sections.section import Section, has_data, make_body, make_printer
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import lr_text

RATES = 5  # learning rates per table
BOLD = "Bold: the best learning rate of each row."


def parts_of(runs: Frame, nll: str) -> dict[str, str]:
    """Return the columns of ``nll``'s summands by the summand's name."""
    columns = (str(column) for column in runs.columns)
    return {column.removeprefix(f"{nll}_"): column for column in columns if column.startswith(f"{nll}_")}


def component_tables(study: Study) -> list[Table]:
    """Return median NLL, interval and n, component and mechanism × learning rate; total first.

    The validation NLL, then the generative one by each oracle.
    """
    return _tables(
        study, study.runs, "val_nll", "NLL by component against learning rate", _validation_caption(study)
    ) + generative_component_tables(study)


def generative_component_tables(study: Study) -> list[Table]:
    """Return tables of the generative NLL's summands; runs scored by different oracles never share a table."""
    found = []
    for oracle in sorted(set(study.runs["gen_oracle"]) - {""}):
        runs = study.runs[study.runs["gen_oracle"] == oracle]
        about = (
            f"Oracle: {oracle}. {wording.words(study).scored_parts}; the total is their sum. Low is not good by "
            "itself: repetition scores low. Median over the seeds that were scored."
        )
        found += _tables(study, runs, "gen_nll", "Generative NLL by component against learning rate", about)
    return found


def _tables(study: Study, runs: Frame, nll: str, title: str, about: str) -> list[Table]:
    """Return the tables of the total ``nll`` (a column) and its summands; ``about`` begins the caption."""
    parts = {
        name.capitalize(): column for name, column in parts_of(runs, nll).items() if len(select_finished(runs, column))
    }
    if not parts:
        return []
    lrs, columns = sorted(set(runs["lr"])), {"Total": nll, **parts}
    caption = f"{about} {CELL_RULE} {BOLD}"
    groups = [tuple(lrs[start : start + RATES]) for start in range(0, len(lrs), RATES)]
    heads = [("Component", "Mechanism", *map(lr_text, some)) for some in groups]
    rows = [_rows(study, runs, columns, some) for some in groups]
    return [Table(title, caption, head, body) for head, body in zip(heads, rows, strict=True)]


def _rows(study: Study, runs: Frame, columns: dict[str, str], lrs: tuple[float, ...]) -> tuple[tuple[Cell, ...], ...]:
    rows, present = [], study.present(runs)
    for name, column in columns.items():
        for series in present:
            own = runs[runs["series"] == series]
            medians = finished_medians(own, column)
            best = medians.idxmin() if len(medians) else None
            rows.append((Cell(name), Cell(series), *(nll_cell(own, lr, best == lr, column) for lr in lrs)))
    return tuple(rows)


def _validation_caption(study: Study) -> str:
    """Return the start of the validation caption: units, averages, and the NLL of token frequencies."""
    words = wording.words(study)
    frequencies = {"total": "unigram_nll", **parts_of(study.runs, "unigram_nll")}
    known = [
        f"{name} {np.nanmedian(study.runs[column]):.3f}"
        for name, column in frequencies.items()
        if np.isfinite(study.runs[column]).any()
    ]
    return (
        f"Validation NLL at the end of training: {words.parts}; the total is their sum. {words.baseline.capitalize()} "
        f"reach: {', '.join(known) or 'not recorded'}. Median over the seeds that finished."
    )


applies = has_data(component_tables)
SECTION = Section(make_body("Components", component_tables), applies, tables=make_printer(component_tables))
