"""Tabulate the runs that diverged, failed, or learned nothing."""

from __future__ import annotations

import math

from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.tables import guarded, guarded_note, source
from analysis.drawing.typeset import Cell, Table
from analysis.sections.section import Drawn, Section
from analysis.study.load import Study
from analysis.words import lr_text, plural

TROUBLES_SHOWN = 60


def trouble_table(study: Study) -> Table | None:
    """Return a table of every run that did not end `stable`, or did so by its guards only, with its reason; None where
    there is none."""
    runs = study.runs[(study.runs["status"] != "stable") | study.runs["run_id"].isin(guarded(study.runs)["run_id"])]
    runs = runs.assign(order=runs["series"].map(study.series.index)).sort_values(["order", "lr", "seed"], kind="stable")
    if runs.empty:
        return None
    rows = tuple(
        (
            Cell(run.run_id),
            Cell(run.series),
            Cell(lr_text(run.lr)),
            Cell(f"{run.seed:g}"),
            Cell(run.status),
            Cell(f"{run.num_steps:g}" if math.isfinite(run.num_steps) else "--"),
            Cell(", ".join(filter(None, (run.reason, guards_did(run)))) or "--"),
        )
        for run in runs.head(TROUBLES_SHOWN).itertuples()
    )
    hidden = len(runs) - len(rows)
    more = f" {plural(hidden, 'further run')} not shown: results/runs.parquet has them." if hidden else ""
    caption = f"A divergence is a result; only “failed” is a crash.{guarded_note(study)}{more} {source(study)}"
    align = ("left", "left", "right", "right", "left", "right", "left")
    widths = ("auto",) * 6 + ("1fr",)
    title = f"Runs that did not end stable{'' if (runs['status'] != 'stable').all() else ' by themselves'}"
    return Table(
        title, caption, ("run", "mechanism", "LR", "seed", "status", "steps", "reason"), rows, (), align, widths
    )


def guards_did(run) -> str:
    """Say what guards did in a run, e.g. 2 steps skipped, 1 restore; "" where they left it alone."""
    skipped, restores = (0 if math.isnan(number) else int(number) for number in (run.skipped_steps, run.restores))
    return ", ".join(
        filter(
            None,
            (f"{plural(skipped, 'step')} skipped" if skipped else "", plural(restores, "restore") if restores else ""),
        )
    )


def body(study: Study, drawn: Drawn) -> Pieces:
    table = trouble_table(study)
    head = heading("Runs that diverged, failed, or learned nothing")
    return head + (paragraph("None: every run ended stable.") if table is None else shown([table]))


SECTION = Section(body, applies=lambda study: True)
