"""Tabulate the runs that diverged, failed, or learned nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.tables import guarded, guarded_note, source
from analysis.drawing.typeset import Cell, Table
from analysis.sections.section import Drawn, Section
from analysis.study.load import FINISHED, Study
from analysis.words import lr_text, plural, without_places

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
            Cell(", ".join(filter(None, (without_places(run.reason), guards_did(run)))) or "--"),
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


def cut_short(study: Study) -> str:
    """Say which finished runs have a log that ends before their last step; "" where none has. Their verdict and final
    NLL were kept apart from the log; whatever is read off the steps it lacks is not there."""
    runs = study.runs[study.runs["status"].isin((*FINISHED, "diverged"))]
    last = runs["run_id"].map(study.curves.groupby("run_id")["step"].max()).fillna(0)
    short = runs.assign(last=last)[last < runs["num_steps"]]
    if short.empty:
        return ""
    first = short.iloc[0]
    return (
        f"The log (metrics.jsonl) of {plural(len(short), 'finished run')} ends early, that of {first['run_id']} at "
        f"step {first['last']:g} of {first['num_steps']:g}: verdicts and final NLL stand, curves and what is read off "
        "them end there."
    )


def body(study: Study, drawn: Drawn) -> Pieces:
    table, short = trouble_table(study), cut_short(study)
    head = heading("Runs that diverged, failed, or learned nothing") + (paragraph(short) if short else ())
    return head + (paragraph("None: every run ended stable.") if table is None else shown([table]))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    """Return what is printed of it: logs that were cut short, nothing else."""
    return [short] if (short := cut_short(study)) else []


SECTION = Section(body, applies=lambda study: True, tables=tables)
