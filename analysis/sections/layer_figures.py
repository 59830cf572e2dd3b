"""Draw layers as filters, their energies (`stability.probe what=spectra`), and σ(W_qᵀW_k) against LR (`what=qk`).

Two sections of the report, with their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.claims.layers import qk_heads
from analysis.drawing.marks import PANELS_PER_ROW, entry, mark, rate_legend
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, fitting_legend, looks, lr_axis, lr_colors, panels_width
from analysis.drawing.tables import chunks
from analysis.numbers.spread import Spread
from analysis.sections.layers import QK_TABLES, SPECTRA_TABLES, layer_and_filter, ropes_of
from analysis.sections.section import Figures, Section, draw_by_phase, make_body
from analysis.study.load import Frame, Study
from analysis.words import wrap

QUANTILES = np.linspace(0, 1, 201)
FILTER_CAPTION = (
    "Layers as filters, {phase}: factors in falling order. Consensus: those of the learned graph alone, 1 − 2ηλ over "
    "the spectrum of L̄, over T iterations their product Π(1 − 2η_tλ) (below 0 it oscillates; band: two standard "
    "errors of the "
    "quadrature). {filter} Softmax attention: singular values of A on the signals without a mean. Mean over heads, "
    "sequences and seeds. Triangles: what the layer itself left, the root of its measured variance after over before, "
    "medians over heads and sequences, then over seeds."
)
ENERGY_CAPTION = (
    "What one update leaves, {phase}: after over before, medians over heads and sequences, then over seeds. Solid: "
    "variance around the mean, ‖u − ū‖² (consensus) or ‖v − v̄‖² (attention); dotted: consensus's own disagreement "
    "energy. Thin line: 1, nothing changed."
)
QK_CAPTION = (
    "Spectral norm and condition number of W_qᵀW_k against learning rate, {phase}: medians over layers and heads; "
    "line: median over seeds, bars: their range; dotted: the largest of any layer and head."
)


def filter_figures(study: Study, phase: str) -> list[Figure]:
    """Draw factor against share of the signal space: one row per series, one column per layer, one line per LR.

    At most four layers, evenly chosen; four rows a figure.
    """
    rows = _read_phase(study, "filter", phase)
    if rows is None:
        return []
    layers = _choose(sorted(set(rows["layer"])), PANELS_PER_ROW)
    left = _read_phase(study, "spectra", phase)
    return [_filter_figure(rows, left, names, layers) for names in chunks(study.present(rows), PANELS_PER_ROW)]


def _read_phase(study: Study, name: str, phase: str) -> Frame | None:
    """Return one table's rows of a phase with their runs' columns; None if empty."""
    if name not in study.probes:
        return None
    rows = study.with_run(study.probes[name])
    rows = rows[rows["phase"] == phase]
    return None if rows.empty else rows


def _choose(items: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` of the items, evenly spaced, including first and last."""
    places = {round(place) for place in np.linspace(0, len(items) - 1, min(most, len(items)))}
    return [items[place] for place in sorted(places)]


def _filter_figure(rows: Frame, spectra: Frame | None, names: Sequence[str], layers: Sequence[float]) -> Figure:
    """Draw factors, one row per series and one column per layer; measured layers get a mark at the right edge."""
    figure = Figure(figsize=(panels_width(len(layers)), 0.75 + 1.45 * len(names)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(names), len(layers), sharex=True, sharey="row", squeeze=False))
    colors = lr_colors(rows["run_lr"])
    for line, name in enumerate(names):
        for column, layer in enumerate(layers):
            ax = grid[line, column]
            part = rows[(rows["series"] == name) & (rows["layer"] == layer)]
            _filter_panel(ax, part, colors)
            if spectra is not None:
                # √(variance after / before) at the right edge: the layer's own factor (root mean square)
                for lr, at_lr in spectra[(spectra["series"] == name) & (spectra["layer"] == layer)].groupby("run_lr"):
                    left = np.sqrt(kept_shares(at_lr, "variance"))
                    mark(ax, [1.04] * len(left), left, "<", colors[lr], 3.5, zorder=4, clip_on=False)
            mixer = "" if part.empty else f" ({part['mixer'].iloc[0]})"
            ax.set_title(f"layer {layer:.0f}{mixer}", loc="left")
        _factor_ticks(grid[line, 0])
        grid[line, 0].set_ylabel(f"{wrap(name, 18)}\nfactor")
    for ax in grid[-1]:
        ax.set_xlabel("share of directions")
    rate_legend(figure, colors)
    return figure


def _filter_panel(ax: Axes, part: Frame, colors: dict[float, Any]) -> None:
    ax.axhline(0, color=MUTED, linewidth=0.5, zorder=1)
    ax.axhline(1, color=MUTED, linewidth=0.5, zorder=1)
    for lr, rows in part.groupby("run_lr"):
        middle, error = response_curve(rows)
        ax.plot(QUANTILES, middle, color=colors[lr], linewidth=1.1, zorder=3)
        ax.fill_between(QUANTILES, middle - 2 * error, middle + 2 * error, color=colors[lr], alpha=0.2, linewidth=0)


def _factor_ticks(ax: Axes) -> None:
    """Set about four ticks including 1, the factor of no change."""
    low, high = ax.get_ylim()
    chosen = [tick for tick in MaxNLocator(4).tick_values(low, high) if low <= tick <= high]
    gap = min(np.diff(chosen), default=1.0)
    ax.set_yticks(sorted({1.0, *(float(tick) for tick in chosen if abs(tick - 1) > gap / 2)}))


def _log_ticks(axis: Axis) -> None:
    """Set ticks at decades; 1, 2 and 5 below two decades; even steps below a factor of four."""
    low, high = axis.get_view_interval()
    if high / low >= 100:
        axis.set_major_locator(LogLocator(numticks=6))
    elif high / low >= 4:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axis.set_major_formatter(FormatStrFormatter("%g"))
    else:
        axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_locator(NullLocator())


def response_curve(rows: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean factors at `QUANTILES` in falling order, and their standard error.

    The mean is over heads, sequences and runs. The error is the quadrature probes'; it is 0 for singular values, as
    these are exact.
    """
    curves, squares = [], []
    for _, head in rows.groupby(["run_id", "head", "sequence"]):
        by_probe = [_falling(probe) for _, probe in head.groupby("probe")]
        curves.append(np.mean(by_probe, axis=0))
        several = len(by_probe) > 1
        squares.append(np.var(by_probe, axis=0, ddof=1) / len(by_probe) if several else np.zeros(len(QUANTILES)))
    return np.mean(curves, axis=0), np.sqrt(np.mean(squares, axis=0) / len(squares))


def _falling(rows: Frame) -> np.ndarray:
    """Return one quadrature's quantile function from the largest factor down; each node lies mid-weight."""
    ordered = rows.sort_values("response", ascending=False)
    weights = ordered["weight"].to_numpy(dtype=float)
    middle = np.cumsum(weights) - weights / 2
    return np.interp(QUANTILES * weights.sum(), middle, ordered["response"].to_numpy(dtype=float))


def energy_figures(study: Study, phase: str) -> list[Figure]:
    """Draw energy and variance, after / before, against layer.

    One panel per series, one line per LR.
    """
    rows = _read_phase(study, "spectra", phase)
    if rows is None:
        return []
    return [_energy_figure(rows, names) for names in chunks(study.present(rows), PANELS_PER_ROW)]


def _energy_figure(rows: Frame, names: Sequence[str]) -> Figure:
    """Draw one row of panels: variance (solid) and energy (dotted), after over before, against layer."""
    figure = Figure(figsize=(panels_width(len(names)), 2.5), layout="constrained")
    axes, colors = figure.subplots(1, len(names), sharey=True, squeeze=False)[0], lr_colors(rows["run_lr"])
    for ax, name in zip(axes, names, strict=True):
        part = rows[rows["series"] == name]
        for lr, at_lr in part.groupby("run_lr"):
            for quantity, dashes in (("variance", "-"), ("energy", ":")):
                line = kept_shares(at_lr, quantity)
                ax.plot(line.index, line, color=colors[lr], linestyle=dashes, linewidth=1.1, marker="o", markersize=2.5)
        ax.set_title(wrap(name, 22), loc="left", fontweight="bold")
        ax.set_xlabel("layer")
        ax.axhline(1, color=MUTED, linewidth=0.5, zorder=1)
        ax.set_yscale("log")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _log_ticks(axes[0].yaxis)
    axes[0].set_ylabel("after / before")
    rate_legend(figure, colors, [entry("variance", INK), entry("energy", INK, linestyle=":")])
    return figure


def kept_shares(rows: Frame, quantity: str) -> Any:
    """Return after / before by layer: median over seeds of the median over heads and sequences.

    Layers without the quantity are left out.
    """
    ratio = rows[f"{quantity}_after"] / rows[f"{quantity}_before"]
    known = rows.assign(ratio=ratio)[ratio.notna()]
    return known.groupby(["layer", "seed"])["ratio"].median().groupby("layer").median()


def qk_figures(study: Study, phase: str) -> list[Figure]:
    """Draw spectral norm and condition number against LR, one line per series; [] without queries and keys."""
    rows = _read_phase(study, "qk", phase)
    return [] if rows is None else [_qk_figure(study, rows)]


def _qk_figure(study: Study, rows: Frame) -> Figure:
    """Draw two panels, spectral norm and condition number of W_qᵀW_k against learning rate."""
    heads, styles = qk_heads(rows.assign(order=0)), looks(study)
    present = [name for name in styles if name in set(heads["series"])]
    figure = Figure(figsize=(WIDTH_INCHES, 2.7), layout="constrained")
    for ax, column, label in zip(
        figure.subplots(1, 2), ("norm", "condition"), ("spectral norm", "condition number"), strict=True
    ):
        for name in present:
            _qk_line(ax, heads[heads["series"] == name], column, styles[name])
        lr_axis(ax, study.runs["lr"], most=4)
        ax.set_yscale("log")
        _log_ticks(ax.yaxis)
        ax.set_xlabel("learning rate")
        ax.set_ylabel(f"{label} of $W_q^\\top W_k$")
    looks_of = {wrap(name, 30): styles[name] for name in present}
    fitting_legend(figure, [entry(n, s.color, marker=s.marker, markersize=4) for n, s in looks_of.items()], 4)
    return figure


def _qk_line(ax: Axes, heads: Frame, column: str, look: Any) -> None:
    """Draw one series: the seeds' median of the heads' median with its interval; dotted, the heads' largest."""
    finite = heads[np.isfinite(heads[column])]
    per_seed = finite.groupby(["run_lr", "seed"])[column].agg(["median", "max"])
    spreads = {lr: Spread.of(part["median"]) for lr, part in per_seed.groupby("run_lr")}
    lrs = list(spreads)
    middle = np.array([spread.median for spread in spreads.values()])
    reach = np.array([[s.median - s.low, s.high - s.median] for s in spreads.values()]).T
    bars = {"color": look.color, "linestyle": look.dashes, "linewidth": 1.2, "marker": look.marker, "markersize": 4}
    ax.errorbar(lrs, middle, yerr=reach, capsize=2, **bars)
    ax.plot(lrs, per_seed["max"].groupby("run_lr").median(), color=look.color, linestyle=":", linewidth=0.9)


def probed_phases(study: Study) -> list[str]:
    """Return the probed checkpoints' phases, in the order of the tables."""
    names = [name for name in ("spectra", "filter", "qk") if name in study.probes]
    return list(dict.fromkeys(phase for name in names for phase in study.probes[name]["phase"]))


def _graph_figures(study: Study) -> Figures:
    phases = probed_phases(study)
    caption = FILTER_CAPTION.replace("{filter}", layer_and_filter(ropes_of(study)))
    return {
        **draw_by_phase(study, "filter", phases, filter_figures, caption),
        **draw_by_phase(study, "energy", phases, energy_figures, ENERGY_CAPTION),
    }


FILTERS = Section(make_body("", SPECTRA_TABLES.of_study), figures=_graph_figures)


QK = Section(
    make_body("", QK_TABLES.of_study),
    figures=lambda study: draw_by_phase(study, "qk", probed_phases(study), qk_figures, QK_CAPTION),
)
