"""Put the consensus paper's Table 9 beside a study's own ablation, where the study is of the same size."""

from __future__ import annotations

from dataclasses import replace

from analysis import published
from analysis.drawing.typeset import Cell, Table
from analysis.paper import printed
from analysis.paper.grid import modality, size
from analysis.sections.ablation import PAPER_HEADINGS, PAPER_PART, ablation_tables
from analysis.study.load import Frame, Study
from analysis.words import value_text

PRINTED_AT = ("text", "193M")  # Table 9's modality and size
ROWS = {"Validation NLL": "validation_nll", "Generative NLL": "generative_nll", "Model size": "model_size"}


def tables(study: Study) -> list[Table]:
    """Return the ablation's tables of a single report, under each row the paper's where it prints one."""
    sizes = set(study.runs["model"].map(size))
    if (modality(study), *sizes) != PRINTED_AT:
        return ablation_tables(study)
    numbers = published.numbers(published.ABLATION)
    return [
        _beside(table, numbers) if table.title == f"Ablation of {PAPER_PART}" else table
        for table in ablation_tables(study)
    ]


def _beside(table: Table, numbers: Frame) -> Table:
    """Return a table with the paper's rows below its own."""
    over = [text for text, span in table.groups for _ in range(span)][1:]
    fields = {heading: field for field, heading in PAPER_HEADINGS.items()}
    rows = []
    for row in table.rows:
        rows.append(row)
        column = ROWS.get(row[0].text)
        texts = [
            _printed(numbers, fields.get(heading, ""), text, column)
            for heading, text in zip(over, table.header[1:], strict=True)
        ]
        if any(texts):
            rows.append((Cell(f"{row[0].text}, {printed.PAPER}"), *map(Cell, texts)))
    return replace(table, rows=tuple(rows), caption=f"{table.caption} {printed.NOTE}")


def _printed(numbers: Frame, field: str, text: str, column: str | None) -> str:
    """Return a printed number as the paper has it: NLLs in four digits behind the point."""
    found = numbers[(numbers["field"] == field) & (numbers["value"].map(int).map(value_text) == text)]
    if column is None or found.empty:
        return ""
    number = found[column].iloc[0]
    return str(number) if column == "model_size" else f"{float(number):.4f}"
