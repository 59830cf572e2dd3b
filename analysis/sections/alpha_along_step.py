"""Explain why α_max grows with the rate of training, with the loss along steps at several rates."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, looks
from analysis.numbers.kinds import OWN_STATE
from analysis.numbers.step_shares import TERMINAL, recorded_steps
from analysis.numbers.windows import windows
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import lr_text, power

NAME = "alpha-along-step"
EXPLAINED = (
    "Why α_max grows with the rate of training: α_max = −2 · slope / curvature describes the weights that a run has "
    "reached, not the model. To second order the loss along a step is a parabola, back at its start at α_max. A run "
    "leaves regions whose curvature along its steps is too large for its rate; so a run at a larger rate ends in a "
    "flatter region, with a larger α_max. α_max is therefore no recommended rate: it says how far a step can go from "
    "these weights. α_max / α compares runs."
)
CAPTION = (
    "Loss along a step of {series} at three rates of training, from the recorded slope and curvature of the step with "
    "the median α_max (terminal checkpoint, run's own state). Dot: the step taken; dashed: α_max."
)


def typical_steps(study: Study, series: str) -> Frame:
    """Return the recorded step with the median α_max at the lowest, the best and the highest measured rate.

    Args:
        study: supplies the steps.
        series: name of the series.

    Returns:
        ``run_lr lr slope curvature alpha_max``, one row per rate; fewer if rates coincide.
    """
    rows = recorded_steps(study, TERMINAL, OWN_STATE)
    rows = rows[(rows["series"] == series) & np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    rows, best = rows.sort_values("alpha_max"), windows(study)[series].median
    rates = sorted(set(rows["run_lr"]))
    chosen = {*rates[:1], *([best.best_lr] if best is not None and best.best_lr in rates else []), *rates[-1:]}
    places = [np.flatnonzero(rows["run_lr"] == lr) for lr in sorted(chosen)]
    medians = [int(place[(len(place) - 1) // 2]) for place in places]
    return rows.iloc[medians][["run_lr", "lr", "slope", "curvature", "alpha_max"]]


def step_figure(study: Study) -> tuple[str, Figure] | None:
    """Draw the reference's loss along typical steps; None below two measured rates."""
    names = [name for name in study.series if study.of(name)["mechanism"].iloc[0] == study.reference]
    series = names[0]
    steps = typical_steps(study, series)
    if len(steps) < 2:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.75), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(steps)))
    for ax, step in zip(axes, steps.itertuples(), strict=True):
        _panel(ax, step, looks(study)[series].color)
    axes[0].set_ylabel(f"change of the loss{wording.nats(study)}")
    return series, figure


def _panel(ax: Axes, step, color: str) -> None:
    """Draw one step's parabola up to beyond α_max."""
    taken = step.lr if np.isfinite(step.lr) else step.run_lr
    lengths = np.linspace(0, 1.15 * max(step.alpha_max, taken), 60)
    change = lengths * step.slope + lengths**2 * step.curvature / 2
    ax.plot(lengths, change, color=color)
    ax.plot(taken, taken * step.slope + taken**2 * step.curvature / 2, "o", color=color, markersize=4)
    ax.axhline(0, color=MUTED, linewidth=0.6)
    ax.axvline(step.alpha_max, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    limit = f"$\\alpha_\\mathrm{{max}}$ {power(step.alpha_max)}"
    ax.set_title(f"trained at {lr_text(step.run_lr)}: {limit}", loc="left", fontsize=8)
    ax.set_xlabel("length of the step α", fontsize=8)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
    ax.tick_params(labelsize=7)
