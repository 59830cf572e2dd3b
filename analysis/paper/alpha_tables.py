"""Tabulate α_max as the consensus paper's Tables 5 to 8: a table for each modality and kind of checkpoint, a block for
each size, median and % stable of the mechanisms side by side."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.drawing.tables import chunks, source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.step_shares import LAST, PHASES, counted, phases_and_states, recorded, shown_series
from analysis.paper import printed
from analysis.paper.grid import Block, all_runs, modality_text, told_once
from analysis.sections.alpha_tables import ALPHA_COLUMNS, alpha_row, counting_rule
from analysis.study.load import Frame, phase_rank
from analysis.study.protocol import base_rates, stated_in
from analysis.words import count_range

Measured = tuple[str, str]  # phase and state


def measured(blocks: Sequence[Block]) -> list[Measured]:
    """Return the phases and states that any place was measured in: terminal before earliest, paper before checkpoint;
    the last checkpoints of runs that ended early stand at as many steps, and in the studies' own reports."""
    pairs = {pair for block in blocks for pair in phases_and_states(block.study) if pair[0] != LAST}
    return sorted(pairs, key=lambda pair: (phase_rank(pair[0]), pair[1] != "paper", pair[1]))


def alpha_tables(modality: str, blocks: Sequence[Block]) -> list[Table]:
    """Return the tables of one modality: one for each phase, state and at most four mechanisms."""
    return [
        _table(modality, blocks, pair, series)
        for pair in measured(blocks)
        for series in chunks(_series(blocks, pair), ALPHA_COLUMNS)
        if series
    ]


def _series(blocks: Sequence[Block], pair: Measured) -> list[str]:
    """Return the series with a result in some place, in the order of a single report."""
    found = {name for block in blocks for name in shown_series(block.study, counted(block.study, *pair))}
    return [name for name in all_runs(blocks).series if name in found]


def _table(modality: str, blocks: Sequence[Block], pair: Measured, series: tuple[str, ...]) -> Table:
    phase, state = pair
    shown = [block for block in blocks if set(shown_series(block.study, counted(block.study, *pair))) & set(series)]
    rows = [row for block in shown for row in _block_rows(block, pair, series)]
    title = f"{modality_text(modality)}: median α_max and % stable steps, state “{state}”, {PHASES.get(phase, phase)}"
    groups = (("", 1), ("median α_max", len(series)), ("% stable", len(series)))
    widths = ("auto", *("1.3fr",) * len(series), *("1fr",) * len(series)) if len(series) > 2 else ()
    return Table(title, _caption(shown, pair, series), ("LR", *series, *series), tuple(rows), groups, (), widths)


def _caption(blocks: Sequence[Block], pair: Measured, series: Sequence[str]) -> str:
    """Return what a single report's caption says, once for all places where they agree."""
    told: dict[str, list[str]] = {}
    for block in blocks:
        rows = recorded(block.study, *pair)
        shown = rows[rows["series"].isin(series)]
        rule = counting_rule(block.study, rows, pair[0])
        told[block.label] = [rule + ".", stated_in(block.study, shown, pair[1]) + base_rates(block.study)]
    rules, protocols = (told_once({size: texts[index] for size, texts in told.items()}) for index in (0, 1))
    note = f" {printed.NOTE}" if any(len(printed.alpha_max(block, *pair)) for block in blocks) else ""
    sources = told_once({block.label: source(block.study) for block in blocks})
    return (
        "Left: median of the finite α_max (bold: above the training LR, with fewer than half of the runs diverged), "
        "below it the range of the single runs' medians, and n, the runs measured. Right: share of steps with α_max "
        "above the training LR in % (bold: highest of the row), below it the range over runs, and n, the steps; "
        f"survivors: the share without runs that diverged. {rules}{note} {protocols} {sources}"
    )


def _block_rows(block: Block, pair: Measured, series: tuple[str, ...]) -> list[tuple[Cell, ...]]:
    """Return the rows of one size: its name, then a learning rate's and, where the paper prints it, the paper's."""
    rows, count = recorded(block.study, *pair), counted(block.study, *pair)
    count = count[count["series"].isin(series)]
    counts = count_range(block.study.runs["num_params"])
    head = [(Cell(f"Size = {block.label}", f"{counts} parameters", True), *(Cell(""),) * (2 * len(series)))]
    found: list[tuple[Cell, ...]] = [*head]
    for lr in sorted(set(count["run_lr"])):
        found.append(alpha_row(rows[rows["run_lr"] == lr], count[count["run_lr"] == lr], lr, series))
        found += _printed_row(printed.alpha_max(block, *pair), count[count["run_lr"] == lr], lr, series)
    return found


def _printed_row(table: Frame, count: Frame, lr: float, series: tuple[str, ...]) -> list[tuple[Cell, ...]]:
    """Return the paper's row of a learning rate, of the mechanisms that were swept there; none where it prints none."""
    here = [printed.mechanism_of(name) if name in set(count["series"]) else "" for name in series]
    medians, shares = (
        [printed.value(table, name, lr, column) for name in here] for column in ("median_alpha_max", "percent_stable")
    )
    if all(share is None for share in shares):
        return []
    top = max(share for share in shares if share is not None)
    return [
        (
            Cell(printed.PAPER),
            *(Cell(printed.rate_text(each), bold=each is not None and each > lr) for each in medians),
            *(Cell(printed.percent_text(each), bold=each is not None and each == top > 0) for each in shares),
        )
    ]
