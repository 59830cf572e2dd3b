"""Draw the loss along u beside its quadratic model, and the Hessian's spectral density.

Both are at the first recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from analysis.drawing.marks import PANELS_PER_ROW, TRAINING, entry, rate_legend, say_diverged, say_instead
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, fitting_legend, lr_colors, panel_grid, panels_width
from analysis.drawing.tables import chunks
from analysis.numbers.step_shares import DIVERGED, count_stable_steps
from analysis.sections.steps import drop_diverged
from analysis.study.load import Frame, Study
from analysis.words import lr_text, wrap

MODEL: dict[str, Any] = {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (5, 1.5, 1, 1.5))}
ALPHA_LINE: dict[str, Any] = {"color": "#0072B2", "linewidth": 1.0, "linestyle": (0, (1, 1.2))}
CRITICAL_LINE: dict[str, Any] = {"color": "#E69F00", "linewidth": 1.2, "linestyle": "-"}
PROFILE_ROWS = 3
FLOOR = 0.1  # times one eigenvalue's share 1/n and the density's top; anything below is a Gaussian's tail
PROFILE_CAPTION = (
    "Batch loss along the step direction u at the first recorded step, {phase}, first seed measured: the loss itself, "
    "its quadratic model, α_max where the model comes back to the loss at θ (thin line), the critical LR where the "
    "loss does, and the training LR. A run that diverged has no such checkpoint; their number is printed above the "
    "panel."
)
DENSITY_CAPTION = (
    "Spectral density of the Hessian at the first recorded step, {phase}, by stochastic Lanczos quadrature; nodes "
    "widened by 1/200 of the range. Mean over the seeds measured; the axis ends at a tenth of what a single eigenvalue "
    "makes. A run that diverged has no such checkpoint; their number is printed by LR above the panel."
)


def profile_figures(study: Study, phase: str = "terminal") -> list[Figure]:
    """Draw the loss along u at the first recorded step, beside its quadratic model.

    With α_max, critical LR and training LR. A column per series (four a figure), a row for the lowest, middle and
    highest LR. First seed, with the run's own optimizer state if measured.
    """
    rows = spectrum_rows_of(study, "profile", phase)
    if rows is None:
        return []
    count = _count_beside(study, rows)
    lost = count[count["outcome"] == DIVERGED]
    present = [name for name in study.series if name in {*rows["series"], *lost["series"]}]
    lrs = sorted({*rows["run_lr"], *lost["run_lr"]})
    chosen = sorted({lrs[0], lrs[len(lrs) // 2], lrs[-1]})[:PROFILE_ROWS]
    return [_profile_figure(rows, count, part, chosen) for part in chunks(present, PANELS_PER_ROW)]


def _count_beside(study: Study, rows: Frame) -> Frame:
    """Return runs of `count_stable_steps` at the phase and state of a spectrum's ``rows``."""
    return count_stable_steps(study, str(rows["phase"].iloc[0]), str(rows["state"].iloc[0]))


def spectrum_rows_of(study: Study, name: str, phase: str) -> Frame | None:
    """Return one spectrum's rows of a phase, preferably of state “checkpoint”; None without any.

    Args:
        study: the study.
        name: the spectrum, e.g. "density".
        phase: the phase.
    """
    if name not in study.spectra:
        return None
    rows = drop_diverged(study, study.with_run(study.spectra[name]))
    rows = rows[rows["phase"] == phase]
    if rows.empty:
        return None
    return rows[rows["state"] == ("checkpoint" if "checkpoint" in set(rows["state"]) else rows["state"].iloc[0])]


def _profile_figure(rows: Frame, count: Frame, series: Sequence[str], lrs: Sequence[float]) -> Figure:
    """Draw the lowest seeds' profiles, one row per rate and one column per series."""
    figure = Figure(figsize=(panels_width(len(series)), 0.7 + 1.5 * len(lrs)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(lrs), len(series), squeeze=False))
    for line, lr in enumerate(lrs):
        for column, name in enumerate(series):
            ax = grid[line, column]
            part = rows[(rows["series"] == name) & (rows["run_lr"] == lr)]
            runs = count[(count["series"] == name) & (count["run_lr"] == lr)]
            _profile_panel(ax, part[part["seed"] == part["seed"].min()], lr, bool((runs["outcome"] == DIVERGED).any()))
            if line == 0:
                ax.set_title(wrap(name, 22), loc="left", fontweight="bold")
            if len(part):
                say_diverged(ax, runs, "series")
        grid[line, 0].set_ylabel(f"$\\alpha$ = {lr_text(lr)}\nloss (nats)")
    for ax in grid[-1]:
        ax.set_xlabel("step length along $u$")
    handles = [
        entry("loss", INK),
        entry("quadratic model", **MODEL),
        entry("$\\alpha_\\mathrm{max}$", **ALPHA_LINE),
        entry("critical LR", **CRITICAL_LINE),
        entry("training LR $\\alpha$", **TRAINING),
    ]
    fitting_legend(figure, handles, 5 if len(series) > 2 else 3, handlelength=2, columnspacing=1.4)
    return figure


def _profile_panel(ax: Axes, part: Frame, lr: float, diverged: bool) -> None:
    """Draw one run's loss along u with its quadratic model.

    ``diverged``: whether runs are missing because they diverged.
    """
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
    ax.xaxis.get_offset_text().set_fontsize(7)
    if part.empty:
        say_instead(ax, "diverged" if diverged else "not measured")
        return
    part, first = part.sort_values("alpha"), part.iloc[0]
    finite = part[np.isfinite(part["loss"])]
    ax.plot(finite["alpha"], finite["loss"], color=INK, linewidth=1.3, zorder=4)
    low, high = _loss_limits(finite, float(first["loss_before"]))
    ax.set_ylim(low, high)
    ax.set_xlim(float(part["alpha"].min()), float(part["alpha"].max()))
    dense = np.linspace(*ax.get_xlim(), 400)
    ax.plot(dense, first["loss_before"] + dense * first["slope"] + dense**2 * first["curvature"] / 2, zorder=3, **MODEL)
    ax.axhline(first["loss_before"], color=MUTED, linewidth=0.5, zorder=1)
    for mark, look in ((first["alpha_max"], ALPHA_LINE), (first["critical_lr"], CRITICAL_LINE), (lr, TRAINING)):
        if math.isfinite(mark) and mark > 0:
            ax.axvline(mark, zorder=2, **look)


def _loss_limits(finite: Frame, here: float) -> tuple[float, float]:
    """Return the loss axis's limits: the valley, and its depth once more above the loss at θ.

    The depth is at least a tenth of the losses' range. A blow-up beyond is cut.
    """
    low, high = float(finite["loss"].min()), float(finite["loss"].max())
    depth = max(here - low, 0.1 * (high - low), 1e-6 * abs(here))
    return low - 0.35 * depth, min(high, here + depth) + 0.1 * depth


def density_figures(study: Study, phase: str = "terminal") -> list[Figure]:
    """Draw the Hessian's spectral density, a panel per series, a line per LR; empty if not measured.

    Four series a figure. Mean over seeds; each quadrature node is widened by a two-hundredth of the eigenvalues' range.
    """
    rows = spectrum_rows_of(study, "density", phase)
    if rows is None:
        return []
    count = _count_beside(study, rows)
    present = [
        name for name in study.series if name in {*rows["series"], *count.loc[count["outcome"] == DIVERGED, "series"]}
    ]
    return [_density_figure(rows, count, part) for part in chunks(present, PANELS_PER_ROW)]


def _density_figure(rows: Frame, count: Frame, series: Sequence[str]) -> Figure:
    """Draw one figure of spectral densities, one panel per series."""
    columns = min(2, len(series))
    figure, axes = panel_grid(len(series), columns, 1.6, 0.75, WIDTH_INCHES if columns == 2 else 3.6)
    colors = lr_colors(rows["run_lr"])
    for ax, name in zip(axes, series, strict=False):
        runs = count[count["series"] == name]
        _density_panel(ax, rows[rows["series"] == name], colors, bool((runs["outcome"] == DIVERGED).any()))
        say_diverged(ax, runs, "run_lr")
        ax.set_title(wrap(name, 40), loc="left", fontweight="bold")
        ax.set_xlabel("eigenvalue of the Hessian")
    for ax in axes[::columns]:
        ax.set_ylabel("density")
    rate_legend(figure, colors)
    return figure


def _density_panel(ax: Axes, rows: Frame, colors: dict[float, Any], diverged: bool) -> None:
    """Draw one series' spectral density, a line per LR.

    ``diverged``: whether runs are missing because they diverged.
    """
    known = rows[np.isfinite(rows["node"])]
    if known.empty:
        say_instead(ax, "diverged" if diverged and rows.empty else "lost to a non-finite loss")
        return
    low, high = float(known["node"].min()), float(known["node"].max())
    width = (high - low or abs(high) or 1.0) / 200
    floor = FLOOR / float(known["num_params"].max())
    grid, top = np.linspace(low - 4 * width, high + 4 * width, 1200), 0.0
    for lr, part in known.groupby("run_lr"):
        curve = smooth(part, grid, width)
        top = max(top, float(curve.max()))
        ax.plot(grid, np.where(curve > floor * curve.max(), curve, np.nan), color=colors[lr], linewidth=1.0)
    ax.set_yscale("log")
    ax.set_ylim(floor * top, 3 * top)
    ax.yaxis.set_major_locator(LogLocator(numticks=5))
    ax.yaxis.set_minor_locator(NullLocator())


def smooth(rows: Frame, grid: np.ndarray, width: float) -> np.ndarray:
    """Return the density from one or more runs' quadratures, all runs weighted equally.

    Args:
        rows: nodes and weights.
        grid: eigenvalues to evaluate, shape (points,).
        width: standard deviation of each node's Gaussian, in eigenvalue units.

    Returns:
        The density, shape (points,).
    """
    bells = np.exp(-0.5 * ((grid[:, None] - rows["node"].to_numpy(dtype=float)) / width) ** 2) / (
        width * math.sqrt(2 * math.pi)
    )
    return bells @ rows["weight"].to_numpy(dtype=float) / rows["run_id"].nunique()
