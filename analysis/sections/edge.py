"""Show the result of `lr=edge`: best learning rates, edges of stability with brackets, and cost against a grid."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.marks import dots, entry, mark, mark_entry
from analysis.drawing.style import INK, WIDTH_INCHES, Look, fitting_legend, looks, lr_axis
from analysis.drawing.typeset import Cell, Table
from analysis.measures import nll_detail, nll_text
from analysis.numbers.at_best_rate import edges_of
from analysis.numbers.spread import Spread
from analysis.sections.section import Captioned, Figures, Section, has_data, make_body, make_printer
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import lr_text, plural

NAME = "edges"
ROW_INCHES = 0.34
STATES = {
    "failed": "a run failed, the same command tries it again",
    "unfinished": "the same command goes on",
    "used up": "too noisy for narrow brackets in as many rates",
}
CAPTION = (
    "Every learning rate that was tried, a row a mechanism. Filled: every seed ended stable; hollow: some seed "
    "spiked or learned nothing; ×: some seed diverged. Star: the best rate; solid and dashed upright: the middles "
    "of the brackets of the edges by verdict and by NLL, arrows where an edge lies beyond."
)


def _curves(study: Study) -> list[tuple[str, Any]]:
    """Return (series, row of the table) of every curve, in the study's order."""
    return sorted(edges_of(study).items(), key=lambda pair: study.series.index(pair[0]))


def edge_tables(study: Study) -> list[Table]:
    """Return the one table of edges in a study with `lr=edge`, else none."""
    curves = _curves(study)
    if not curves:
        return []
    rows = tuple(_row(study, series, row) for series, row in curves)
    found = curves[0][1]
    unfinished = [f"{series} ({STATES[row.state]})" for series, row in curves if row.state != "found"]
    caption = (
        f"Best: the lowest median NLL over seeds ({wording.words(study).unit}); below it the neighbouring rates, "
        "between which the true best lies. By verdict: the largest rate at which every seed ended stable; by NLL: the "
        f"largest whose median NLL is within {100 * found.nll_tolerance:g} % of the best, a divergence counting as "
        "infinite; below each the next rate tried, which no longer is: the edge lies in between, to "
        f"{found.resolution_decades:g} decades. ≥: still so at the largest rate tried; <: not even at the smallest; "
        "none: at no rate, and the smallest learned too little rather than diverged. Not at: rates below the edge "
        "that are beyond it all the same. Runs: how many there are, and how many a grid of the same resolution "
        f"takes over the range that was tried. {_stopped_text(study)}"
        + (f"Not found to the end: {', '.join(unfinished)}. " if unfinished else "")
    )
    header = ("mechanism", "best LR", "NLL", "edge by verdict", "edge by NLL", "runs", "of a grid")
    return [Table("Best learning rates and edges of stability", caption, header, rows)]


def _stopped_text(study: Study) -> str:
    """Return the share of their steps that diverged runs completed, as text; "" if all."""
    diverged = study.runs[study.runs["status"] == "diverged"]["num_steps"]
    whole = study.runs["num_steps"].max()
    if diverged.empty or not diverged.sum() < len(diverged) * whole:
        return ""
    return (
        f"{plural(len(diverged), 'run')} diverged and stopped there, after "
        f"{100 * diverged.sum() / (len(diverged) * whole):.0f} % of their steps. "
    )


def _row(study: Study, series: str, row: Any) -> tuple[Cell, ...]:
    """Return one curve's row: best rate and NLL, both edges, and the number of runs against a grid."""
    runs = study.of(series)
    seeds = Spread.of(runs[runs["lr"] == row.best_lr]["val_nll"]) if math.isfinite(row.best_lr) else None
    best = Cell(lr_text(row.best_lr), f"{_end(row.best_low)}–{_end(row.best_high)}") if seeds else Cell("--")
    # the smallest rate is too small, not too large, if none of its seeds diverged or spiked
    ended = set(runs[runs["lr"] == runs["lr"].min()]["status"])
    has_learned = not ("plateaued" in ended and ended <= {"plateaued", "stable"})
    return (
        Cell(series, "" if row.state == "found" else row.state),
        best,
        Cell("--") if seeds is None else Cell(nll_text(row.best_nll, runs), nll_detail(seeds, runs)),
        _edge(row.verdict_lr, row.verdict_next_lr, row.verdict_exceptions, has_learned),
        _edge(row.nll_lr, row.nll_next_lr, row.nll_exceptions),
        Cell(f"{row.num_runs:.0f}", f"{plural(int(row.num_rates), 'rate')}, {plural(int(row.num_rounds), 'round')}"),
        Cell(f"{row.num_grid_runs:.0f}", f"n={row.num_seeds:.0f}"),
    )


def _end(lr: float) -> str:
    """Return one end of a bracket as text; "…" if no rate was tried beyond."""
    return "…" if math.isnan(lr) else lr_text(lr)


def _edge(lr: float, next_lr: float, exceptions: str, learned: bool = True) -> Cell:
    if math.isnan(lr):
        return Cell(f"< {lr_text(next_lr)}" if learned else "none")
    others = [f"not at {' '.join(lr_text(float(each)) for each in exceptions.split())}"] if exceptions else []
    if math.isnan(next_lr):
        return Cell(f"≥ {lr_text(lr)}", "\n".join(others))
    return Cell(lr_text(lr), "\n".join([f"below {lr_text(next_lr)}", *others]))


def figures(study: Study) -> Figures:
    """Draw the one figure in a study with `lr=edge`, else none."""
    curves = _curves(study)
    return {NAME: Captioned(_figure(study, curves), CAPTION)} if curves else {}


def _figure(study: Study, curves: list[tuple[str, Any]]) -> Figure:
    """Draw a row for each curve: every tried rate, the best one, and both edges."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.9 + ROW_INCHES * len(curves)), layout="constrained")
    ax, styles = figure.subplots(), looks(study)
    for place, (series, row) in enumerate(curves):
        _track(ax, study, series, row, place, styles[series])
    lr_axis(ax, study.runs["lr"])
    ax.set_yticks(range(len(curves)), [series for series, _ in curves])
    ax.set_ylim(len(curves) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("learning rate")
    handles = [
        mark_entry("stable", "o"),
        mark_entry("spiked, learned nothing", "o", markerfacecolor="white"),
        mark_entry("diverged", "x"),
        mark_entry("best", "*", 9),
        entry("edge by verdict", INK, linewidth=1.2),
        entry("by NLL", INK, linewidth=1.2, linestyle=(0, (2, 1.4))),
    ]
    fitting_legend(figure, handles, 6)
    return figure


def _track(ax: Axes, study: Study, series: str, row: Any, place: int, look: Look) -> None:
    """Draw one curve: its rates, a star at the best, a bar at each edge's middle.

    Rates are crosses if a run diverged, filled if all were stable. An arrow marks an edge beyond the tried rates.
    """
    for lr, runs in study.of(series).groupby("lr"):
        ended = set(runs["status"])
        if "diverged" in ended:
            ax.plot(lr, place, "x", color=look.color, markersize=4, markeredgewidth=1)
        else:
            fill = look.color if ended == {"stable"} else "white"
            mark(ax, lr, place, "o", look.color, 4, markerfacecolor=fill, markeredgewidth=0.8)
    if math.isfinite(row.best_lr):
        dots(ax, row.best_lr, place, "*", look.color, 10, markeredgecolor=INK, markeredgewidth=0.6, zorder=5)
    for lr, next_lr, dashes in (
        (row.verdict_lr, row.verdict_next_lr, "-"),
        (row.nll_lr, row.nll_next_lr, (0, (2, 1.4))),
    ):
        if math.isfinite(lr) and math.isfinite(next_lr):
            middle, upright = [math.sqrt(lr * next_lr)] * 2, [place - 0.38, place + 0.38]
            ax.plot(middle, upright, color=INK, linewidth=1.2, linestyle=dashes, zorder=4)
        elif math.isfinite(lr):
            arrow = {"arrowstyle": "->", "color": INK, "linestyle": dashes}
            ax.annotate("", (lr * 1.25, place), (lr, place), arrowprops=arrow, annotation_clip=False)


applies = has_data(_curves)
TITLE = "Best learning rates and edges of stability"
SECTION = Section(make_body(TITLE, edge_tables, is_table_first=True), applies, figures, make_printer(edge_tables))
