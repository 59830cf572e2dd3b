"""Show the mixing matrices' distance from doubly stochastic in residual streams (`stability.probe what=streams`).

A table, and figures after mHC-lite's Figures 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from analysis.claims.streams import NAME, example, iterations_of, reduce_by_run, thresholds
from analysis.drawing.marks import entry, rate_legend
from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, lr_colors
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Table
from analysis.measures import RATE, SERIES, Form, Measure, grid_table
from analysis.numbers.spread import MEDIAN_RULE
from analysis.numbers.step_shares import PHASES, phases_of
from analysis.sections.probed import Probed, one_table
from analysis.sections.section import Captioned, Drawn, Figures, Section, has_probes, pictures
from analysis.study import wording
from analysis.study.load import Column, Frame, Study
from analysis.words import join_words, plural, power, significant, wrap
from stability.runs.words import Words

FORMS: dict[str, Form] = {
    "largest": lambda value: significant(value, 4),
    "share": lambda value: f"{100 * value:.3g} %",
    "error": power,
}


def _measure(label: str, matrix: str, quantity: str, which: str) -> Measure:
    """Return a measure of single matrices or their product; ``which`` is the statistic per run."""
    return Measure(label, lambda rows: reduce_by_run(rows, matrix, quantity, which), FORMS[which])


MEASURES = (
    _measure("ln 1/ν", "single", "log_range", "largest"),
    _measure("outliers", "single", "beyond", "share"),
    _measure("columns", "single", "column_sum", "error"),
    _measure("rows", "single", "row_sum", "error"),
    _measure("columns", "product", "column_sum", "error"),
    _measure("rows", "product", "row_sum", "error"),
    _measure("spectral", "product", "spectral_norm", "largest"),
    _measure("forward", "product", "forward_gain", "largest"),
    _measure("backward", "rest", "backward_gain", "largest"),
)
GROUPS = (("", 2), ("before Sinkhorn", 2), ("A, sums off by", 2), ("A_1 ⋯ A_L, off by", 2), ("norm", 1), ("gain", 2))
CAPTION = (
    "Of every {position} on held-out data ({count}), the worst; then the median over seeds. A: the mixing matrix of a "
    "connection, X' = AᵀX + …, over all connections; A_1 ⋯ A_L: their product through the depth. ν: the smallest "
    "over the largest entry before Sinkhorn's iterations{iterations}, ln 1/ν the logarithm of its inverse; "
    "outliers: the share of {positions} and connections where that exceeds {threshold}. Off by: largest distance of a "
    "column's or row's sum from 1. Norm: largest spectral norm of the product. Gain: by how much mixing alone may "
    "multiply the largest entry of a signal through all connections (forward, at most the column sums) or of its "
    "gradient (backward, the row sums). {precision}"
)
PRECISION = (
    "Computed in float64 from the trained weights: what is exact here is so to 1e-15. It is not in the precision of "
    "training; with coefficients in bfloat16, mHC-lite's columns sum to 0.9982 at initialisation."
)


def _table(rows: Frame, phase: str, found: Probed) -> Table:
    """Return one phase's distances from doubly stochastic, one row per series and learning rate."""
    words = found.words
    caption = CAPTION.format(
        position=words.position[0],
        positions=words.position[1],
        count=position_count(rows, words),
        iterations=iteration_count(rows),
        threshold=threshold_text(rows),
        precision=PRECISION,
    )
    told = f"{caption} {MEDIAN_RULE}.{found.origin}"
    return grid_table(f"Mixing of residual streams, {phase}", told, rows, (SERIES, RATE), MEASURES, GROUPS)


TABLES = one_table(NAME, _table)


def position_count(rows: Frame, words: Words) -> str:
    """Return a run's number of positions as text, ``"64 tokens a run"``."""
    counts = rows.loc[(rows["quantity"] == "spectral_norm") & rows["connection"].notna(), "num_values"]
    # a connection has one spectral norm a position
    return f"{join_words(f'{count:,.0f}' for count in sorted(set(counts)))} {words.position[1]} a run"


def iteration_count(rows: Frame) -> str:
    """Return the number of Sinkhorn iterations as text, ``, K = 20``; "" without iterations."""
    counts = [f"{number:.0f}" for number in iterations_of(rows)]
    return f", K = {join_words(counts)}" if counts else ""


def threshold_text(rows: Frame) -> str:
    """Return the outliers' threshold as text, e.g. ``30``; "a threshold" without iterations.

    For runs of an older probe, the text gives its threshold K.
    """
    known = set(rows.loc[rows["quantity"] == "threshold", "run_id"])
    found = thresholds(rows)
    own, older = ([found[run_id] for run_id in found if (run_id in known) == is_own] for is_own in (True, False))
    parts = [f"{value:g}" for value in sorted(set(own))]
    if older:
        parts.append(
            f"{join_words(f'{value:g}' for value in sorted(set(older)))} ({plural(len(older), 'run')} measured before "
            "the threshold was a setting: K)"
        )
    return join_words(parts) or "a threshold"


def example_text(iterations: list[float]) -> str:
    """Return a sentence on the paper's own example for every number K of iterations; "" without any."""
    said = []
    for number in iterations:
        log_range, sums = example(int(number))
        said.append(
            f"{number:.0f} iterations leave columns that sum to {join_words(f'{total:.3f}' for total in sums)} (ln 1/ν "
            f"= {log_range:.1f})"
        )
    return (
        "Of the example in mHC-lite's Section 1, rows (1, d, d), (1, d, d) and (d, 1, 1) with d = 1e-13, "
        f"{join_words(said)}."
        if said
        else ""
    )


SERIES_PER_FIGURE = 4
BAND = (0.05, 0.95)
ROUNDING = 1e-9
STEEP = 30.0  # a ratio above which an axis is logarithmic
PANELS = (
    ("ln 1/ν before Sinkhorn", ("single", "log_range"), None),
    ("column sums of A", ("single", "column_sum"), None),
    ("column sums of A_1 ⋯ A_l", ("product", "column_sum"), None),
    ("gain forward, backward", ("product", "forward_gain"), ("rest", "backward_gain")),
)
FIGURE_CAPTION = (
    "Mixing matrices A of residual streams (X' = AᵀX + …) by connection l, {phase}, over every {position} of held-out "
    "sequences ({count}). First three columns, the first as mHC-lite's Figure 4, the others as its Figure 3: "
    "median (solid), 90 % of the values (shade), smallest and largest (dotted), over the seeds of a rate. ν: "
    "smallest over largest entry of what Sinkhorn's iterations are given{iterations}; grey line: ln 1/ν = "
    "{threshold}, above which a {position} counts as an outlier. Last: the most that mixing alone multiplies the "
    "largest entry of a signal by up to connection l (solid), and of its gradient from the head back to it (dashed). "
    "{precision}"
)


def figures(study: Study) -> Figures:
    """Draw ``streams-<phase>-<number>``; {} without a probe.

    One row per series, one column per quantity, one line per LR.
    """
    if NAME not in study.probes:
        return {}
    rows, made = study.probed(NAME), {}
    for phase in phases_of(rows):
        shown = rows[rows["phase"] == phase]
        caption = _figure_caption(shown, phase, wording.words(study))
        part = shown[shown["connection"].notna()]
        for index, names in enumerate(chunks(study.present(part), SERIES_PER_FIGURE)):
            made[f"{NAME}-{phase}-{index}"] = Captioned(_figure(part, names), caption)
    return made


def _figure_caption(shown: Frame, phase: str, words: Words) -> str:
    """Return the figures' caption; ``shown`` has the phase's rows, including those over all connections."""
    return FIGURE_CAPTION.format(
        phase=PHASES.get(phase, phase),
        position=words.position[0],
        count=position_count(shown, words),
        iterations=iteration_count(shown),
        threshold=threshold_text(shown),
        precision=PRECISION,
    )


def body(study: Study, drawn: Drawn) -> Pieces:
    said = example_text(iterations_of(study.probed(NAME)))
    head = heading("How doubly stochastic the mixing of residual streams is")
    return head + pictures(drawn) + (paragraph(said) if said else ()) + shown(TABLES.of_study(study))


def _figure(rows: Frame, names: Sequence[str]) -> Figure:
    """Draw one figure, one row per series and one column per quantity, against connection."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + 1.5 * len(names)), layout="constrained")
    axes, colors = figure.subplots(len(names), len(PANELS), sharex=True, squeeze=False), lr_colors(rows["run_lr"])
    for line, name in zip(axes, names, strict=True):
        part = rows[rows["series"] == name]
        for ax, (_, first, second) in zip(line, PANELS, strict=True):
            for at in sorted(set(thresholds(part).values())) if first[1] == "log_range" else [1]:
                ax.axhline(at, color=MUTED, linewidth=0.6, zorder=1)
            _panel(ax, _select(part, first), None if second is None else _select(part, second), colors)
        line[0].set_ylabel(wrap(name, 18), fontweight="bold")
    for ax, (title, _, _) in zip(axes[0], PANELS, strict=True):
        ax.set_title(title.replace("A_1 ⋯ A_l", "$A_1 ⋯ A_l$"), loc="left", fontsize=8.5)
    for ax in axes[-1]:
        ax.set_xlabel("connection")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    rate_legend(figure, colors, [entry("smallest, largest", INK, linestyle=":")])
    return figure


def _select(rows: Frame, key: tuple[str, str]) -> Frame:
    return rows[(rows["matrix"] == key[0]) & (rows["quantity"] == key[1])]


def _panel(ax: Axes, rows: Frame, beside: Frame | None, colors: Mapping[float, Any]) -> None:
    """Draw quantiles by connection; with ``beside``, the largest values of both instead."""
    if rows.empty:
        ax.text(0.5, 0.5, "no iterations", transform=ax.transAxes, ha="center", va="center", fontsize=8, color=MUTED)
        ax.set_yticks([])
        return
    for lr, at_lr in rows.groupby("run_lr"):
        if beside is None:
            _band(ax, at_lr, colors[lr])
            continue
        for part, dashes in ((at_lr, "-"), (beside[beside["run_lr"] == lr], (0, (5, 2)))):
            line = quantile(part, 1.0, "max")
            ax.plot(line.index, line, color=colors[lr], linestyle=dashes, linewidth=1.1)
    values = rows["value"] if beside is None else [*rows["value"], *beside["value"]]
    if np.max(np.abs(np.subtract(values, 1))) < ROUNDING:  # exact: a tight axis would show rounding
        ax.set_ylim(0.9, 1.1)
        within = f"all within {power(float(np.max(np.abs(np.subtract(values, 1)))))}"
        ax.text(0.5, 0.62, within, transform=ax.transAxes, ha="center", fontsize=7.5, color=MUTED)
    if np.min(values) > 0 and np.max(values) / np.min(values) > STEEP and rows["quantity"].iloc[0] != "log_range":
        ax.set_yscale("log")
    elif np.max(np.abs(values)) > STEEP and rows["quantity"].iloc[0] != "log_range":
        ax.set_yscale("symlog", linthresh=1)
        # every decade of both signs would not fit the height of a panel
        ends = [math.copysign(10.0 ** math.floor(math.log10(abs(end))), end) for end in ax.get_ylim() if abs(end) >= 1]
        ax.yaxis.set_major_locator(FixedLocator(sorted({0.0, *ends})))
        ax.yaxis.set_minor_locator(NullLocator())


def _band(ax: Axes, rows: Frame, color: Any) -> None:
    middle, low, high = (quantile(rows, at, "median") for at in (0.5, *BAND))
    ax.fill_between(middle.index, low, high, color=color, alpha=0.2, linewidth=0)
    ax.plot(middle.index, middle, color=color, linewidth=1.1)
    for at, over in ((0.0, "min"), (1.0, "max")):
        line = quantile(rows, at, over)
        ax.plot(line.index, line, color=color, linewidth=0.8, linestyle=":")


def quantile(rows: Frame, at: float, over_seeds: str) -> Column:
    """Return a quantile of each run by connection, aggregated over seeds.

    Args:
        rows: one quantity's rows.
        at: the quantile, from 0 to 1.
        over_seeds: "median", "min" or "max".
    """
    return rows[np.isclose(rows["quantile"], at)].groupby("connection")["value"].agg(over_seeds)


SECTION = Section(body, has_probes(NAME), figures)
