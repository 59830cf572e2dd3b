"""What guards did, and which block broke first, as a report shows them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis.sections import gradients as gradient_plots
from analysis.sections import nll, overview
from analysis.study.load import load
from stability.runs.schema import GRADIENT_COLUMNS, SCHEMA_VERSION
from tests.analysis.synthetic import write_study, write_table

LRS = (1e-3, 1e-2, 1e-1)
BLOCKS = (
    "embedding",
    *(f"blocks.{layer}.{part}" for layer in range(11) for part in ("mixer_norm", "mixer", "ffn_norm", "ffn")),
    "final_norm",
    "head",
)


def guarded_study(folder, **counts):
    """Runs by (mechanism, lr, seed) with the steps that they skipped and their restores."""
    study = write_study(folder, mechanisms=("sa", "sc"), lrs=LRS, nll=lambda *_: 2.0)
    path = study / "results" / "runs.parquet"
    runs = pd.read_parquet(path).assign(skipped_steps=0, restores=0)
    for (mechanism, lr, seed), (skipped, restores) in counts["counts"].items():
        chosen = (runs["mechanism"] == mechanism) & (runs["lr"] == lr) & (runs["seed"] == seed)
        runs.loc[chosen, ["skipped_steps", "restores"]] = skipped, restores
    write_table(path, "runs", runs.to_dict("records"))
    return load(study)


def test_tables_mark_the_runs_that_needed_guards(tmp_path):
    study = guarded_study(tmp_path, counts={("sa", 1e-2, 0): (3, 0), ("sc", 1e-1, 1): (0, 1)})
    (table,) = nll.nll_tables(study)
    marked = {
        (row[0].text, name)
        for row in table.rows
        for name, cell in zip(("sa", "sc"), row[1:], strict=True)
        if "guarded 1/2" in cell.detail
    }
    assert marked == {("1e-2", "sa"), ("1e-1", "sc")}
    note = "Guarded: 2 of 12 runs, in which guards answered what ends a run as diverged (3 skipped steps, 1 restore)."
    trouble = overview.trouble_table(study)
    assert trouble is not None and trouble.title == "Runs that did not end stable by themselves"
    assert [(row[1].text, row[4].text, row[6].text) for row in trouble.rows] == [
        ("sa", "stable", "3 steps skipped"),
        ("sc", "stable", "1 restore"),
    ]
    for each in (table, nll.window_table(study), trouble):
        assert note in each.caption


def test_runs_that_needed_none_are_not_spoken_of(tmp_path):
    for study in (
        guarded_study(tmp_path / "new", counts={}),
        load(write_study(tmp_path / "old", lrs=LRS, nll=lambda *_: 2.0)),
    ):
        assert overview.trouble_table(study) is None
        assert all("uarded" not in table.text() for table in (*nll.nll_tables(study), nll.window_table(study)))


def with_gradients(folder, norm, **options):
    study = write_study(folder, mechanisms=("sa", "sc"), lrs=LRS, **options)
    runs = pd.read_parquet(study / "results" / "runs.parquet")
    rows = [
        {
            "run_id": run.run_id,
            "step": step,
            "block": block,
            "grad_norm": norm(block, step),
            "grad_share": 0.1,
            "update_ratio": 1e-3,
        }
        for run in runs.itertuples()
        for step in range(10, 60, 10)
        for block in BLOCKS
    ]
    table = pa.Table.from_pandas(pd.DataFrame(rows, columns=list(GRADIENT_COLUMNS)), preserve_index=False)
    pq.write_table(
        table.replace_schema_metadata({b"schema_version": str(SCHEMA_VERSION).encode()}),
        study / "results" / "gradients.parquet",
    )
    return load(study)


def test_the_map_shows_each_block_at_each_step_of_the_run_that_broke_first(tmp_path):
    """By a closed form of block and step: 10^(step/10 + index/100), None in the head at step 50."""
    statuses = {("sa", 1e-2, 1): ("diverged", "loss is nan at step 57"), ("sa", 1e-1, 0): ("diverged", "")}
    norm = lambda block, step: None if (block, step) == ("head", 50) else 10 ** (step / 10 + BLOCKS.index(block) / 100)  # noqa: E731
    study = with_gradients(tmp_path, norm, nll=lambda *_: 2.0, statuses=statuses)
    rows = study.with_run(study.signals["gradients"])
    chosen = {name: gradient_plots.find_broken_run(study, name, rows) for name in study.series}
    assert [(run.lr, run.seed, run.status) for run in chosen.values()] == [(1e-2, 1, "diverged"), (1e-1, 0, "stable")]
    blocks, steps, values = gradient_plots.grid(rows[rows["run_id"] == chosen["sa"].run_id])
    assert tuple(blocks) == BLOCKS and steps.tolist() == [10, 20, 30, 40, 50]
    expected = np.array([[step / 10 + index / 100 for step in steps] for index in range(len(BLOCKS))])
    assert math.isnan(values[-1, -1])
    expected[-1, -1] = math.nan
    np.testing.assert_allclose(values, expected)
    figure = gradient_plots.figures(study)[gradient_plots.NAME].figure
    first, second, _ = figure.axes
    assert (
        first.get_title(loc="left") == "sa, LR 1e-2, seed 1: diverged"
        and second.get_title(loc="left") == "sc, LR 1e-1, seed 0: stable"
    )
    np.testing.assert_allclose(first.collections[0].get_array().filled(math.nan).reshape(values.shape), expected)
    labels = [label.get_text() for label in first.get_yticklabels()]
    assert labels[:3] == ["embedding", "0 mixer", "0 ffn"] and len(labels) <= gradient_plots.LABELS


@pytest.mark.parametrize("norm", [lambda *_: None, lambda *_: 0.0])
def test_norms_that_are_all_lost_are_drawn_all_the_same(tmp_path, norm):
    study = with_gradients(tmp_path, norm, nll=lambda *_: 2.0)
    drawn = gradient_plots.figures(study)[gradient_plots.NAME]
    drawn.figure.savefig(tmp_path / "lost.pdf")
    assert "block of parameters before clipping" in drawn.caption


def test_a_study_without_gradients_has_no_map(tmp_path):
    study = load(write_study(tmp_path, lrs=LRS))
    assert gradient_plots.figures(study) == {}
