"""Draw NLL against learning rate, a panel for each kind beside the baseline.

Also format the cells of its numbers (`analysis.numbers.at_best_rate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims.at_best_rate import step_ratio
from analysis.drawing.marks import PANELS_PER_ROW, dots, mark
from analysis.drawing.style import INK, looks, lr_axis, panel_grid
from analysis.drawing.typeset import Cell
from analysis.measures import cell_at
from analysis.numbers.at_best_rate import Bounds, Numbers
from analysis.numbers.side_by_side import mean_time, ratio
from analysis.numbers.spread import SEED_RANGE, Spread
from analysis.numbers.windows import explain_absence, is_any_finite, median_line, outcomes
from analysis.sections.nll_figures import nll_limits
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.reference import frequency_nll
from analysis.words import wrap

TITLE_WIDTH = 26  # characters
# sentences of a caption on columns of `analysis.numbers.at_best_rate`
SENSITIVITY_RULE = "Sensitivity: Wortsman et al. 2024, over the swept rates."
RATIO_RULE = (
    "from the optimizer's own state, of the finite ones, over the rate in force; below 1 the training's own step "
    "lowers its batch's loss no more, to second order."
)
OWN_CLOCKS = "by the runs' own clocks, so that what else the machine did at the time is in it"
APART_CAPTION = (
    "{opening}, {plain}'s in grey in each. Line: median over seeds; shade: "
    f"{SEED_RANGE}, those that finished; star: the best rate; ×: diverged runs of all runs there."
)


def panels(
    study: Study, numbers: Mapping[str, Numbers], plain: Numbers, units: Mapping[str, float], axis: str
) -> Figure | None:
    """Draw a panel for each series beside the baseline's median.

    Args:
        study: the study.
        numbers: numbers by series.
        plain: the baseline's numbers.
        units: divisor of the rates, by series.
        axis: label of the divided rates.

    Returns:
        The figure; None if no series has two rates, or no run a finite NLL.
    """
    tables = {name: over(outcomes(study, name), units[name]) for name in numbers}
    if not is_any_finite(tables.values()) or max(len(table) for table in tables.values()) < 2:
        return None
    styles = looks(study)
    figure, axes = panel_grid(len(numbers), PANELS_PER_ROW, 1.15, 0.5, sharex=True, sharey=True)
    nll_limits(axes[0], tables, frequency_nll(study.runs))
    rates = {rate for table in tables.values() for rate in table.index}
    beside = median_line(tables[plain.series])
    for index, (ax, name) in enumerate(zip(axes, numbers, strict=True)):
        ax.plot(beside.index, beside.where(np.isfinite(beside)), color="#a9b0b8", linewidth=1.0, zorder=1)
        _panel(ax, tables[name], numbers[name], units[name], styles[name].color)
        lr_axis(ax, rates, most=4)
        ax.set_xticks(ticks := ax.get_xticks(), [f"{tick:.3g}" for tick in ticks], fontsize=7)
        ax.set_title(wrap(numbers[name].name, TITLE_WIDTH), loc="left", fontsize=8.5)
        if index % PANELS_PER_ROW == 0:
            ax.set_ylabel(f"{'NLL' if wording.nats(study) else 'loss'}{wording.nats(study)}", fontsize=8)
        ax.tick_params(labelbottom=index + PANELS_PER_ROW >= len(numbers))
    figure.supxlabel(axis, fontsize=9)
    return figure


def _panel(ax: Axes, table: Frame, each: Numbers, unit: float, color: str) -> None:
    """Draw one series: median line, interval shade, a star at the best rate, crosses with counts of diverged runs."""
    line = median_line(table)
    spreads = [Spread.of(row) for _, row in table.iterrows()]
    lows, highs = [spread.low for spread in spreads], [spread.high for spread in spreads]
    ax.fill_between(table.index, lows, highs, color=color, alpha=0.2, linewidth=0, zorder=2)
    ax.plot(line.index, line.where(np.isfinite(line)), color=color, marker="o", markersize=2.6, linewidth=1.1, zorder=3)
    if math.isfinite(each.best_lr):
        dots(ax, each.best_lr / unit, each.nll.median, "*", color, 8, markeredgecolor=INK, zorder=5)
    for rate, row in table.iterrows():
        if diverged := int(np.isinf(row.to_numpy(dtype=float)).sum()):
            place = {"transform": ax.get_xaxis_transform(), "clip_on": False}
            mark(ax, rate, 0.93, "x", color, 4, markeredgewidth=1.1, **place)
            text = {"color": color, "fontsize": 5.5, "ha": "center", "va": "top"}
            ax.text(rate, 0.85, f"{diverged}/{row.notna().sum()}", **text, **place)


def over(table: Frame, unit: float) -> Frame:
    """Return a table by learning rate, the rates divided by a unit.

    They have four digits.
    """
    return table.set_axis([float(f"{lr / unit:.4g}") for lr in table.index], axis=0)


def nll_cell(study: Study, each: Numbers, lowest: float) -> Cell:
    """Return the NLL at the best rate, its interval, and the share diverged.

    Args:
        study: supplies the runs.
        each: the series' numbers.
        lowest: the NLL in bold.
    """
    at_best = each.diverged.get(each.best, (0, 0))
    lost = [f"diverged {at_best[0]}/{at_best[1]}"] if at_best[0] else []
    if not each.nll.n:
        return Cell(explain_absence(study.of(each.series)))
    cell = cell_at(study, each.series, each.best_lr)
    return replace(cell, detail="\n".join([cell.detail, *lost]), bold=each.nll.median == lowest)


def bounds_text(bounds: Bounds) -> str:
    """Write decades known by bounds: 0.50, 0.50–1.00, ≥ 0.50, none."""
    least, most = (end + 0.0 for end in bounds)
    if math.isnan(least):
        return "none"
    if math.isinf(most):
        return f"≥ {least:.2f}"
    return f"{least:.2f}" if most <= least + 0.005 else f"{least:.2f}–{most:.2f}"


def mean_time_cell(study: Study, each: Numbers, plain: Numbers) -> Cell:
    """Return the mean step time over the baseline's, measured in turns; below it the median turn's.

    Args:
        study: the study with its throughput.
        each: the kind of run.
        plain: the baseline; its own cell has milliseconds.
    """
    over, found = mean_time(study, each.series, plain.series), ratio(study, plain.series, each.series)
    if found is None:
        return Cell("--")
    if each is plain:
        seconds = next(row["seconds"] for row in study.throughput["rows"] if row["series"] == each.series)
        return Cell("1.00", f"{1e3 * float(np.mean(seconds)):.1f} ms")
    return Cell(f"{over:.2f}", f"median {found.median:.2f}")


def time_cell(each: Numbers, plain: Numbers) -> Cell:
    """Return the step time over the baseline's by the runs' own clocks; the baseline's in milliseconds below."""
    ratio = step_ratio(each, plain)
    if math.isnan(ratio):
        return Cell("--")
    own = [each.step_s[seed] / plain.step_s[seed] for seed in each.step_s.keys() & plain.step_s.keys()]
    known = [value for value in own if math.isfinite(value)]
    beside = f"{min(known):.2f}–{max(known):.2f}, n={len(known)}" if len(known) > 1 else f"n={len(known)}"
    return Cell(f"{ratio:.2f}", f"{1e3 * float(sorted(each.step_s.values())[0]):.1f} ms" if each is plain else beside)
