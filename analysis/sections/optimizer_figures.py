"""Draw NLL against the learning rate over each optimizer's own reference rate, and how the runs at each rate ended."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.marks import dots, entry, legend_columns
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, Look, looks, lr_axis
from analysis.numbers.kinds import Numbers
from analysis.numbers.optimizers import numbers_of, plain_of, reference_of
from analysis.numbers.spread import Spread
from analysis.numbers.windows import median_line, outcomes
from analysis.sections.nll_figures import nll_limits
from analysis.sections.panels import over, panels
from analysis.study import multiples, wording
from analysis.study.load import Frame, Study

NAME, APART = "optimizers", "optimizers-apart"
ROW_INCHES = 0.17
ASIDE = 0.12  # decades over which the curves stand beside each other, so that their intervals do not hide each other
MOST_TOGETHER = 6  # curves that can be told apart in one panel
CAPTION = (
    "Above: validation NLL at the end of training against {rate}. Line: median over seeds, broken where half of them "
    "or more diverged; bars: over the seeds that finished, min–max (n = 2) or Student-t 95 % interval of the mean (n ≥ "
    "3). Curves stand a little beside each other. What rises above the axis is cut. Below: what became of the runs at "
    "each rate. Filled: every seed ended stable; hollow: some seed spiked or learned nothing; ×: some seed diverged, "
    "with their count; star: the best rate."
)


def optimizer_figure_caption(study: Study) -> str:
    """Return the figure's caption, which says what the rates are divided by."""
    return CAPTION.format(rate=_axis(study))


def _axis(study: Study) -> str:
    if multiples.references(study.study):
        return "learning rate over the optimizer's reference rate"
    return "learning rate over the optimizer's best"


def optimizer_figure(study: Study, group: tuple[str, ...]) -> Figure | None:
    """Draw one group's curves above the ends of their runs; None where no optimizer has more than one rate, or no run a
    finite NLL."""
    numbers = numbers_of(study, group)
    tables = {name: over(outcomes(study, name), _unit(study, numbers[name])) for name in group}
    finite = [np.isfinite(table.to_numpy(dtype=float)).any() for table in tables.values()]
    if not any(finite) or max(len(table) for table in tables.values()) < 2:
        return None
    styles = looks(study)
    figure = Figure(figsize=(WIDTH_INCHES, 3.4 + ROW_INCHES * len(group)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 0.3 + ROW_INCHES * len(group)))
    unigram = float(study.runs["unigram_nll"].median())
    nll_limits(above, tables, unigram)
    for place, (name, table) in enumerate(tables.items()):
        _curve(above, table, styles[name], (place / max(1, len(group) - 1) - 0.5) * ASIDE)
    if math.isfinite(unigram) and above.get_ylim()[0] < unigram < above.get_ylim()[1]:
        above.axhline(unigram, color=MUTED, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1)
        label = wording.words(study).baseline.replace(" ", "\n")
        above.annotate(label, (1.008, unigram), xycoords=("axes fraction", "data"), fontsize=7, color=MUTED,
                       va="center", annotation_clip=False)  # fmt: skip
    for place, name in enumerate(group):
        _track(below, study, numbers[name], _unit(study, numbers[name]), place, styles[name])
    lr_axis(below, {rate for table in tables.values() for rate in table.index})
    below.set_xticks(ticks := below.get_xticks(), [f"{tick:.3g}" for tick in ticks])
    above.tick_params(axis="x", length=0, labelbottom=False)
    above.set_ylabel(f"{wording.words(study).nll} (nats)")
    below.set_xlabel(_axis(study))
    below.set_yticks(range(len(group)), [numbers[name].name for name in group], fontsize=7)
    below.set_ylim(len(group) - 0.4, -0.6)
    below.grid(axis="y", visible=False)
    named = {numbers[name].name: styles[name] for name in group}
    handles = [entry(n, s.color, linestyle=s.dashes, marker=s.marker, markersize=4) for n, s in named.items()]
    columns = min(legend_columns(handles), 7)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.4, columnspacing=1.2)
    return figure


def apart_figure(study: Study, group: tuple[str, ...]) -> Figure | None:
    """Draw a panel for each optimizer beside the one that all are compared with; None for so few that one panel shows
    them, or where `optimizer_figure` has nothing to draw."""
    if len(group) <= MOST_TOGETHER:
        return None
    numbers = numbers_of(study, group)
    units = {name: _unit(study, each) for name, each in numbers.items()}
    return panels(study, numbers, plain_of(numbers), units, _axis(study))


def _unit(study: Study, each: Numbers) -> float:
    """Return what a rate of the study's tables is divided by on the axis."""
    if study.is_in_multiples:
        return 1.0
    if multiples.references(study.study):
        return reference_of(study, each.name)
    return each.best_lr if math.isfinite(each.best_lr) else 1.0


def _curve(ax: Axes, table: Frame, style: Look, aside: float) -> None:
    """Draw a median line, and at each rate the interval over the seeds that finished, ``aside`` decades from where
    they belong."""
    line = median_line(table)
    inside = line.where(np.isfinite(line))
    moved = [rate * 10**aside for rate in inside.index]
    ax.plot(moved, inside, color=style.color, linestyle=style.dashes, marker=style.marker, markersize=3.4,
            linewidth=1.1, markeredgecolor="white", markeredgewidth=0.4, zorder=3)  # fmt: skip
    for rate, row in table.iterrows():
        spread = Spread.of(row)
        if spread.n > 1:
            at = float(rate) * 10**aside
            ax.plot([at, at], [spread.low, spread.high], color=style.color, linewidth=0.8, alpha=0.55, zorder=2)


def _track(ax: Axes, study: Study, each: Numbers, unit: float, place: int, look: Look) -> None:
    """Draw one optimizer's rates: how their runs ended, and a star at the best."""
    ax.axhline(place, color="#eef0f2", linewidth=0.8, zorder=0)
    for lr, runs in study.of(each.series).groupby("lr"):
        ended, at = set(runs["status"]), float(f"{float(lr) / unit:.4g}")
        diverged = int((runs["status"] == "diverged").sum())
        if diverged:
            ax.plot(at, place, "x", color=look.color, markersize=4, markeredgewidth=1.1)
            ax.annotate(f"{diverged}/{len(runs)}", (at, place), xytext=(5, 0), textcoords="offset points", fontsize=6,
                        color=look.color, va="center")  # fmt: skip
        else:
            fill = look.color if ended == {"stable"} else "white"
            ax.plot(at, place, "o", color=look.color, markersize=3.6, markerfacecolor=fill, markeredgewidth=0.8)
    if math.isfinite(each.best_lr):
        dots(ax, each.best_lr / unit, place, "*", look.color, 8.5, markeredgecolor=INK, zorder=5)
