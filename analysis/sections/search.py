"""Show the results of `search=optuna` and `search=pbt`.

Optuna: the best points of each kind of run, and the history of the best. PBT: the schedule of each population's best
member, and all rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing.marks import dots
from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.style import WIDTH_INCHES, fitting_legend, lr_text, mechanism_looks, panel_grid
from analysis.drawing.typeset import Cell, Table
from analysis.measures import three_digits
from analysis.numbers.spread import MEAN_RULE, Mean
from analysis.sections.section import Captioned, Drawn, Figures, Section, make_body, make_printer
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import plural

NAME, SHOWN = "search", 8
CAPTION = (
    "The search, point by point: each point's objective, and the lowest so far as a line. Points of one round were "
    "chosen together."
)


def points(study: Study) -> Frame:
    """Return one row per point: series, mechanism, number, round, score, seeds' scores (`by_seed`), each field.

    Empty without a search.
    """
    table = study.searches.get("search")
    if table is None:
        return study.runs.iloc[:0]
    runs = study.runs.set_index("run_id")
    runs["own"] = runs[["val_nll", "init_nll"]].min(axis=1)
    wide = table.pivot_table(index=["run_id", "number", "round"], columns="field", values="value").reset_index()
    scores = table.drop_duplicates("run_id").set_index("run_id")["score"]
    wide = (
        wide.join(runs[["series", "own"]], on="run_id").join(scores, on="run_id").join(runs["mechanism"], on="run_id")
    )
    whole = wide.drop_duplicates(["series", "number"]).set_index(["series", "number"])
    whole["by_seed"] = wide.groupby(["series", "number"])["own"].agg(list)
    order = sorted(whole.index, key=lambda key: (study.series.index(key[0]), key[1]))
    return whole.loc[order].reset_index()


def search_tables(study: Study) -> list[Table]:
    """Return one table for each kind of run."""
    found = points(study)
    kinds = found.groupby("series", sort=False) if len(found) else ()
    return [_table(study, str(series), part) for series, part in kinds]


def _table(study: Study, series: str, part: Frame) -> Table:
    """Return one kind's best points with their settings, by the objective's mean over seeds."""
    fields = [name for name in dict.fromkeys(study.searches["search"]["field"]) if part[name].notna().any()]
    best = part[part["score"].notna()].sort_values(["score", "number"]).head(SHOWN)
    unknown = int(part["score"].isna().sum())
    rows = tuple(_row(row, fields, place == 0) for place, row in enumerate(best.to_dict("records")))
    caption = (
        f"The {plural(len(best), 'best point')} of {len(part)}{f' ({unknown} without a result)' if unknown else ''}, "
        "by the mean over seeds of the smaller of the validation NLL at the end and at initialisation "
        f"({wording.words(study).unit}), which is finite where a run diverged. {MEAN_RULE}. Point and "
        f"round: when it was tried."
    )
    return Table(f"Search over {', '.join(fields)}: {series}", caption, ("point", "objective", *fields), rows)


def _row(row, fields: list[str], first: bool) -> tuple[Cell, ...]:
    return (
        Cell(f"{row['number']:.0f}", f"round {row['round']:.0f}"),
        Cell(f"{row['score']:.3f}", Mean.of(row["by_seed"]).detail(three_digits), bold=first),
        *(Cell(f"{row[name]:.4g}") for name in fields),
    )


def figures(study: Study) -> Figures:
    """Draw the history of every kind of run; none without a search or without a result."""
    found = points(study)
    return {NAME: Captioned(_figure(found), CAPTION)} if len(found) and found["score"].notna().any() else {}


def _figure(found: Frame) -> Figure:
    """Draw every point's objective in order, and each kind's running minimum as a line."""
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


def body(study: Study, drawn: Drawn) -> Pieces:
    missing = paragraph("No point of the search has a result yet.")
    return heading("The search") + shown(search_tables(study)) + drawn.get(NAME, missing)


LINEAGE_NAME = "lineage"
MOST_COLUMNS = 3
LINEAGE_CAPTION = (
    "Population based training: thin, the learning rate of every member, segment by segment; thick, with a point at "
    "each change, the schedule found: the rates of the runs that the population's best member descends from. Dotted: "
    "a checkpoint that another member took over. A panel for each seed."
)


def best_line(members: Frame) -> list[dict[str, Any]]:
    """Return the segments leading to the last segment's best member, first to last; [] without a score.

    ``members`` has one population's rows; the result has rows of it.
    """
    last = members[(members["segment"] == members["segment"].max()) & members["score"].notna()]
    if last.empty:
        return []
    row = last.sort_values(["score", "member"]).iloc[0].to_dict()
    line, earlier = [row], members.drop_duplicates("run_id").set_index("run_id")
    while row["parent"]:
        row = {"run_id": row["parent"], **earlier.loc[row["parent"]].to_dict()}
        line.insert(0, row)
    return line


def populations(study: Study) -> list[tuple[str, str, int, Frame]]:
    """Return (series, mechanism, seed, members) of each population; [] without any."""
    table = study.searches.get("lineage")
    if table is None:
        return []
    runs, found = study.runs.set_index("run_id"), []
    for _, members in table.groupby("population", sort=True):
        run = runs.loc[members["run_id"].iloc[0]]
        found.append((str(run["series"]), str(run["mechanism"]), int(run["seed"]), members))
    return found


def lineage_tables(study: Study) -> list[Table]:
    """Return a single table with a row for each population with a best member; [] without any."""
    rows = []
    for series, _, seed, members in populations(study):
        line = best_line(members)
        if line:
            schedule = _schedule(line)
            num_taken = int(members["took_over"].sum())
            rates = ", ".join(f"{lr_text(lr)} from {step + 1:.0f}" for step, lr in schedule)
            score = Cell(f"{line[-1]['score']:.3f}", bold=True)
            rows.append((Cell(f"{series}, seed {seed}"), score, Cell(rates), Cell(f"{num_taken}")))
    if not rows:
        return []
    num_segments = study.searches["lineage"]["segment"].nunique()
    caption = (
        f"Validation NLL of each population's best member after {plural(num_segments, 'segment')} "
        f"({wording.words(study).unit}), the learning rates that led to it, each from the step named on, and how often "
        f"a member took over another's checkpoint. One seed each: no interval."
    )
    header = ("population", "NLL", "learning rate", "taken over")
    return [Table("Population based training", caption, header, tuple(rows))]


def _schedule(line: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (step before the first, rate) of each stretch at one rate."""
    found: list[tuple[int, float]] = []
    for row in line:
        if not found or found[-1][1] != row["lr"]:
            found.append((row["first_step"], row["lr"]))
    return found


def lineage_figures(study: Study) -> Figures:
    known = [each for each in populations(study) if best_line(each[3])]
    return {LINEAGE_NAME: Captioned(_lineage_figure(known), LINEAGE_CAPTION)} if known else {}


def _lineage_figure(known: list[tuple[str, str, int, Frame]]) -> Figure:
    """Draw the populations, a panel for each seed: common rates would hide each other."""
    seeds = sorted({seed for _, _, seed, _ in known})
    figure, panels = panel_grid(len(seeds), min(len(seeds), MOST_COLUMNS), 2.2, 0.6, sharex=True, sharey=True)
    styles, handles = mechanism_looks([mechanism for _, mechanism, _, _ in known]), {}
    for seed, ax in zip(seeds, panels, strict=True):
        for series, mechanism, _, members in [each for each in known if each[2] == seed]:
            handles[series] = _population(ax, members, *styles[mechanism], series)
        ax.set_title(f"seed {seed}")
    panels[0].set_yscale("log")
    figure.supxlabel("step")
    figure.supylabel("learning rate")
    fitting_legend(figure, list(handles.values()), 6)
    return figure


def _population(ax: Axes, members: Frame, color: str, marker: str, label: str) -> Line2D:
    """Draw learning rate against step; return the best member's line.

    Members are thin, takeovers dotted, the best member's line thick.
    """
    for _, own in members.groupby("member"):
        for row in own.to_dict("records"):
            ax.plot([row["first_step"], row["last_step"]], [row["lr"]] * 2, color=color, linewidth=0.6, alpha=0.5)
    by_id = members.drop_duplicates("run_id").set_index("run_id")["lr"]
    for row in members[members["took_over"] > 0].to_dict("records"):
        rates = [by_id[row["parent"]], row["lr"]]
        ax.plot([row["first_step"]] * 2, rates, ":", color=color, linewidth=0.6, alpha=0.5)
    line = best_line(members)
    steps, rates = [line[0]["first_step"]], [line[0]["lr"]]
    for row in line:
        steps, rates = [*steps, row["first_step"], row["last_step"]], [*rates, row["lr"], row["lr"]]
    (found,) = ax.plot(steps, rates, color=color, linewidth=1.8, label=label)
    changes = _schedule(line)
    ax.plot([step for step, _ in changes], [lr for _, lr in changes], marker, color=color, markersize=4)
    return found


def has_lineage(study: Study) -> bool:
    return bool(lineage_tables(study))


SECTION = Section(body, applies, figures, make_printer(search_tables))
BODY = make_body("Population based training", lineage_tables, is_table_first=True)
LINEAGE = Section(BODY, has_lineage, lineage_figures, make_printer(lineage_tables))
