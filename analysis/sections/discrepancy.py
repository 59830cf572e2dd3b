"""Compare attention's consensus discrepancy by depth with PDMM's by iteration (`stability.probe what=pdmm`).

Tables, figures, and a verdict on the slope; PDMM's are those of consensus layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from analysis.drawing.marks import PANELS_PER_ROW, entry, rate_legend
from analysis.drawing.pieces import Pieces, paragraph, shown
from analysis.drawing.style import FIXED, INK, MUTED, OTHERS, WIDTH_INCHES, fitting_legend, lr_colors, panels_width
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.measures import (
    LAYER,
    RATE,
    SERIES,
    Difference,
    Measure,
    Text,
    grid_table,
    phase_tables,
    three_digits,
)
from analysis.numbers.spread import MEAN_RULE, MEDIAN_RULE, Mean
from analysis.numbers.step_shares import phases_of
from analysis.sections.probed import Probed, ProbeTables
from analysis.sections.section import Captioned, Drawn, Figures, Section, draw_by_phase, pictures
from analysis.study.load import Column, Frame, Study
from analysis.words import join_words, power, wrap

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


OWN, UNSCALED = "own", "unscaled"
FIGURE, PDMM = "discrepancy", "pdmm"
MEASURED = (
    "Root mean square of V − γAV over that of V, over heads, positions and held-out sequences, A the layer's "
    "softmax; own γ: the layer's (1 for sa and sw), γ = 1: V − AV."
)
CAPTIONS = {
    FIGURE: (
        f"Consensus discrepancy of softmax attention by depth, {{phase}}. {MEASURED} Lines: medians over seeds, "
        "bands: their range; solid: own γ, dotted: γ = 1 where that is another."
    ),
    PDMM: (
        "PDMM on networks of {nodes} quadratic nodes ({recipe}): distance from the optimum of the KKT system, and "
        "the consensus discrepancy, the root mean square of the constraints' residuals b_ij − A_ij x_i − A_ji x_j "
        "that enter the multipliers (Eqs. 3 and 4). Solid: synchronous; dotted: asynchronous, where an iteration is "
        "as many updates of one random node as there are nodes."
    ),
}


def relative(rows: Frame, which: str) -> Column:
    """Return RMS(Φ) / RMS(V) by series … layer, pooled over heads and sequences.

    The sequences have equal size.
    """
    keys = ["order", "series", "run_lr", "seed", "layer"]
    squares = (
        rows.assign(part=rows[f"{which}_rms"] ** 2, value=rows["value_rms"] ** 2)
        .groupby(keys)[["part", "value"]]
        .mean()
    )
    return np.sqrt(squares["part"] / squares["value"])


def slopes(by_layer: Column) -> Column:
    """Return each seed's least-squares slope of relative discrepancy against layer number; NaN below two layers."""

    def fit(one_seed: Column) -> float:
        layers = one_seed.index.get_level_values("layer").to_numpy(dtype=float)
        return float(np.polyfit(layers, one_seed.to_numpy(dtype=float), 1)[0]) if len(layers) > 1 else float("nan")

    return by_layer.groupby(level=["order", "series", "run_lr", "seed"]).apply(fit)


def direction(per_seed: Sequence[float]) -> str:
    """Describe a slope's sign by the 95 % interval of its mean; undecidable below three seeds."""
    spread = Mean.of(per_seed)
    if spread.n < 3:
        return "too few seeds" if spread.n else "--"
    return "falls" if spread.high < 0 else "rises" if spread.low > 0 else "undecided"


def _slopes(which: str) -> Callable[[Frame], Column]:
    return lambda rows: slopes(relative(rows, which))


BY_LAYER = (
    Measure("own γ", lambda rows: relative(rows, OWN), three_digits),
    Measure("γ = 1", lambda rows: relative(rows, UNSCALED), three_digits),
)
SLOPES = tuple(
    column
    for of in (_slopes(OWN), _slopes(UNSCALED))
    for column in (
        Difference("slope", of),
        Text("depth", lambda rows, of=of: direction(of(rows))),
    )
)


def _depth_tables(found: Probed) -> list[Table]:
    """Return each phase's relative discrepancy by layer and its slope.

    Both for own γ and γ = 1.
    """
    origin = found.origin
    caption = f"{MEASURED} {MEDIAN_RULE}.{origin}"
    by_layer = (Text("γ", lambda part: f"{part['gamma'].iloc[0]:g}"), *BY_LAYER)

    def of_phase(part: Frame, phase: str) -> list[Table]:
        title = f"Consensus discrepancy of softmax attention, {phase}"
        layers = grid_table(title, caption, part, (SERIES, RATE, LAYER), by_layer)
        return [layers, _slope_table(part, phase, origin)]

    return phase_tables(found.frames[FIGURE], of_phase)


DEPTHS = ProbeTables((FIGURE,), _depth_tables)


def study_tables(study: Study) -> list[Table]:
    """Return the discrepancy by layer and its slope for each phase, then PDMM's; unmeasured ones are left out."""
    return DEPTHS.of_study(study) + ([pdmm_table(study.probes[PDMM])] if PDMM in study.probes else [])


def _slope_table(rows: Frame, phase: str, origin: str) -> Table:
    """Return a table of the discrepancy's slope per layer and its direction."""
    caption = (
        "Slope per layer of the relative discrepancy, by least squares over a run's attention layers; mean over "
        "seeds. The paper expects it to fall with depth. Falls or rises: the 95 % interval of the mean over three "
        f"seeds or more lies below or above 0. {MEAN_RULE}.{origin}"
    )
    groups = (("", 2), ("own γ", 2), ("γ = 1", 2))
    return grid_table(f"Does the discrepancy fall with depth, {phase}", caption, rows, (SERIES, RATE), SLOPES, groups)


def depth_figures(study: Study, phase: str) -> list[Figure]:
    """Draw relative discrepancy against layer, one panel per series, one line per LR."""
    rows = study.probed(FIGURE)
    rows = rows[rows["phase"] == phase]
    present = study.present(rows)
    return [_depth_figure(rows, names) for names in chunks(present, PANELS_PER_ROW)] if present else []


def _depth_figure(rows: Frame, names: Sequence[str]) -> Figure:
    figure = Figure(figsize=(panels_width(len(names)), 2.5), layout="constrained")
    axes, colors = figure.subplots(1, len(names), sharey=True, squeeze=False)[0], lr_colors(rows["run_lr"])
    for ax, name in zip(axes, names, strict=True):
        ax.axhline(1, color=MUTED, linewidth=0.5, zorder=1)
        for lr, at_lr in rows[rows["series"] == name].groupby("run_lr"):
            # for each LR a line of medians and the seeds' range; γ = 1 dotted if own γ differs
            for which in (OWN, UNSCALED) if (at_lr["gamma"] != 1).any() else (OWN,):
                line = relative(at_lr, which).groupby(level="layer").agg(["median", "min", "max"])
                look = {"color": colors[lr], "linestyle": dashes(which == OWN), "linewidth": 1.1}
                ax.plot(line.index, line["median"], marker="o", markersize=2.5, **look)
                ax.fill_between(line.index, line["min"], line["max"], color=colors[lr], alpha=0.13, linewidth=0)
        ax.set_xlabel("layer")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_title(wrap(name, 22), loc="left", fontweight="bold")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("discrepancy / values")
    rate_legend(figure, colors)
    return figure


def figures(study: Study) -> Figures:
    """Draw ``discrepancy-<phase>-<number>``, and ``pdmm``; PDMM has no run and no data to name as a source."""
    phases = phases_of(study.probes[FIGURE]) if FIGURE in study.probes else []
    made = draw_by_phase(study, FIGURE, phases, depth_figures, CAPTIONS[FIGURE])
    if PDMM in study.probes:
        frame = study.probes[PDMM]
        caption = CAPTIONS[PDMM].format(nodes=f"{frame['nodes'].iloc[0]:.0f}", recipe=recipe(frame))
        made[PDMM] = Captioned(pdmm_figure(frame), caption)
    return made


def body(study: Study, drawn: Drawn) -> Pieces:
    """Return the section: figures, verdict on the hypothesis, tables."""
    said = hypothesis(study)
    return pictures(drawn) + (paragraph(said) if said else ()) + shown(study_tables(study))


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the section in brief: its first figure and the verdict on the hypothesis."""
    said = hypothesis(study)
    return pictures(drawn)[:1] + (paragraph(said) if said else ())


def hypothesis(study: Study) -> str:
    """Compare the paper's expectation with the terminal checkpoints, as text; "" if not measured."""
    if FIGURE not in study.probes:
        return ""
    rows = study.probed(FIGURE)
    found = [
        direction(part)
        for _, part in slopes(relative(rows[rows["phase"] == "terminal"], OWN)).groupby(level=["series", "run_lr"])
    ]
    counts = [f"{found.count(word)} {said}" for word, said in _OUTCOMES.items() if word in found]
    return (
        f"Does attention's discrepancy fall with depth, as the paper supposes? Of {len(found)} pairs of mechanism "
        f"and learning rate: {join_words(counts)}."
        if counts
        else ""
    )


_OUTCOMES = {
    "falls": "fall",
    "rises": "rise",
    "undecided": "undecided at 95 %",
    "too few seeds": "with fewer than three seeds, which decide nothing",
}


SECTION = Section(body, figures=figures, brief=brief)
