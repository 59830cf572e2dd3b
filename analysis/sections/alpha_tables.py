"""Tabulate α_max in the layout of the paper's Tables 5 to 8.

Every run counts (`step_shares`). Checkpoints of runs that stopped early have their own table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table, longest_part
from analysis.numbers.step_shares import (
    COUNTED,
    DIVERGED,
    LAST,
    MEASURED,
    PHASES,
    RULE,
    count_stable_steps,
    finite_median,
    notes,
    phases_and_states,
    planned_count,
    recorded_steps,
    series_with_results,
    series_without_alpha,
    share,
    stable_steps,
    steps_without_alpha,
)
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.study.protocol import (
    NOT_DEFINED,
    base_rates,
    describe_protocol,
    describe_protocol_in,
    state_text,
    terms_in_brief,
)
from analysis.words import count_range, join_words, lr_text, plural, power

ALPHA_COLUMNS = 4
NARROW = 13  # characters of a name without a break that fit a column
PALE = (
    "Grey (in plain text: in parentheses): most runs learned nothing. % stable says that steps lower their batch's "
    "loss, not that training succeeds"
)
CELLS = (
    "Left: median α_max over the steps where it is finite; below it the range of the single runs' medians, and n, the "
    "runs measured. Bold: larger than the learning rate, with fewer than half of the runs diverged. Right: share of "
    "steps with α_max above the training LR in % (bold: highest of the row), below it the range over runs, and n, the "
    "steps"
)
MOST_DIVERGED = 0.5  # share of a cell's runs; from here on the survivors' median is not bold


def alpha_tables(study: Study, phases: Sequence[str] | None = None, states: Sequence[str] | None = None) -> list[Table]:
    """Return α_max tables in the form of the paper's Table 5.

    Args:
        study: the study.
        phases: phases to tabulate; all if None.
        states: states to tabulate; all if None.

    Returns:
        One per phase, state and four series, one for runs that stopped early; [] without recorded steps.
    """
    tables = []
    for phase, state in phases_and_states(study):
        is_asked = (phases is None or phase in phases) and (states is None or state in states)
        tables += _tables_of(study, phase, state) if is_asked and phase != LAST else []
    last = last_table(study) if phases is None or LAST in phases else None
    return tables if last is None else [*tables, last]


@once_per_study
def _tables_of(study: Study, phase: str, state: str) -> list[Table]:
    """Return the tables of one phase and state, at most four series in each."""
    rows, count = recorded_steps(study, phase, state), count_stable_steps(study, phase, state)
    return [_alpha_table(study, rows, count, phase, state, part) for part in _columns(study, count)]


def _columns(study: Study, count: Frame) -> list[tuple[str, ...]]:
    """Return the series of each table; a table needs one measured series, the others may be undefined."""
    result = series_with_results(study, count)
    named = [name for name in study.series if name in {*result, *series_without_alpha(study, count)}]
    most = ALPHA_COLUMNS if max(map(longest_part, named), default=0) <= NARROW else ALPHA_COLUMNS // 2
    return [part for part in chunks(named, most) if set(part) & set(result)]


def _lost(shown: Frame) -> str:
    """Return the number of steps lost to a non-finite number, as text.

    With the first one's origin.
    """
    lost = shown[shown["alpha_max"].isna()]
    origins = [note for note in lost["note"] if note]
    return (f", {len(lost)} of {len(shown)} lost to a non-finite loss" if len(lost) else "") + (
        f" (the first: {origins[0]})" if origins else ""
    )


def _undefined_text(study: Study, phase: str, state: str, series: Sequence[str]) -> str:
    """Return the number of further steps without α_max as text; "" for none."""
    rows = steps_without_alpha(study, phase, state)
    number = int(rows["series"].isin(series).sum())
    left = f", {plural(number, 'further step')} left out in which the optimizer did not move"
    return f"{left}, so that α_max is not defined" if number else ""


def _alpha_table(study: Study, rows: Frame, count: Frame, phase: str, state: str, series: tuple[str, ...]) -> Table:
    """Return one table of median α_max and % stable steps: a row for each learning rate, two columns a series.

    The caption names lost, undefined and unmeasured steps.
    """
    undefined = series_without_alpha(study, count)
    known = set(count["series"]) - {*series_with_results(study, count), *undefined}
    unmeasured = [name for name in study.series if name in known]
    count, shown = count[count["series"].isin(series)], rows[rows["series"].isin(series)]
    of_series = count[~count["series"].isin(undefined)]
    known_lrs = set(of_series.loc[of_series["outcome"].isin(COUNTED), "run_lr"])
    lrs = sorted(known_lrs or set(of_series["run_lr"]))
    of_rate, nothing = dict(iter(shown[["series", "alpha_max", "run_lr"]].groupby("run_lr"))), shown.iloc[:0]
    body = tuple(alpha_row(of_rate.get(lr, nothing), count[count["run_lr"] == lr], lr, series) for lr in lrs)
    lost, rule = _lost(shown) + _undefined_text(study, phase, state, series), counting_rule(study, rows, phase)
    how = describe_protocol_in(study, shown, state) + base_rates(study) + terms_in_brief(study)
    absent = f" Not measured at all: {join_words(unmeasured)}." if unmeasured else ""
    absent += f" Not defined here: {join_words(undefined)}." if undefined else ""
    left = sorted(set(of_series["run_lr"]) - set(lrs))
    absent += f" Not measured at {plural(len(left), 'further rate')}." if left else ""
    steps = f"{count_range(shown.groupby('run_id').size())} steps recorded per run" if len(shown) else "Steps: none"
    pale = f"{PALE}. " if any(cell.pale for row in body for cell in row) else ""
    caption = (
        f"{CELLS}. {pale}{rule} (survivors: the share without them). {steps}{lost}; -- where there is none.{absent} "
        f"{how}"
    )
    title = f"Median α_max and % stable steps, {state_text(state)}, {PHASES.get(phase, phase)}"
    known = count[count["outcome"].isin(COUNTED)].groupby(["series", "run_lr"])
    counts = [(count_range(known.size()), "run"), (count_range(known["steps"].sum()), "step")]
    each = ", ".join(f"{number} {noun}{'s' * (number != '1')}" for number, noun in counts)
    brief = (
        "Median of the finite α_max (bold: above the training LR, with fewer than half of the runs diverged), and "
        "the share of steps with α_max above the training LR (bold: highest of the row); each cell over "
        f"{each}. {pale}{rule}.{list_diverged(count, series)}{absent} {how}"
    )
    return replace(make_table(title, caption, series, body), brief=brief)


def make_table(title: str, caption: str, series: Sequence[str], body: tuple[tuple[Cell, ...], ...]) -> Table:
    """Return a table of rows from `alpha_row`, or as wide.

    Args:
        title: the table's title.
        caption: its caption.
        series: the series of its columns.
        body: its rows.
    """
    groups = (("", 1), ("median α_max", len(series)), ("% stable", len(series)))
    widths = ("auto", *("1.3fr",) * len(series), *("1fr",) * len(series)) if len(series) > 2 else ()
    return Table(title, caption, ("LR", *series, *series), body, groups, (), widths)


def counting_rule(study: Study, rows: Frame, phase: str) -> str:
    """Return the caption's rule on diverged runs; no full stop.

    Args:
        study: the study.
        rows: recorded steps.
        phase: phase of the table.
    """
    return (
        RULE[phase].format(steps=plural(planned_count(study, rows), "step"))
        if phase in RULE
        else "Runs that were measured only"
    )


def list_diverged(count: Frame, series: Sequence[str]) -> str:
    """List diverged runs by series and rate, for a caption; "" for none.

    E.g. ``" Diverged: sa 2/3 at 3e-2; sw 3/3 at 1e-2 and 3e-2."``
    """
    found = []
    for name in series:
        parts = count[count["series"] == name].groupby("run_lr")["outcome"]
        numbers = {
            lr: f"{(outcomes == DIVERGED).sum()}/{len(outcomes)}"
            for lr, outcomes in parts
            if (outcomes == DIVERGED).any()
        }
        found += [
            f"{name} {text} at {join_words(lr_text(lr) for lr, each in numbers.items() if each == text)}"
            for text in dict.fromkeys(numbers.values())
        ]
    return f" Diverged: {'; '.join(found)}." if found else ""


def alpha_row(rows: Frame, count: Frame, lr: float, series: tuple[str, ...]) -> tuple[Cell, ...]:
    """Return a learning rate's row: the median α_max of each series, then the % stable of each.

    Args:
        rows: recorded steps at the rate.
        count: runs of `count_stable_steps` at the rate.
        lr: the learning rate.
        series: the columns.
    """
    parts = [(rows[rows["series"] == name], count[count["series"] == name]) for name in series]
    shares = [share(part) for _, part in parts]
    top = max((each for each in shares if not math.isnan(each)), default=math.nan)
    cells = [*(_median_cell(*part, lr) for part in parts), *(share_cell(part, top) for _, part in parts)]
    nothing = [is_untrained(part) for _, part in parts] * 2
    shown = (replace(cell, bold=False, pale=True) if pale else cell for cell, pale in zip(cells, nothing, strict=True))
    return (Cell(lr_text(lr)), *shown)


def is_untrained(count: Frame) -> bool:
    """Return whether at least half of the measured runs are no better than the baseline of frequencies."""
    measured = count[count["outcome"] == MEASURED]
    return len(measured) > 0 and bool((measured["status"] == "plateaued").mean() >= 0.5)


def _median_cell(rows: Frame, count: Frame, lr: float) -> Cell:
    outcomes, beside = count["outcome"].to_numpy(), notes(count)
    if set(outcomes) == {NOT_DEFINED}:
        return Cell(NOT_DEFINED)
    medians = count["median"].to_numpy()[outcomes == MEASURED]
    if not len(medians):
        return Cell("--", "\n".join(beside))
    median, by_run = finite_median(rows["alpha_max"]), medians[~np.isnan(medians)]
    interval = f"{power(by_run.min())}–{power(by_run.max())}, " if len(by_run) > 1 else ""
    few_diverged = (outcomes == DIVERGED).sum() < MOST_DIVERGED * len(outcomes)
    return Cell(power(median), "\n".join([f"{interval}n={len(medians)}", *beside]), bool(median > lr and few_diverged))


def share_cell(count: Frame, top: float = math.nan) -> Cell:
    """Return the share of hits in % over all counted runs.

    Bold if equal to ``top`` and above 0. Below it: the range over runs, n, and the other runs' fate.
    """
    outcomes, beside = count["outcome"].to_numpy(), notes(count)
    if set(outcomes) == {NOT_DEFINED}:
        return Cell(NOT_DEFINED)
    survived = outcomes == MEASURED
    known = survived | (outcomes == DIVERGED)
    if not known.any():
        return Cell("--", "\n".join(beside))
    hits, steps = count["hits"].to_numpy(), count["steps"].to_numpy()
    by_run, value = hits[known] / steps[known] * 100, hits[known].sum() / steps[known].sum()
    interval = f"{by_run.min():.0f}–{by_run.max():.0f}, " if len(by_run) > 1 else ""
    if 0 < survived.sum() < known.sum():
        beside.append(f"survivors {hits[survived].sum() / steps[survived].sum() * 100:.0f}")
    return Cell(f"{value * 100:.0f}", "\n".join([f"{interval}n={steps[known].sum()}", *beside]), bool(value == top > 0))


def last_table(study: Study) -> Table | None:
    """Return a row for each measured last checkpoint before an early stop; None without any."""
    rows = recorded_steps(study, LAST)
    if rows.empty:
        return None
    states = [state for phase, state in phases_and_states(study) if phase == LAST]
    runs = study.runs[study.runs["run_id"].isin(rows["run_id"])]
    runs = runs.assign(order=runs["series"].map(study.series.index)).sort_values(["order", "lr", "seed"], kind="stable")
    body = tuple(_last_row(run, rows[rows["run_id"] == run.run_id], states) for run in runs.itertuples())
    caption = (
        "No terminal checkpoints: each is the last that a run left before it diverged or stopped, at the step "
        "named, and says what the curvature was there. In the tables of terminal checkpoints these runs count as 0 "
        "% stable. Median of the finite α_max (bold: above the training LR) and share of recorded steps with α_max "
        f"above the training LR in %, below it n, the steps. {describe_protocol(rows)}{base_rates(study)}"
        f"{terms_in_brief(study)}"
    )
    header = ("mechanism", "LR", "seed", "last checkpoint", "end", *("median α_max", "% stable") * len(states))
    groups = (("", 5), *((state_text(state), 2) for state in states))
    return Table("Last checkpoints before runs ended early", caption, header, body, groups)


def _last_row(run, rows: Frame, states: Sequence[str]) -> tuple[Cell, ...]:
    """Return one run's row: its last checkpoint's step, its end, and median α_max and % stable in each state."""
    cells: list[Cell] = []
    for state in states:
        part = rows[rows["state"] == state]
        median = finite_median(part["alpha_max"])
        stable = f"{stable_steps(part).mean() * 100:.0f}" if len(part) else "--"
        cells += [Cell(power(median), "", bool(median > run.lr)), Cell(stable, f"n={len(part)}")]
    where = f"step {_whole(rows['checkpoint_step'].iloc[0])} of {_whole(run.planned_steps)}"
    texts = (run.series, lr_text(run.lr), f"{run.seed:g}", where, f"{run.status}, step {_whole(run.num_steps)}")
    return (*map(Cell, texts), *cells)


def _whole(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else "unknown"
