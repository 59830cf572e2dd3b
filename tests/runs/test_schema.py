"""The columns of a study's files: one list, which the writer fills and the reader asks for."""

from __future__ import annotations

import ast
from pathlib import Path

import pandas as pd
import pytest

from analysis.study.load import load
from stability.runs import schema
from stability.runs.results import Results, write, write_graphs
from tests.analysis.synthetic import write_study

EVERY = {name: columns for tables in (schema.REQUIRED, *schema.OPTIONAL.values()) for name, columns in tables.items()}


def test_the_schema_imports_nothing():
    """Analysis imports it, and may import nothing else of stability."""
    tree = ast.parse(Path(schema.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_every_table_has_a_name_and_columns_of_its_own_and_every_type_is_of_one():
    assert len(EVERY) == len(schema.REQUIRED) + sum(map(len, schema.OPTIONAL.values()))
    assert all(len(columns) == len(set(columns)) for columns in EVERY.values())
    named = {column for columns in EVERY.values() for column in columns}
    assert named >= schema.TEXT and named >= schema.WHOLE and not schema.TEXT & schema.WHOLE


@pytest.mark.parametrize("name", [name for name in EVERY if name not in schema.REQUIRED])
def test_every_further_table_is_written_and_read_with_its_columns_and_types(tmp_path, name):
    """A row of ones and of the text "1": the schema decides what a column holds, not what stands in the file."""
    study = write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3], seeds=1)
    empty = {each: pd.DataFrame(columns=columns) for each, columns in schema.REQUIRED.items()}
    row = pd.DataFrame([{column: "1" if column in schema.TEXT else 1 for column in EVERY[name]}])
    if name in schema.GRAPH_COLUMNS:
        write_graphs(name, row, study / "results")
    else:
        runs = pd.read_parquet(study / "results" / "runs.parquet")
        write(Results(**(empty | {"runs": runs}), probes={name: row}), study / "results")
    (field,) = [field for field, tables in schema.OPTIONAL.items() if name in tables]
    found = getattr(load(study), field)[name]
    assert list(found.columns) == EVERY[name] and len(found) == 1
    for column in found:
        assert found[column].tolist() == (["1"] if column in schema.TEXT else [1.0])
