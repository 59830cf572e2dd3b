"""Show PDMM's convergence per iteration, for consensus layers, as a table and a figure."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from analysis.drawing.marks import entry
from analysis.drawing.style import FIXED, INK, OTHERS, WIDTH_INCHES, fitting_legend
from analysis.drawing.typeset import Cell, Table
from analysis.study.load import Frame
from analysis.words import power

REACHED = 1e-6  # relative distance from the optimum at convergence
ROUNDING = 1e-12  # below it an error is rounding


def pdmm_table(frame: Frame) -> Table:
    """Return PDMM's speed, first and last discrepancy, one row per graph and schedule."""
    body = []
    for (graph, schedule), part in frame.groupby(["graph", "schedule"], sort=False):
        ordered = part.sort_values("iteration")
        reached = ordered[ordered["error"] <= REACHED]["iteration"]
        first, last = ordered.iloc[0], ordered.iloc[-1]
        numbers = [power(value) for value in (last["error"], first["discrepancy"], last["discrepancy"])]
        steps = f"{reached.iloc[0]:.0f}" if len(reached) else "not reached"
        texts = (graph, schedule, f"{first['edges']:.0f}", steps, f"{shrinkage(ordered):.3f}", *numbers)
        body.append(tuple(map(Cell, texts)))
    header = ("graph", "schedule", "edges", f"to {power(REACHED, 1)}", "factor", "last error", "first", "last")
    last = int(frame["iteration"].max())
    caption = (
        f"{frame['nodes'].iloc[0]:.0f} quadratic nodes, {recipe(frame)}; {last} iterations, an asynchronous one "
        f"being as many updates of one random node as there are nodes. To {power(REACHED, 1)}: iterations until ‖x − "
        "x*‖ is that share of ‖x*‖, x* from the KKT system. Factor: mean per iteration of that error. Discrepancy: "
        "root mean square of the constraints' residuals at the first and the last iteration."
    )
    return Table("PDMM on small networks", caption, header, tuple(body), (("", 6), ("discrepancy", 2)))


def shrinkage(ordered: Frame) -> float:
    """Return the error's mean factor per iteration, up to its last value above rounding.

    NaN if only the first is above rounding.
    """
    errors = ordered["error"].to_numpy(dtype=float)
    above = np.flatnonzero(errors > ROUNDING)
    return float((errors[above[-1]] / errors[0]) ** (1 / above[-1])) if len(above) and above[-1] > 0 else float("nan")


def recipe(frame: Frame) -> str:
    """Describe the settings of a table's networks and solver."""
    row = frame.iloc[0]
    averaged = "" if row["averaging"] == 1 else f", θ = {row['averaging']:g}"
    return f"{row['constraints']} constraints, ρ = {row['rho']:g}{averaged}"


def pdmm_figure(frame: Frame) -> Figure:
    """Draw error and discrepancy against the iteration on log axes; one colour per graph."""
    figure = Figure(figsize=(WIDTH_INCHES, 2.7), layout="constrained")
    axes = figure.subplots(1, 2)
    colors = dict(
        zip(frame["graph"].unique(), itertools.cycle(color for color, _ in (*FIXED.values(), *OTHERS)), strict=False)
    )
    for ax, column, label in zip(
        axes, ("error", "discrepancy"), ("$\\|x - x^*\\| / \\|x^*\\|$", "consensus discrepancy"), strict=True
    ):
        for (graph, schedule), part in frame.groupby(["graph", "schedule"], sort=False):
            above = part[part[column] > ROUNDING].sort_values("iteration")
            look = {"color": colors[graph], "linestyle": dashes(schedule == "synchronous"), "linewidth": 1.1}
            ax.plot(above["iteration"], above[column], **look)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(numticks=7))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("iteration")
        ax.set_ylabel(label)
    handles = [entry(graph, color, linewidth=1.8) for graph, color in colors.items()]
    names = dict.fromkeys(frame["schedule"])
    handles += [entry(name, INK, linestyle=dashes(name == "synchronous")) for name in names]
    fitting_legend(figure, handles, 6)
    return figure


def dashes(solid: bool) -> Any:
    return "-" if solid else ":"
