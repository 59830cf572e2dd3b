"""Compare a study's optimizers, each at its own rates: a figure, windows, steps with costs, and a reading in words."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims.at_best_rate import optimizers_reading as reading
from analysis.drawing.marks import dots, entry, legend_columns
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, Look, looks, lr_axis
from analysis.drawing.tables import guarded_note
from analysis.drawing.typeset import Cell, Table
from analysis.measures import outcome_of, spread_cell, three_digits
from analysis.numbers.at_best_rate import Numbers
from analysis.numbers.optimizers import compares_optimizers, find_plain, groups, name_setting, numbers_of, reference_of
from analysis.numbers.spread import MEDIAN_RULE, SEED_RANGE, Spread
from analysis.numbers.windows import is_any_finite, median_line, outcomes
from analysis.sections.kinds import (
    APART_CAPTION,
    OWN_CLOCKS,
    RATIO_RULE,
    SENSITIVITY_RULE,
    bounds_text,
    mean_time_cell,
    nll_cell,
    over,
    panels,
    time_cell,
)
from analysis.sections.nll_figures import nll_limits
from analysis.sections.section import (
    Captioned,
    Figures,
    Section,
    continuation_name,
    make_body,
    make_printer,
)
from analysis.study import multiples, wording
from analysis.study.load import Frame, Study
from analysis.study.protocol import terms_in_brief
from analysis.study.reference import frequency_nll

TITLE = "Optimizers, each at rates of its own"


def optimizer_tables(study: Study) -> list[Table]:
    """Return two tables for each group of series with different optimizers alone."""
    found, all_groups = [], groups(study)
    for group in all_groups:
        numbers = list(numbers_of(study, group).values())
        of = f" ({name_setting(study, group)})" if len(all_groups) > 1 else ""
        found += [_windows_table(study, numbers, of), _steps_table(study, numbers, of)]
    return found


def _windows_table(study: Study, numbers: list[Numbers], of: str) -> Table:
    """Return best rates and their distance to the edges of stability; ``of`` ends the title with common settings."""
    lowest = min((each.nll.median for each in numbers if each.nll.n), default=math.nan)
    rows = tuple(_window_row(study, each, lowest) for each in numbers)
    told = multiples.references(study.study)
    over = ", over its reference rate" if told else ""
    caption = (
        f"Best: the learning rate of the lowest median NLL ({wording.words(study).unit}){over}; all that "
        "follows is at that rate, or starts from it: no rate of one optimizer is held against another's. NLL: median "
        f"over seeds. {MEDIAN_RULE}. Decades to stable: from the best rate to the largest at which every "
        "seed ended stable, and to the next one tried, at which not all did (≥: there was none above). Decades to 5 %: "
        "from it to where the median NLL leaves 5 % of the best, as the stable windows have it. α_max / α: each run's "
        f"median over its recorded steps {RATIO_RULE} {SENSITIVITY_RULE} Diverged: of all runs."
        f"{terms_in_brief(study)}{guarded_note(study)}"
    )
    header = ("optimizer", "diverged", "best", "NLL", "to stable", "to 5 %", "α_max / α", "sensitivity")
    groups_ = (("", 4), ("decades from the best rate", 2), ("", 2))
    return Table(f"Optimizers: how far each one's learning rate can be pushed{of}", caption, header, rows, groups_)


def _window_row(study: Study, each: Numbers, lowest: float) -> tuple[Cell, ...]:
    """Return one optimizer's row; ``lowest``, the table's lowest NLL, is bold."""
    return (
        Cell(each.name),
        Cell(f"{each.num_diverged}/{each.num_runs}"),
        Cell(f"{each.best:.3g}" if math.isfinite(each.best) else "--"),
        nll_cell(study, each, lowest),
        Cell(bounds_text(each.to_stable)),
        Cell(bounds_text(each.to_near)),
        spread_cell(each.ratio),
        spread_cell(each.sensitivity, three_digits),
    )


def _steps_table(study: Study, numbers: list[Numbers], of: str) -> Table:
    """Return each optimizer's step in comparable units, and its cost."""
    plain = find_plain({each.series: each for each in numbers})
    rows = tuple(
        (
            Cell(each.name),
            spread_cell(each.rms_u),
            spread_cell(each.rms_step),
            Cell(f"{each.optimizer_bytes:.2f}" if math.isfinite(each.optimizer_bytes) else "--"),
            mean_time_cell(study, each, plain) if study.throughput else time_cell(each, plain),
        )
        for each in numbers
    )
    caption = (
        "At each optimizer's best rate. RMS(u): root mean square of the entries of u = (θ⁺ − θ)/α, which says what a "
        "unit of its rate moves a parameter by: two rates move them alike where RMS(u) α is the same; RMS(αu): that of "
        f"the steps that were taken; both from the steps that α_max was measured of. {MEDIAN_RULE}. "
        "State: bytes of all tensors that the optimizer keeps, a parameter of the model. "
        f"{_explain_timing(study, plain)}"
    )
    header = ("optimizer", "RMS(u)", "RMS(αu)", "state (bytes)", "time of a step")
    return Table(f"Optimizers: what a step is, and costs{of}", caption, header, rows)


def _explain_timing(study: Study, plain: Numbers) -> str:
    """Describe the method of timing a step."""
    if study.throughput:
        turns = len(study.throughput["rows"][0]["seconds"])
        return (
            f"Time: of a training step over {plain.name}'s, the optimizers taking turns; mean over {turns} turns, "
            "since some do their work every few steps, below it the median turn's. "
            f"{study.throughput['device']}; {study.throughput['machine']}."
        )
    return (
        f"Time: the median step over {plain.name}'s, median over seeds, below it their range and n; {OWN_CLOCKS}; "
        f"python -m benchmarks.throughput runs/studies/{study.name} measures it side by side."
    )


def figures(study: Study) -> Figures:
    """Draw each group with several rates: all optimizers together and, for many, each beside the baseline."""
    drawn = {}
    for index, group in enumerate(groups(study)):
        if (together := optimizer_figure(study, group)) is not None:
            drawn[continuation_name(NAME, index)] = Captioned(together, CAPTION.format(rate=_axis(study)))
        if (apart := apart_figure(study, group)) is not None:
            plain = find_plain(numbers_of(study, group)).name
            caption = APART_CAPTION.format(opening="The same, a panel an optimizer", plain=plain)
            drawn[continuation_name(APART, index)] = Captioned(apart, caption)
    return drawn


NAME, APART = "optimizers", "optimizers-apart"
ROW_INCHES = 0.17
ASIDE = 0.12  # decades over which curves are shifted, so that their intervals do not overlap
MOST_TOGETHER = 6  # distinguishable curves in one panel
CAPTION = (
    "Above: validation NLL at the end of training against {rate}. Line: median over seeds, broken where half of them "
    f"or more diverged; bars: {SEED_RANGE}, those that finished. "
    "Curves stand a little beside each other. What rises above the axis is cut. Below: what became of the runs at each "
    "rate. Filled: every seed ended stable; hollow: some seed spiked or learned nothing; ×: some seed diverged, "
    "with their count; star: the best rate."
)


def _axis(study: Study) -> str:
    if multiples.references(study.study):
        return "learning rate over the optimizer's reference rate"
    return "learning rate over the optimizer's best"


def optimizer_figure(study: Study, group: tuple[str, ...]) -> Figure | None:
    """Draw one group's curves above the ends of its runs.

    None if no optimizer has two rates, or no run a finite NLL.
    """
    numbers = numbers_of(study, group)
    tables = {name: over(outcomes(study, name), _unit(study, numbers[name])) for name in group}
    if not is_any_finite(tables.values()) or max(len(table) for table in tables.values()) < 2:
        return None
    styles = looks(study)
    figure = Figure(figsize=(WIDTH_INCHES, 3.4 + ROW_INCHES * len(group)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 0.3 + ROW_INCHES * len(group)))
    unigram = frequency_nll(study.runs)
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
    above.set_ylabel(outcome_of(study).axis)
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
    """Draw a panel for each optimizer beside the baseline.

    None for a group small enough for one panel, or if `optimizer_figure` draws nothing.
    """
    if len(group) <= MOST_TOGETHER:
        return None
    numbers = numbers_of(study, group)
    units = {name: _unit(study, each) for name, each in numbers.items()}
    return panels(study, numbers, find_plain(numbers), units, _axis(study))


def _unit(study: Study, each: Numbers) -> float:
    """Return the divisor of the tables' rates on the axis."""
    if study.is_in_multiples:
        return 1.0
    if multiples.references(study.study):
        return reference_of(study, each.name)
    return each.best_lr if math.isfinite(each.best_lr) else 1.0


def _curve(ax: Axes, table: Frame, style: Look, aside: float) -> None:
    """Draw a median line and the finished seeds' intervals, shifted by ``aside`` decades."""
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
    """Draw one optimizer's rates: the ends of their runs, and a star at the best."""
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


SECTION = Section(
    make_body(TITLE, optimizer_tables, reading), compares_optimizers, figures, make_printer(optimizer_tables, reading)
)
