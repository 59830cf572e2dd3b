"""Find the consensus paper's numbers for a grid place, and its Table 9."""

from __future__ import annotations

import math
from dataclasses import replace

from analysis import published
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.ablations import PAPER_HEADINGS, PAPER_PART
from analysis.numbers.step_shares import EARLIEST, TERMINAL
from analysis.paper import printed
from analysis.paper.grid import Block, modality, size
from analysis.sections.ablation import ablation_tables
from analysis.study.load import Frame, Study
from analysis.words import lr_text, value_text

PAPER = "paper"  # label of rows of published numbers
NONE = "—"  # the paper's sign for a missing number
NOTE = (
    f"Rows “{PAPER}”: what “{published.CONSENSUS}” prints for this size and modality (one run each), at the rates and "
    "mechanisms of this report."
)


def nll(block: Block, component: str = "") -> Frame:
    """Return a place's printed NLLs; ``component``: "sequence" or "structure" of a protein, "" for the whole."""
    return _select(published.NLL, block).query("component == @component")


def has_nll(block: Block) -> bool:
    """Return whether the paper prints a place's NLLs."""
    return len(_select(published.NLL, block)) > 0


def mechanism_of(series: str) -> str:
    """Return a series' mechanism without other settings, e.g. sa for "sa", "sa+ca" and "sa (text_mini)".

    "" for a series with its own settings: the paper prints none.
    """
    name, _, rest = series.partition(" ")
    return name.partition("+")[0] if not rest or rest.startswith("(") else ""


def alpha_max(block: Block, phase: str, state: str) -> Frame:
    """Return a place's printed α_max, measured with the paper's own optimizer state.

    Args:
        block: the place.
        phase: terminal or earliest; no rows for others.
        state: "paper"; no rows for others.
    """
    table = _select(published.ALPHA_MAX, block)
    known = state == "paper" and phase in (TERMINAL, EARLIEST)
    return table[(table["phase"] == phase) & known]


def _select(source: published.Source, block: Block) -> Frame:
    table = published.numbers(source)
    return table[(table["modality"] == block.modality) & (table["size"] == block.size)]


def value(table: Frame, mechanism: str, lr: float, column: str) -> float | None:
    """Return a printed number, NaN for a dash; None without such a cell.

    Args:
        table: printed numbers of a place.
        mechanism: the mechanism.
        lr: the learning rate.
        column: the number's column.
    """
    row = table[(table["mechanism"] == mechanism) & ((table["lr"] / lr - 1).abs() < 1e-6)]
    return float(row[column].iloc[0]) if len(row) else None


def nll_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else f"{number:.3f}"


def rate_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else lr_text(number)


def percent_text(number: float | None) -> str:
    return "" if number is None else NONE if math.isnan(number) else f"{number:.0f}"


PRINTED_AT = ("text", "193M")  # Table 9's modality and size
ABLATION_ROWS = {"Validation NLL": "validation_nll", "Generative NLL": "generative_nll", "Model size": "model_size"}


def ablation_tables_beside(study: Study) -> list[Table]:
    """Return a single report's ablation tables, with the paper's rows below its own."""
    sizes = set(study.runs["model"].map(size))
    if (modality(study), *sizes) != PRINTED_AT:
        return ablation_tables(study)
    numbers = published.numbers(published.ABLATION)
    return [
        _add_paper_rows(table, numbers) if table.title == f"Ablation of {PAPER_PART}" else table
        for table in ablation_tables(study)
    ]


def _add_paper_rows(table: Table, numbers: Frame) -> Table:
    """Return a table with the paper's rows below its own."""
    over = [text for text, span in table.groups for _ in range(span)][1:]
    fields = {heading: field for field, heading in PAPER_HEADINGS.items()}
    rows = []
    for row in table.rows:
        rows.append(row)
        column = ABLATION_ROWS.get(row[0].text)
        texts = [
            _printed_text(numbers, fields.get(heading, ""), text, column)
            for heading, text in zip(over, table.header[1:], strict=True)
        ]
        if any(texts):
            rows.append((Cell(f"{row[0].text}, {printed.PAPER}"), *map(Cell, texts)))
    return replace(table, rows=tuple(rows), caption=f"{table.caption} {printed.NOTE}")


def _printed_text(numbers: Frame, field: str, text: str, column: str | None) -> str:
    """Return a printed number in the paper's form: NLLs with four decimals."""
    found = numbers[(numbers["field"] == field) & (numbers["value"].map(int).map(value_text) == text)]
    if column is None or found.empty:
        return ""
    number = found[column].iloc[0]
    return str(number) if column == "model_size" else f"{float(number):.4f}"
