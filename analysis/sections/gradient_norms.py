"""Draw gradient norms against step where a study compares residual schemes (mHC-lite's Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.claims.pairs import PLAIN
from analysis.drawing.marks import mechanism_legend
from analysis.drawing.pieces import Pieces
from analysis.drawing.style import WIDTH_INCHES, Look, looks
from analysis.sections.section import Drawn, Figures, Section, pictures, sourced
from analysis.study.load import Frame, Study
from analysis.words import lr_text

NAME = "gradient-norms"
PANELS = 4  # learning rates, evenly chosen
WINDOW_SHARE = 50  # of the steps: how many a mean runs over
CAPTION = (
    "Norm of the whole gradient before clipping against step, as mHC-lite's Figure 2, by learning rate (four at "
    "most). Line: median over seeds of a running mean over a fiftieth of the steps; shade: the seeds' range. A line "
    "ends where its last seed does. With n streams the head reads the sum of n normed ones, so that the logits "
    "start n times as large as with the plain residual (hc; mhc and mhc_lite nearly). NLL and gradient norm start "
    "larger for that alone{here}, which is no sign of instability, but clip_norm acts on it."
)


def figures(study: Study) -> Figures:
    """Draw the figure; {} where one residual scheme is all there is."""
    rows = study.with_run(study.curves)
    rows = rows[np.isfinite(rows["grad_norm"]) & (rows["grad_norm"] > 0)]
    if study.runs["residual"].nunique() < 2 or rows.empty:
        return {}
    return {NAME: sourced(study, _figure(study, rows), CAPTION.format(here=_at_the_start(study)))}


def body(study: Study, drawn: Drawn) -> Pieces:
    return pictures(drawn)


def _at_the_start(study: Study) -> str:
    """Say by how much NLL and gradient norm differ at the start from the plain residual of the same mechanism: ranges
    over mechanisms and schemes of medians over runs; "" without a plain one."""
    norms = study.curves[study.curves["grad_norm"] > 0].sort_values("step").groupby("run_id")["grad_norm"].first()
    runs = study.runs.assign(start=study.runs["run_id"].map(norms))
    medians = runs.groupby(["mechanism", "residual"])[["init_nll", "start"]].median().dropna()
    beside = [
        (row, medians.loc[(mechanism, PLAIN)])
        for (mechanism, name), row in medians.iterrows()
        if name != PLAIN and (mechanism, PLAIN) in medians.index
    ]
    if not beside:
        return ""
    nll, plain = (_span([values["init_nll"] for values in side], ".2f") for side in zip(*beside, strict=True))
    return (
        f" (here {nll} against {plain} nats and "
        f"{_span([row['start'] / base['start'] for row, base in beside], '.1f')} times the norm)"
    )


def _span(values: Sequence[float], digits: str) -> str:
    low, high = f"{min(values):{digits}}", f"{max(values):{digits}}"
    return low if low == high else f"{low} to {high}"


def _figure(study: Study, rows: Frame) -> Figure:
    """Draw gradient norm against step, a panel for each of a few learning rates, a line for each series."""
    rates = sorted(set(rows["run_lr"]))
    shown = [
        rates[place]
        for place in sorted({round(place) for place in np.linspace(0, len(rates) - 1, min(PANELS, len(rates)))})
    ]
    styles, present = looks(study), set(rows["series"])
    figure = Figure(figsize=(max(3.2, WIDTH_INCHES * min(1.0, 0.1 + 0.24 * len(shown))), 2.6), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, lr in zip(axes, shown, strict=True):
        for name in (name for name in styles if name in present):
            _line(ax, rows[(rows["series"] == name) & (rows["run_lr"] == lr)], styles[name])
        ax.set_yscale("log")
        ax.set_title(f"LR {lr_text(lr)}", loc="left")
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0].set_ylabel("gradient norm")
    mechanism_legend(figure, {name: look for name, look in styles.items() if name in present}, markers=False)
    return figure


def _line(ax: Axes, rows: Frame, look: Look) -> None:
    if rows.empty:
        return
    table = norms(rows)
    ax.plot(table.index, table.median(axis=1), color=look.color, linestyle=look.dashes, linewidth=1.1)
    ax.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=look.color, alpha=0.15, linewidth=0)


def norms(rows: Frame) -> Frame:
    """Return a table, a column a run, a row a step, of the gradient norm's running mean."""
    runs = {run_id: run.set_index("step")["grad_norm"].sort_index() for run_id, run in rows.groupby("run_id")}
    return pd.DataFrame(
        {run_id: norm.rolling(max(1, len(norm) // WINDOW_SHARE), min_periods=1).mean() for run_id, norm in runs.items()}
    )


SECTION = Section(body, figures=figures)
