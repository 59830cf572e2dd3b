"""Tabulate NLLs and α_max as in the consensus paper's Tables 2 to 8.

NLLs (Tables 2 to 4): mechanism by learning rate, validation beside generative, a block for each size and, for a sum,
each of its parts. α_max: Tables 5 to 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.drawing.tables import chunks, guarded_note, narrow
from analysis.drawing.typeset import Cell, Table
from analysis.measures import CELL_RULE, NLL_TITLES, best_rate, nll_cell
from analysis.numbers.step_shares import (
    LAST,
    PHASES,
    count_stable_steps,
    phases_and_states,
    recorded_steps,
    series_with_results,
)
from analysis.numbers.windows import GENERATIVE, VALIDATION
from analysis.paper import printed
from analysis.paper.grid import Block, join_runs, join_texts, modality_text
from analysis.sections.alpha_tables import ALPHA_COLUMNS, CELLS, alpha_row, counting_rule, make_table
from analysis.sections.components import parts_of
from analysis.study import wording
from analysis.study.load import Frame, phase_rank
from analysis.study.protocol import base_rates, describe_protocol_in, state_text
from analysis.words import count_range, lr_text

WIDE = 6  # largest number of columns with an interval on one line
RATES_BESIDE, RATES_ALONE = 5, 9  # learning rates in a page's width, with and without generative NLLs
PRINTED = {VALIDATION: "validation_nll", GENERATIVE: "generative_nll"}


def nll_tables(modality: str, blocks: Sequence[Block]) -> list[Table]:
    """Return one modality's tables: over all sizes if their rates fit the page's width, else by size.

    Further rates continue in another table.
    """
    columns = [VALIDATION, *([GENERATIVE] if any(_has_one_oracle(block) for block in blocks) else [])]
    lrs = sorted({float(lr) for block in blocks for lr in block.study.runs["lr"]})
    room = RATES_BESIDE if len(columns) > 1 else RATES_ALONE
    if len(lrs) > room and len(blocks) > 1:
        return [table for block in blocks for table in nll_tables(modality, [block])]
    parts = [tuple(map(float, part)) for part in chunks([repr(lr) for lr in lrs], room)]
    return [_table(modality, blocks, part, columns, number) for number, part in enumerate(parts)]


def oracles(block: Block) -> list[str]:
    """List the oracles that scored a place's generations."""
    runs = block.study.runs
    return sorted({name or "not recorded" for name in runs.loc[np.isfinite(runs["gen_nll"]), "gen_oracle"]})


def _has_one_oracle(block: Block) -> bool:
    return len(oracles(block)) == 1


def _table(
    modality: str, blocks: Sequence[Block], lrs: tuple[float, ...], columns: Sequence[str], number: int
) -> Table:
    """Return the table of some learning rates; ``number`` is its index within the modality."""
    rows = [row for block in blocks for row in _block_rows(block, lrs, columns)]
    shown = [block for block in blocks if set(block.study.runs["lr"]) & set(lrs)]
    place = shown[0].title if len(shown) == 1 else modality_text(modality)
    title = f"{place}: validation{' and generative' if len(columns) > 1 else ''} NLL by mechanism"
    groups = (("", 1), *((NLL_TITLES[column], len(lrs)) for column in columns))
    names = [lr_text(lr) for lr in lrs] * len(columns)
    widths = ("auto", *("1fr",) * len(names))
    caption = _caption(shown, columns)
    return Table(
        f"{title}, continued" if number else title, caption, ("mechanism", *names), tuple(rows), groups, (), widths
    )


def _caption(blocks: Sequence[Block], columns: Sequence[str]) -> str:
    """Return the cells' meaning and the oracle, once for all sizes if equal; the table of studies has the data."""
    units = join_texts({block.label: wording.words(block.study).unit.capitalize() + "." for block in blocks})
    text = (
        f"{units} Median over the seeds that finished, at the end of training. "
        f"{CELL_RULE} Bold: the best learning rate of each row. "
        "--: no run, or none with a result."
    )
    if len(columns) > 1:
        names = {
            block.label: f"oracle {name}." for block in blocks if _has_one_oracle(block) for name in oracles(block)
        }
        text += f" Generative NLL: {join_texts(names)} A low one is no proof of good samples: repetition scores low."
    several = [block.label for block in blocks if len(oracles(block)) > 1]
    text += f" Scored by several oracles, and left to their own reports: {', '.join(several)}." if several else ""
    if any(map(printed.has_nll, blocks)):
        text += f" {printed.NOTE}"
    guarded = join_texts({block.label: guarded_note(block.study).strip() for block in blocks})
    return " ".join(filter(None, (text, guarded)))


def _block_rows(block: Block, lrs: Sequence[float], columns: Sequence[str]) -> list[tuple[Cell, ...]]:
    """Return one size's rows: its name, then each mechanism's, for the whole NLL and each of its parts."""
    runs = block.study.runs
    if not set(runs["lr"]) & set(lrs):
        return []
    parts = [
        name for name, column in parts_of(runs, VALIDATION).items() if np.isfinite(runs[column].to_numpy(float)).any()
    ]
    rows = []
    for part in ("", *parts):
        name = f"Size = {block.label}" + (f", {part}" if part else ", total" if parts else "")
        blank = (Cell(""),) * (len(lrs) * len(columns))
        rows.append((Cell(name, "" if part else wording.count_parameters(runs), True), *blank))
        for series in block.study.series:
            rows += _series_rows(block, series, part, lrs, columns)
    return rows


def _series_rows(
    block: Block, series: str, part: str, lrs: Sequence[float], columns: Sequence[str]
) -> list[tuple[Cell, ...]]:
    """Return a mechanism's own row and, if printed, the paper's."""
    runs = block.study.of(series)
    cells = [cell for column in columns for cell in _cells(block, series, part, lrs, column)]
    rows = [(Cell(series), *(cells if len(cells) <= WIDE else map(narrow, cells)))]
    table, mechanism = printed.nll(block, part), printed.mechanism_of(series)
    texts = [
        printed.nll_text(printed.value(table, mechanism, lr, PRINTED[column]) if lr in set(runs["lr"]) else None)
        for column in columns
        for lr in lrs
    ]
    if any(texts):
        rows.append((Cell(f"{series}, {printed.PAPER}"), *map(Cell, texts)))
    return rows


def _cells(block: Block, series: str, part: str, lrs: Sequence[float], whole: str) -> list[Cell]:
    """Return one half of a row; generations scored by several oracles have no common number."""
    column, runs = f"{whole}_{part}" if part else whole, block.study.of(series)
    if (whole == GENERATIVE and not _has_one_oracle(block)) or column not in runs:
        return [Cell("--")] * len(lrs)
    best = best_rate(block.study, series, column)
    return [nll_cell(runs, lr, best == lr, column) for lr in lrs]


Measured = tuple[str, str]  # phase and state


def list_measured(blocks: Sequence[Block]) -> list[Measured]:
    """Return the places' measured phases and states: terminal before earliest, paper before checkpoint.

    Last checkpoints of runs with an early end are left to the studies' reports: their steps all differ.
    """
    pairs = {pair for block in blocks for pair in phases_and_states(block.study) if pair[0] != LAST}
    return sorted(pairs, key=lambda pair: (phase_rank(pair[0]), pair[1] != "paper", pair[1]))


def alpha_tables(parts: Mapping[str, Sequence[Block]]) -> list[Table]:
    """Return each modality's tables: one for each phase, state and at most four mechanisms."""
    asked = [
        (modality, blocks, pair, series)
        for modality, blocks in parts.items()
        for pair in list_measured(blocks)
        for series in chunks(_series(blocks, pair), ALPHA_COLUMNS)
        if series
    ]
    return [_alpha_table(*each, is_first=number == 0) for number, each in enumerate(asked)]


def _series(blocks: Sequence[Block], pair: Measured) -> list[str]:
    """Return the series with a result in some place, in a single report's order."""
    found = {
        name for block in blocks for name in series_with_results(block.study, count_stable_steps(block.study, *pair))
    }
    return [name for name in join_runs(blocks).series if name in found]


def _alpha_table(
    modality: str, blocks: Sequence[Block], pair: Measured, series: tuple[str, ...], is_first: bool
) -> Table:
    phase, state = pair
    shown = [
        block
        for block in blocks
        if set(series_with_results(block.study, count_stable_steps(block.study, *pair))) & set(series)
    ]
    rows = [row for block in shown for row in _alpha_rows(block, pair, series)]
    title = (
        f"{modality_text(modality)}: median α_max and % stable steps, {state_text(state)}, {PHASES.get(phase, phase)}"
    )
    return make_table(title, _alpha_caption(shown, pair, series, is_first), series, tuple(rows))


def _alpha_caption(blocks: Sequence[Block], pair: Measured, series: Sequence[str], is_first: bool) -> str:
    """Return a single report's caption, once for all places if equal; the first table's explains the cells."""
    told: dict[str, list[str]] = {}
    for block in blocks:
        rows = recorded_steps(block.study, *pair)
        shown = rows[rows["series"].isin(series)]
        rule = counting_rule(block.study, rows, pair[0])
        told[block.label] = [rule + ".", describe_protocol_in(block.study, shown, pair[1]) + base_rates(block.study)]
    rules, protocols = (join_texts({size: texts[index] for size, texts in told.items()}) for index in (0, 1))
    note = f" {printed.NOTE}" if any(len(printed.alpha_max(block, *pair)) for block in blocks) else ""
    cells = f"{CELLS}; survivors: the share without runs that diverged." if is_first else "Cells: as above."
    return f"{cells} {rules}{note} {protocols}"


def _alpha_rows(block: Block, pair: Measured, series: tuple[str, ...]) -> list[tuple[Cell, ...]]:
    """Return one size's rows: its name, then each learning rate's and, if printed, the paper's."""
    rows, count = recorded_steps(block.study, *pair), count_stable_steps(block.study, *pair)
    count = count[count["series"].isin(series)]
    counts = count_range(block.study.runs["num_params"])
    head = [(Cell(f"Size = {block.label}", f"{counts} parameters", True), *(Cell(""),) * (2 * len(series)))]
    found: list[tuple[Cell, ...]] = [*head]
    for lr in sorted(set(count["run_lr"])):
        found.append(alpha_row(rows[rows["run_lr"] == lr], count[count["run_lr"] == lr], lr, series))
        found += _printed_row(printed.alpha_max(block, *pair), count[count["run_lr"] == lr], lr, series)
    return found


def _printed_row(table: Frame, count: Frame, lr: float, series: tuple[str, ...]) -> list[tuple[Cell, ...]]:
    """Return the paper's row of a learning rate for its swept mechanisms; none if not printed."""
    here = [printed.mechanism_of(name) if name in set(count["series"]) else "" for name in series]
    medians, shares = (
        [printed.value(table, name, lr, column) for name in here] for column in ("median_alpha_max", "percent_stable")
    )
    if all(share is None for share in shares):
        return []
    top = max(share for share in shares if share is not None)
    left = [Cell(printed.rate_text(each), bold=each is not None and each > lr) for each in medians]
    right = [Cell(printed.percent_text(each), bold=each is not None and each == top > 0) for each in shares]
    return [(Cell(printed.PAPER), *left, *right)]
