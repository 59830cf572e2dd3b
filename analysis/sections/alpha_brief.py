"""Tabulate α_max at each mechanism's best learning rate, as `stability.hessian` prints it of a study."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from analysis.drawing.typeset import Cell, Table
from analysis.numbers.step_shares import LAST, count_stable_steps, phases_and_states, recorded_steps
from analysis.numbers.windows import explain_absence, windows
from analysis.sections.alpha_tables import alpha_row
from analysis.study.load import Study
from analysis.study.protocol import explain_undefined_states
from analysis.words import lr_text, plural

MOST_ROWS = 8
STATES = {"checkpoint": "own", "paper": "warm-up"}
WIDTH = 110  # characters in a line
CAPTION = (
    "At the rate of the lowest median NLL. Left: median of the finite α_max (bold: above that rate); right: share of "
    "recorded steps with α_max above the rate, a diverged run counting as 0 %."
)


def describe_at_best_rates(study: Study, phases: Sequence[str]) -> str:
    """Return the table of `tabulate_at_best_rates` as text, and lines on what it leaves out.

    Args:
        study: the study.
        phases: phases of the measured checkpoints.
    """
    table = tabulate_at_best_rates(study, phases)
    lines = []
    if table is not None:
        more = len(table.rows) - MOST_ROWS
        text = replace(table, rows=table.rows[:MOST_ROWS]).text(details=False, wrap=WIDTH)
        lines += [text, *([f"… {plural(more, 'more row')}: tables=all"] if more > 0 else [])]
    elif all(each.median is None for each in windows(study).values()):
        lines.append(f"no best learning rate: {explain_absence(study.runs)}")
    elif set(phases) - {LAST}:
        lines.append("no step was recorded at a best learning rate; tables=all has the other rates")
    early = recorded_steps(study, LAST)["run_id"].nunique() if LAST in phases else 0
    if early:
        lines.append(f"{plural(early, 'run')} ended early: their last checkpoints are in tables=all")
    lines += textwrap.wrap(explain_undefined_states(study), WIDTH)
    return "\n".join(lines)


def tabulate_at_best_rates(study: Study, phases: Sequence[str]) -> Table | None:
    """Return a row for each series: its best rate, and median α_max and % stable steps there.

    Args:
        study: the study.
        phases: phases of the measured checkpoints, each with the measured states.

    Returns:
        None without a recorded step at a best rate.
    """
    places = [pair for pair in phases_and_states(study) if pair[0] in phases and pair[0] != LAST]
    best = {name: each.median.best_lr for name, each in windows(study).items() if each.median is not None}
    if not places or not best:
        return None
    body = []
    for series, lr in best.items():
        cells = []
        for phase, state in places:
            rows, count = (
                frame[(frame["series"] == series) & (frame["run_lr"] == lr)]
                for frame in (recorded_steps(study, phase, state), count_stable_steps(study, phase, state))
            )
            median, stable = alpha_row(rows, count, lr, (series,))[1:]
            cells += [replace(median, detail=""), replace(stable, detail="", bold=False)]
        body.append((Cell(series), Cell(lr_text(lr)), *cells))
    if all(cell.text == "--" for row in body for cell in row[2:]):
        return None
    groups = [("", 2), *((f"{phase}, {STATES.get(state, state)} state", 2) for phase, state in places)]
    header = ("mechanism", "best LR", *("median α_max", "% stable") * len(places))
    return Table("α_max at the best learning rates", CAPTION, header, tuple(body), tuple(groups))
