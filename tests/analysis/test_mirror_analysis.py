"""Mirrored NLLs: medians and paired intervals over seeds, the figure, the report's part."""

from __future__ import annotations

import pandas as pd
import pytest
from pypdf import PdfReader

from analysis.report import build
from analysis.sections.mirror import TABLES, brief, figures, phase_figures
from analysis.study.load import load
from stability.runs import results
from stability.runs.words import Words
from tests.analysis.synthetic import write_study

LRS = (1e-3, 1e-2)


def row_of(run, phase="terminal"):
    """sa loses 0.5, 0.6, 0.7, … by seed, sc nothing."""
    difference = 0.5 + 0.1 * run.seed if run.mechanism == "sa" else 0.0
    nll = 2.0 + 0.25 * run.seed
    return {
        "run_id": run.run_id, "phase": phase, "lr": run.lr, "sequences": 1024, "nll": nll,
        "mirrored_nll": nll + difference, "difference": difference,
    }  # fmt: skip


def study_with(tmp_path, seeds=3, lrs=LRS, leave_out=()):
    folder = write_study(tmp_path, name=f"probed{seeds}", mechanisms=["sa", "sc"], lrs=lrs, seeds=seeds)
    runs = pd.read_parquet(folder / "results" / "runs.parquet")
    found = [row_of(run) for run in runs.itertuples() if (run.mechanism, run.lr, run.seed) not in leave_out]
    frame = pd.DataFrame(found, columns=results.PROBE_COLUMNS["mirror"])
    version = {"schema_version": str(results.SCHEMA_VERSION)}
    results.write_parquet(frame, folder / "results" / "mirror.parquet", version)
    return folder


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_the_table_has_medians_and_the_interval_of_the_paired_difference(tmp_path):
    (table,) = TABLES.of_study(load(study_with(tmp_path)))
    assert table.header == ("mechanism", "LR", "NLL", "read backwards", "difference")
    assert cells(table) == [
        ["sa", "1e-3", "2.250", "2.850", "+0.6000"],
        ["sa", "1e-2", "2.250", "2.850", "+0.6000"],
        ["sc", "1e-3", "2.250", "2.250", "+0.0000"],
        ["sc", "1e-2", "2.250", "2.250", "+0.0000"],
    ]
    # 0.6 ± t(2)·0.1/√3 with t = 4.303
    assert table.rows[0][4].detail == "+0.3516 to +0.8484, n=3"
    assert "on the run's 1,024 held-out examples" in table.caption


def test_a_run_that_was_not_measured_is_not_counted(tmp_path):
    (table,) = TABLES.of_study(load(study_with(tmp_path, leave_out={("sa", 1e-3, 0), ("sa", 1e-3, 2)})))
    assert [cell.detail for cell in table.rows[0][2:]] == ["n=1"] * 3 and cells(table)[0][4] == "+0.6000"


def test_a_difference_that_rounds_to_zero_has_no_minus():
    rows = pd.DataFrame({"run_id": "a", "phase": "terminal", "lr": 1e-3, "sequences": 8, "nll": 2.0,
                         "mirrored_nll": 2.0, "difference": [-3e-7]})  # fmt: skip
    (table,) = TABLES.of_run({"mirror": rows}, "sc", Words())
    assert cells(table)[0][-1] == "+0.0000"


def test_one_runs_table_needs_no_study(tmp_path):
    frame = pd.read_parquet(study_with(tmp_path, 1) / "results" / "mirror.parquet")
    (table,) = TABLES.of_run(
        {"mirror": frame[frame.run_id == frame.run_id.iloc[0]]}, "sa", Words(unit="nats per residue")
    )
    assert cells(table) == [["sa", "1e-3", "2.000", "2.500", "+0.5000"]]
    assert table.caption.startswith("Nats per residue on the run's")


def test_the_figure_has_a_line_a_series_and_a_point_a_seed(tmp_path):
    study = load(study_with(tmp_path))
    assert set(figures(study)) == {"mirror-terminal-0"}
    (figure,) = phase_figures(study, "terminal")
    lines = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert lines[0] == pytest.approx([0.6, 0.6]) and sorted(lines[1]) == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.7, 0.7])
    assert lines[2] == [0.0, 0.0] and lines[3] == [0.0] * 6


def test_a_short_report_has_each_series_at_its_own_best_rate(tmp_path):
    study = load(study_with(tmp_path))
    best = {"sa": min(LRS), "sc": max(LRS)}
    nll = {(name, lr): 2.0 if lr == rate else 2.5 for name, rate in best.items() for lr in LRS}
    study.runs["val_nll"] = [nll[name, lr] for name, lr in zip(study.runs["series"], study.runs["lr"], strict=True)]
    (_, table) = brief(study, {})
    assert [row[:2] for row in cells(table)] == [["sa", "1e-3"], ["sc", "1e-2"]]


def test_a_single_learning_rate_makes_a_table_and_no_figure(tmp_path):
    study = load(study_with(tmp_path, lrs=(1e-3,)))
    assert figures(study) == {} and len(TABLES.of_study(study)) == 1


def test_the_report_shows_figure_and_table(tmp_path, drawn):
    drawn("mirror")
    pages = PdfReader(build(study_with(tmp_path), tmp_path)).pages
    text = " ".join("".join(page.extract_text() for page in pages).split())
    for words in (
        "A text and its mirror image",
        "NLL of mirrored examples, terminal checkpoint",
        "NLL of the held-out examples read backwards less that of the same examples",
    ):
        assert words in text
    assert "What the layers do to their signal" not in text, "nothing stands under that heading"


def test_without_the_probe_the_report_has_no_such_section(tmp_path):
    study = load(write_study(tmp_path, name="bare", mechanisms=["sa"], lrs=LRS, seeds=1))
    assert TABLES.of_study(study) == [] and figures(study) == {}
