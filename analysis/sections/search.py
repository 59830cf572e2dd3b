"""Show what `search=optuna` tried: the best points of each kind of run, and how the best so far fell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from analysis.drawing.marks import dots
from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.style import WIDTH_INCHES, fitting_legend, mechanism_looks
from analysis.drawing.tables import source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import INTERVAL_RULES, POSITIVE, Spread
from analysis.sections.section import Drawn, Figures, Section, sourced
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import plural

NAME, SHOWN = "search", 8
CAPTION = (
    "The search, point by point: each point's objective, and the lowest so far as a line. Points of one round were "
    "chosen together."
)


def points(study: Study) -> Frame:
    """Return a table with a row a point: series, mechanism, number, round, score, its runs' own (`by_seed`), and a
    column for each field; empty without a search."""
    table = study.searches.get("search")
    if table is None:
        return study.runs.iloc[:0]
    runs = study.runs.set_index("run_id")
    runs["own"] = runs[["val_nll", "init_nll"]].min(axis=1)
    wide = (
        table.pivot_table(index=["run_id", "number", "round"], columns="field", values="value")
        .reset_index()
        .join(runs[["series", "own"]], on="run_id")
    )
    wide = wide.join(table.drop_duplicates("run_id").set_index("run_id")["score"], on="run_id").join(
        runs["mechanism"], on="run_id"
    )
    whole = wide.drop_duplicates(["series", "number"]).set_index(["series", "number"])
    whole["by_seed"] = wide.groupby(["series", "number"])["own"].agg(list)
    order = sorted(whole.index, key=lambda key: (study.series.index(key[0]), key[1]))
    return whole.loc[order].reset_index()


def search_tables(study: Study) -> list[Table]:
    """Return one table for each kind of run."""
    found = points(study)
    return (
        [_table(study, str(series), part) for series, part in found.groupby("series", sort=False)] if len(found) else []
    )


def _fields(study: Study, part: Frame) -> list[str]:
    return [name for name in dict.fromkeys(study.searches["search"]["field"]) if part[name].notna().any()]


def _table(study: Study, series: str, part: Frame) -> Table:
    """Return the table of one kind's best points with their settings, by the mean over seeds of the objective."""
    fields = _fields(study, part)
    best = part[part["score"].notna()].sort_values(["score", "number"]).head(SHOWN)
    unknown = int(part["score"].isna().sum())
    rows = tuple(_row(row, fields, place == 0) for place, row in enumerate(best.to_dict("records")))
    caption = (
        f"The {plural(len(best), 'best point')} of {len(part)}{f' ({unknown} without a result)' if unknown else ''}, "
        "by the mean over seeds of the smaller of the validation NLL at the end and at initialisation "
        f"({wording.unit(study)}), which is finite where a run diverged. {INTERVAL_RULES[POSITIVE]}. Point and "
        f"round: when it was tried. {source(study)}"
    )
    return Table(f"Search over {', '.join(fields)}: {series}", caption, ("point", "objective", *fields), rows)


def _row(row, fields: list[str], first: bool) -> tuple[Cell, ...]:
    return (
        Cell(f"{row['number']:.0f}", f"round {row['round']:.0f}"),
        Cell(f"{row['score']:.3f}", Spread.of(row["by_seed"], POSITIVE).detail(), bold=first),
        *(Cell(f"{row[name]:.4g}") for name in fields),
    )


def figures(study: Study) -> Figures:
    """Draw the history of every kind of run; none without a search, or where no point has a result."""
    found = points(study)
    return {NAME: sourced(study, _figure(found), CAPTION)} if len(found) and found["score"].notna().any() else {}


def _figure(found: Frame) -> Figure:
    """Draw every point's objective in the order tried, and the lowest so far as a line, for each kind of run."""
    figure = Figure(figsize=(WIDTH_INCHES, 2.5), layout="constrained")
    ax, styles = figure.subplots(), mechanism_looks(found["mechanism"])
    handles = []
    for series, part in found.groupby("series", sort=False):
        color, marker = styles[part["mechanism"].iloc[0]]
        values = part["score"].to_numpy(dtype=float)
        lowest = np.fmin.accumulate(np.where(np.isnan(values), math.inf, values))
        dots(ax, part["number"], values, marker, color, 4, alpha=0.8, zorder=2)
        known = np.where(np.isinf(lowest), np.nan, lowest)
        handles += ax.plot(part["number"], known, color=color, drawstyle="steps-post", label=str(series))
    ax.set_xlabel("point")
    ax.set_ylabel("objective (nats)")
    fitting_legend(figure, handles, 6)
    return figure


def applies(study: Study) -> bool:
    return study.is_search and bool(search_tables(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    return search_tables(study)


def body(study: Study, drawn: Drawn) -> Pieces:
    missing = paragraph("No point of the search has a result yet.")
    return heading("The search") + shown(search_tables(study)) + drawn.get(NAME, missing)


SECTION = Section(body, applies, figures, tables)
