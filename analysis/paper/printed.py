"""Find what the consensus paper prints of a place in the grid, for it to stand beside a study's own numbers."""

from __future__ import annotations

import math

from analysis import published
from analysis.numbers.step_shares import EARLIEST, TERMINAL
from analysis.paper.grid import Block
from analysis.study.load import Frame
from analysis.words import lr_text

PAPER = "paper"  # as rows of published numbers are named
NONE = "—"  # what the paper prints where it has no number
NOTE = (
    f"Rows “{PAPER}”: what “{published.CONSENSUS}” prints for this size and modality (one run each), at the rates and "
    "mechanisms of this report."
)


def nll(block: Block, component: str = "") -> Frame:
    """Return the printed NLLs of a place; ``component``: "sequence" or "structure" of a protein, "" of the whole."""
    return _of(published.NLL, block).query("component == @component")


def has_nll(block: Block) -> bool:
    """Return whether the paper prints NLLs of a place."""
    return len(_of(published.NLL, block)) > 0


def mechanism_of(series: str) -> str:
    """Return the mechanism that a series is, where it is nothing else, e.g. sa of "sa", "sa+ca" and "sa (text_mini)";
    "" of one with settings of its own, which the paper does not print."""
    name, _, rest = series.partition(" ")
    return name.partition("+")[0] if not rest or rest.startswith("(") else ""


def alpha_max(block: Block, phase: str, state: str) -> Frame:
    """Return the printed α_max of a place's checkpoints, which are of the paper's own optimizer state alone."""
    table = _of(published.ALPHA_MAX, block)
    known = state == "paper" and phase in (TERMINAL, EARLIEST)
    return table[(table["phase"] == phase) & known]


def _of(source: published.Source, block: Block) -> Frame:
    table = published.numbers(source)
    return table[(table["modality"] == block.modality) & (table["size"] == block.size)]


def value(table: Frame, mechanism: str, lr: float, column: str) -> float | None:
    """Return a printed number, NaN where the paper prints a dash; None where it has no such cell."""
    row = table[(table["mechanism"] == mechanism) & ((table["lr"] / lr - 1).abs() < 1e-6)]
    return float(row[column].iloc[0]) if len(row) else None


def nll_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else f"{number:.3f}"


def rate_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else lr_text(number)


def percent_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else f"{number:.0f}"
