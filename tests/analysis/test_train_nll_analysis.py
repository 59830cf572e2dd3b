"""NLLs of training windows: medians, the mean gap with its paired interval, and the report's part."""

from __future__ import annotations

import pandas as pd
from pypdf import PdfReader

from analysis.report import build
from analysis.sections.train_nll import TABLES, brief
from analysis.study.load import load
from stability.runs import results
from stability.runs.words import Words
from tests.analysis.synthetic import write_study

LRS = (1e-3, 1e-2)


def row_of(run):
    """sa's gap is 0.1, 0.2, 0.3 by seed, sc's −0.01."""
    gap = 0.1 * (1 + run.seed) if run.mechanism == "sa" else -0.01
    nll = 2.0 + 0.25 * run.seed
    return {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "sequences": 1024, "train_nll": nll - gap,
            "nll": nll, "difference": gap}  # fmt: skip


def study_with(tmp_path):
    folder = write_study(tmp_path, name="probed", mechanisms=["sa", "sc"], lrs=LRS, seeds=3)
    runs = pd.read_parquet(folder / "results" / "runs.parquet")
    frame = pd.DataFrame([row_of(run) for run in runs.itertuples()], columns=results.PROBE_COLUMNS["train_nll"])
    version = {"schema_version": str(results.SCHEMA_VERSION)}
    results.write_parquet(frame, folder / "results" / "train_nll.parquet", version)
    return folder


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_the_table_has_medians_and_the_interval_of_the_gap(tmp_path):
    (table,) = TABLES.of_study(load(study_with(tmp_path)))
    assert table.header == ("mechanism", "LR", "training", "validation", "gap")
    assert cells(table) == [
        ["sa", "1e-3", "2.050", "2.250", "+0.2000"],
        ["sa", "1e-2", "2.050", "2.250", "+0.2000"],
        ["sc", "1e-3", "2.260", "2.250", "-0.0100"],
        ["sc", "1e-2", "2.260", "2.250", "-0.0100"],
    ]
    # 0.2 ± t(2)·0.1/√3 with t = 4.303
    assert table.rows[0][4].detail == "-0.0484 to +0.4484, n=3"
    assert "on 1,024 windows of the training side" in table.caption


def test_one_runs_table_needs_no_study(tmp_path):
    frame = pd.read_parquet(study_with(tmp_path) / "results" / "train_nll.parquet")
    (table,) = TABLES.of_run({"train_nll": frame.iloc[:1]}, "sa", Words(unit="nats per residue"))
    assert cells(table) == [["sa", "1e-3", "1.900", "2.000", "+0.1000"]]
    assert table.caption.startswith("Nats per residue of one model on")


def test_a_short_report_has_each_series_at_its_own_best_rate(tmp_path):
    study = load(study_with(tmp_path))
    best = {"sa": min(LRS), "sc": max(LRS)}
    study.runs["val_nll"] = [2.0 + (best[run.series] != run.lr) for run in study.runs.itertuples()]
    (_, table) = brief(study, {})
    assert [row[:2] for row in cells(table)] == [["sa", "1e-3"], ["sc", "1e-2"]]


def test_the_report_shows_the_table(tmp_path, drawn):
    drawn("train_nll")
    text = " ".join(
        "".join(page.extract_text() for page in PdfReader(build(study_with(tmp_path), tmp_path)).pages).split()
    )
    assert "Generalisation gap, terminal checkpoint" in text and "+0.2000" in text
