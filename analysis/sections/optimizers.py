"""Compare the optimizers of a study at rates of their own: a figure, what a rate of each bears, what its step is and
costs, and a reading in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.claims.optimizers import reading
from analysis.drawing.pieces import Pieces, boxed, heading, shown
from analysis.drawing.tables import guarded_note, source
from analysis.drawing.typeset import Cell, Table
from analysis.measures import spread_cell, three_digits
from analysis.numbers.kinds import Numbers
from analysis.numbers.optimizers import compares_optimizers, groups, numbers_of, others_of, plain_of
from analysis.numbers.spread import INTERVAL_RULES, POSITIVE
from analysis.sections.kind_cells import bounds_text, mean_time_cell, nll_cell, time_cell
from analysis.sections.optimizer_figures import (
    APART,
    NAME,
    apart_figure,
    optimizer_figure,
    optimizer_figure_caption,
)
from analysis.sections.panels import APART_CAPTION
from analysis.sections.section import Drawn, Figures, Section, numbered, pictures, sourced
from analysis.study import multiples, wording
from analysis.study.load import Study
from analysis.study.step_terms import terms_in_brief

TITLE = "Optimizers, each at rates of its own"


def optimizer_tables(study: Study) -> list[Table]:
    """Return two tables for each group of series that differ in their optimizer alone."""
    found, all_groups = [], groups(study)
    for group in all_groups:
        numbers = list(numbers_of(study, group).values())
        of = f" ({others_of(study, group)})" if len(all_groups) > 1 else ""
        found += [_windows_table(study, numbers, of), _steps_table(study, numbers, of)]
    return found


def _windows_table(study: Study, numbers: list[Numbers], of: str) -> Table:
    """Return the table of best rates, and of what lies between them and the edges of stability. ``of``: ends the title
    with what the optimizers have in common, where the study has several such groups."""
    lowest = min((each.nll.median for each in numbers if each.nll.n), default=math.nan)
    rows = tuple(_window_row(each, lowest) for each in numbers)
    told = multiples.references(study.study)
    unit = "its reference rate" if told else "1"
    caption = (
        f"Best: the learning rate of the lowest median NLL ({wording.unit(study)}), over {unit}; all that follows is "
        "at that rate, or starts from it: no rate of one optimizer is held against another's. NLL: median over seeds. "
        f"{INTERVAL_RULES['real']}. Decades to stable: from the best rate to the largest at which every seed ended "
        "stable, and to the next one tried, at which not all did (≥: there was none above). Decades to 5 %: from it to "
        "where the median NLL leaves 5 % of the best, as the stable windows have it. α_max / α: each run's median over "
        "its recorded steps from the optimizer's own state, of the finite ones, over the rate in force; below 1 the "
        "training's own step lowers its batch's loss no more, to second order. Sensitivity: Wortsman et al. 2024, over "
        f"the swept rates. Diverged: of all runs.{terms_in_brief(study)}{guarded_note(study)} {source(study)}"
    )
    header = ("optimizer", "diverged", "best", "NLL", "to stable", "to 5 %", "α_max / α", "sensitivity")
    groups_ = (("", 4), ("decades from the best rate", 2), ("", 2))
    return Table(f"Optimizers: how far each one's learning rate can be pushed{of}", caption, header, rows, groups_)


def _window_row(each: Numbers, lowest: float) -> tuple[Cell, ...]:
    """Return one optimizer's row of it. ``lowest``: the lowest NLL of the table, which is set in bold."""
    return (
        Cell(each.name),
        Cell(f"{each.num_diverged}/{each.num_runs}"),
        Cell(f"{each.best:.3g}" if math.isfinite(each.best) else "--"),
        nll_cell(each, lowest),
        Cell(bounds_text(each.to_stable)),
        Cell(bounds_text(each.to_near)),
        spread_cell(each.ratio),
        spread_cell(each.sensitivity, three_digits),
    )


def _steps_table(study: Study, numbers: list[Numbers], of: str) -> Table:
    """Return the table of what a step is, in units that translate, and of what it takes."""
    plain = plain_of({each.series: each for each in numbers})
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
        f"the steps that were taken; both from the steps that α_max was measured of. {INTERVAL_RULES[POSITIVE]}. "
        "State: bytes of all tensors that the optimizer keeps, a parameter of the model. "
        f"{_timed(study, plain)} {source(study)}"
    )
    header = ("optimizer", "RMS(u)", "RMS(αu)", "state (bytes)", "time of a step")
    return Table(f"Optimizers: what a step is, and costs{of}", caption, header, rows)


def _timed(study: Study, plain: Numbers) -> str:
    """Say how the time of a step was measured."""
    if study.throughput:
        turns = len(study.throughput["rows"][0]["seconds"])
        return (
            f"Time: of a training step over {plain.name}'s, the optimizers taking turns; mean over {turns} turns, "
            "since some do their work every few steps, below it the median turn's. "
            f"{study.throughput['device']}; {study.throughput['machine']}."
        )
    return (
        f"Time: the median step over {plain.name}'s, median over seeds, below it their range and n; by the runs' own "
        "clocks, so that what else the machine did at the time is in it; python -m benchmarks.throughput "
        f"runs/studies/{study.name} measures it side by side."
    )


def figures(study: Study) -> Figures:
    """Draw for each group that has more than one rate a figure of all its optimizers and, where they are many, one of
    each beside the one that all are compared with."""
    drawn = {}
    for index, group in enumerate(groups(study)):
        if (together := optimizer_figure(study, group)) is not None:
            drawn[numbered(NAME, index)] = sourced(study, together, optimizer_figure_caption(study))
        if (apart := apart_figure(study, group)) is not None:
            plain = plain_of(numbers_of(study, group)).name
            drawn[numbered(APART, index)] = sourced(
                study, apart, APART_CAPTION.format(opening="The same, a panel an optimizer", plain=plain)
            )
    return drawn


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    return [*optimizer_tables(study), *reading(study)]


def body(study: Study, drawn: Drawn) -> Pieces:
    return heading(TITLE) + boxed(reading(study)) + pictures(drawn) + shown(optimizer_tables(study))


SECTION = Section(body, compares_optimizers, figures, tables)
