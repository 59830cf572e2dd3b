"""Compare a study's mechanisms with softmax attention: a figure, learning rates, costs, and a reading in words."""

from __future__ import annotations

import math

import numpy as np

from analysis.claims.mixers import reading
from analysis.drawing.tables import guarded_note, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.measures import spread_cell, three_digits
from analysis.numbers.at_best_rate import Numbers
from analysis.numbers.common_windows import common_windows
from analysis.numbers.learning import unlearned_words
from analysis.numbers.mixers import common_of, compares_mixers, find_plain, groups, numbers_of
from analysis.numbers.side_by_side import FEWEST_TURNS, ratio
from analysis.numbers.spread import MEDIAN_RULE
from analysis.sections.kinds import APART_CAPTION, OWN_CLOCKS, RATIO_RULE, SENSITIVITY_RULE, nll_cell, panels, time_cell
from analysis.sections.section import (
    Captioned,
    Figures,
    Section,
    continuation_name,
    make_body,
    make_printer,
)
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.words import lr_text

TITLE, NAME = "Mechanisms beside softmax attention", "mixers"


@once_per_study
def mixer_tables(study: Study) -> list[Table]:
    """Return two tables for each group of series with different mechanisms alone."""
    found, all_groups = [], groups(study)
    for group in all_groups:
        numbers = numbers_of(study, group)
        of = f" ({common_of(study, group)})" if len(all_groups) > 1 else ""
        found += [_windows_table(study, list(numbers.values()), of), _costs_table(study, numbers, of)]
    return found


def _windows_table(study: Study, numbers: list[Numbers], of: str) -> Table:
    """Return best rates, windows, sensitivity and α_max; of a single rate neither windows nor sensitivity.

    ``of``: the end of the title, the group's common settings.
    """
    is_swept = study.runs["lr"].nunique() > 1
    lowest = min((each.nll.median for each in numbers if each.nll.n), default=math.nan)
    rows = tuple(
        (
            Cell(each.name),
            Cell(f"{each.num_diverged}/{each.num_runs}"),
            Cell(lr_text(each.best) if math.isfinite(each.best) else "--"),
            nll_cell(study, each, lowest),
            *((_window_cell(study, each), spread_cell(each.sensitivity, three_digits)) if is_swept else ()),
            spread_cell(each.ratio),
        )
        for each in numbers
    )
    swept = (
        " Window: decades of the own window, of the median over seeds (≥: open at an end; a range: the neighbouring "
        f"rate diverged); common: of the common window. {SENSITIVITY_RULE}"
    )
    caption = (
        f"Diverged: of all runs. Best: the learning rate of the lowest median NLL ({wording.words(study).unit}). NLL: "
        f"median over seeds. {MEDIAN_RULE}.{swept * is_swept} α_max / α: each run's median over its recorded steps at "
        f"the best rate {RATIO_RULE}"
        f"{guarded_note(study)}"
    )
    header = ("mechanism", "diverged", "best", "NLL", *(("window", "sensitivity") * is_swept), "α_max / α")
    return Table(f"Mechanisms: what a learning rate does to each{of}", caption, header, rows)


def _window_cell(study: Study, each: Numbers) -> Cell:
    """Return the own window's decades, below them the common one's; or the reason for none."""
    if each.window is None or (word := unlearned_words(study)[each.series]):
        return Cell("none" if each.window is None else word)
    common = common_windows(study).get(each.series)
    beside = "" if common is None or common.median is None else f"common {width_text(common.median)}"
    return Cell(width_text(each.window), beside)


def _costs_table(study: Study, numbers: dict[str, Numbers], of: str) -> Table:
    """Return parameters, time, memory and, if the mechanisms can continue reading, their state's size.

    Time and memory are from `benchmarks.throughput` if measured; else time by the runs' clocks, no memory.
    """
    plain = find_plain(numbers)
    has_state = any(math.isfinite(each.state_bytes) for each in numbers.values())
    memory = {row["series"]: float(row.get("peak_bytes") or math.nan) for row in study.throughput.get("rows", [])}
    rows = tuple(
        (
            Cell(each.name),
            Cell(f"{each.num_params:,.0f}", f"{each.num_params / plain.num_params:.2f}"),
            _side_by_side(study, each, plain) if memory else time_cell(each, plain),
            _size_cell(memory.get(series, math.nan), memory.get(plain.series, math.nan), 2**20),
            *([_size_cell(each.state_bytes, plain.state_bytes, 2**10)] if has_state else []),
        )
        for series, each in numbers.items()
    )
    measured = f"python -m benchmarks.throughput runs/studies/{study.name}"
    how = (
        f"the mechanisms taking turns, median over turns, below it the 95 % interval; {study.throughput['device']}; "
        f"{study.throughput['machine']}. Memory: the most that such a step holds at once beyond parameters and the "
        f"optimizer's state, below it over {plain.name}'s"
        if memory
        else f"{OWN_CLOCKS}; below it the range over seeds and n. Memory: the runs do not record what a step holds; "
        f"{measured} measures it, and the time side by side"
    )
    state = (
        " State: memory of all layers for generation after one sequence of this length, keys and values or recurrent "
        f"states and the inputs of short convolutions, in float32; below it over {plain.name}'s."
        if has_state
        else ""
    )
    caption = (
        f"Parameters: of the whole model, below them over {plain.name}'s. Time of a training step over {plain.name}'s: "
        f"{how}. At this study's length; python -m benchmarks.mechanisms measures both at longer ones.{state}"
    )
    header = ("mechanism", "parameters", "time of a step", "memory (MB)", *(["state (KiB)"] if has_state else []))
    return Table(f"Mechanisms: what each costs{of}", caption, header, rows)


def _side_by_side(study: Study, each: Numbers, plain: Numbers) -> Cell:
    """Return the step time over the baseline's, measured in turns; the baseline's own in milliseconds."""
    found = ratio(study, plain.series, each.series)  # plain over each in throughput equals each over plain in time
    if found is None:
        return Cell("--")
    if each is plain:
        seconds = next(row["seconds"] for row in study.throughput["rows"] if row["series"] == each.series)
        return Cell("1.00", f"{1e3 * float(np.median(seconds)):.1f} ms")
    return Cell(f"{found.median:.2f}", f"{found.low:.2f}–{found.high:.2f}" if found.turns >= FEWEST_TURNS else "")


def _size_cell(size: float, plain: float, unit: int) -> Cell:
    """Return bytes in a unit, below it the ratio to the baseline's."""
    over = f"{size / plain:.2f}" if math.isfinite(plain) else ""
    return Cell(f"{size / unit:.1f}", over) if math.isfinite(size) else Cell("--")


def figures(study: Study) -> Figures:
    """Draw a panel for each mechanism, one figure for each group with several rates."""
    drawn = {}
    for index, group in enumerate(groups(study)):
        numbers = numbers_of(study, group)
        plain = find_plain(numbers)
        figure = panels(study, numbers, plain, dict.fromkeys(numbers, 1.0), "learning rate")
        if figure is not None:
            opening = "Validation NLL at the end of training against learning rate, a panel a mechanism"
            caption = APART_CAPTION.format(opening=opening, plain=plain.name)
            drawn[continuation_name(NAME, index)] = Captioned(figure, caption)
    return drawn


SECTION = Section(
    make_body(TITLE, mixer_tables, reading), compares_mixers, figures, make_printer(mixer_tables, reading)
)
