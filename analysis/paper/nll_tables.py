"""Tabulate NLLs as the consensus paper's Tables 2 to 4: mechanism by learning rate, validation beside generative, a
block for each size and, where the NLL is a sum, for each of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.drawing.tables import chunks, guarded_note, narrow, source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import INTERVAL_RULE, POSITIVE, REAL
from analysis.numbers.windows import GENERATIVE, VALIDATION
from analysis.paper import printed
from analysis.paper.grid import Block, modality_text, told_once
from analysis.sections.components import parts_of
from analysis.sections.nll import best_rate, nll_cell
from analysis.study import wording
from analysis.words import count_range, lr_text

WIDE = 6  # columns beside which an interval still fits on one line
RATES_BESIDE, RATES_ALONE = 5, 9  # learning rates that fit a page's width, with generative NLLs beside and without
PRINTED = {VALIDATION: "validation_nll", GENERATIVE: "generative_nll"}


def nll_tables(modality: str, blocks: Sequence[Block]) -> list[Table]:
    """Return the tables of one modality: of all sizes where a page is wide enough for their learning rates, else of
    each size, whose rates are then its own; of as many rates each as fit."""
    columns = [VALIDATION, *([GENERATIVE] if any(_scored(block) for block in blocks) else [])]
    lrs = sorted({float(lr) for block in blocks for lr in block.study.runs["lr"]})
    room = RATES_BESIDE if len(columns) > 1 else RATES_ALONE
    if len(lrs) > room and len(blocks) > 1:
        return [table for block in blocks for table in nll_tables(modality, [block])]
    parts = [tuple(map(float, part)) for part in chunks([repr(lr) for lr in lrs], room)]
    return [_table(modality, blocks, part, columns, number) for number, part in enumerate(parts)]


def oracles(block: Block) -> list[str]:
    """List by whom the generations of a place were scored."""
    runs = block.study.runs
    return sorted({name or "not recorded" for name in runs.loc[np.isfinite(runs["gen_nll"]), "gen_oracle"]})


def _scored(block: Block) -> bool:
    return len(oracles(block)) == 1


def _table(
    modality: str, blocks: Sequence[Block], lrs: tuple[float, ...], columns: Sequence[str], number: int
) -> Table:
    """Return the table of some learning rates, ``number``: the how-manieth of its modality."""
    rows = [row for block in blocks for row in _block_rows(block, lrs, columns)]
    shown = [block for block in blocks if set(block.study.runs["lr"]) & set(lrs)]
    place = shown[0].title if len(shown) == 1 else modality_text(modality)
    title = f"{place}: validation{' and generative' if len(columns) > 1 else ''} NLL by mechanism"
    heads = {VALIDATION: "Validation NLL", GENERATIVE: "Generative NLL"}
    groups = (("", 1), *((heads[column], len(lrs)) for column in columns))
    names = [lr_text(lr) for lr in lrs] * len(columns)
    widths = ("auto", *("1fr",) * len(names))
    caption = _caption(shown, columns)
    return Table(
        f"{title}, continued" if number else title, caption, ("mechanism", *names), tuple(rows), groups, (), widths
    )


def _caption(blocks: Sequence[Block], columns: Sequence[str]) -> str:
    """Return what the cells are, by whom samples were scored, and of which data; once for all sizes where they
    agree."""
    units = told_once({block.label: wording.unit(block.study).capitalize() + "." for block in blocks})
    text = (
        f"{units} Median over the seeds that finished, at the end of training. "
        f"{INTERVAL_RULE}; below it the runs that ended badly. Bold: the best learning rate of each row. "
        "--: no run, or none with a result."
    )
    if len(columns) > 1:
        names = {block.label: f"oracle {name}." for block in blocks if _scored(block) for name in oracles(block)}
        text += f" Generative NLL: {told_once(names)} A low one is no proof of good samples: repetition scores low."
    several = [block.label for block in blocks if len(oracles(block)) > 1]
    text += f" Scored by several oracles, and left to their own reports: {', '.join(several)}." if several else ""
    if any(map(printed.has_nll, blocks)):
        text += f" {printed.NOTE}"
    guarded = told_once({block.label: guarded_note(block.study).strip() for block in blocks})
    sources = told_once({block.label: source(block.study) for block in blocks})
    return " ".join(filter(None, (text, guarded, sources)))


def _block_rows(block: Block, lrs: Sequence[float], columns: Sequence[str]) -> list[tuple[Cell, ...]]:
    """Return the rows of one size: its name, then each mechanism's, for the whole NLL and each of its parts."""
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
        rows.append((Cell(name, "" if part else f"{count_range(runs['num_params'])} parameters", True), *blank))
        for series in block.study.series:
            rows += _series_rows(block, series, part, lrs, columns)
    return rows


def _series_rows(
    block: Block, series: str, part: str, lrs: Sequence[float], columns: Sequence[str]
) -> list[tuple[Cell, ...]]:
    """Return a mechanism's own row and, where the paper prints any of its numbers, the paper's."""
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
    """Return one half of a row. Generations that several oracles scored have no common number."""
    column, runs = f"{whole}_{part}" if part else whole, block.study.of(series)
    if (whole == GENERATIVE and not _scored(block)) or column not in runs:
        return [Cell("--")] * len(lrs)
    best = best_rate(block.study, series, column)
    scale = POSITIVE if whole == GENERATIVE or part else REAL  # as the tables of a single study have them
    return [nll_cell(runs, lr, best == lr, column, scale) for lr in lrs]
