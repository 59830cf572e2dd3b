"""`what=lengths` in a report: planted changes of the NLL give their verdicts, table and figure."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader
from scipy import stats

from analysis.claims.judging import judge
from analysis.report import build
from analysis.sections.lengths import TABLES, figures
from analysis.study.load import COLUMNS, load
from stability.runs.words import Words
from tests.analysis.synthetic import write_study, write_table

LRS = (1e-3, 1e-2)
NOISE = {0: 0.002, 1: -0.003, 2: 0.001}  # nats, by seed
CHANGE = {"sa": -0.1, "sw": 0.5, "sc": math.nan}  # of twice the length; sc has a table of 64 positions


def study_with(folder, *, seeds=3, phases=("terminal",)):
    """The best rate is 1e-3, the other one has a change of 9 nats more."""
    folder = write_study(folder, mechanisms=list(CHANGE), lrs=LRS, seeds=seeds, nll=lambda m, lr, seed: 2.0 + 10 * lr)
    rows = []
    for run in pd.read_parquet(folder / "results" / "runs.parquet").itertuples():
        for phase in phases:
            for multiple in (2, 4):
                change = CHANGE[run.mechanism] * multiple / 2 + NOISE[run.seed] + 9 * (run.lr > 5e-3)
                rows.append({
                    "run_id": run.run_id, "phase": phase, "lr": run.lr, "multiple": multiple, "sequences": 78,
                    "limit": 64 if run.mechanism == "sc" else math.nan, "nll": 2.5 + 0.1 * run.seed,
                    "long_nll": 2.5 + 0.1 * run.seed + change, "difference": change,
                })  # fmt: skip
    write_table(folder / "results" / "lengths.parquet", "lengths", pd.DataFrame(rows, columns=COLUMNS["lengths"]))
    return folder


def claims_of(study):
    return {each.subject: each for each in judge(study) if each.subject.startswith("lengths ")}


def test_verdicts_are_those_of_student_s_t_at_the_best_rate(tmp_path):
    found = claims_of(load(study_with(tmp_path)))
    assert list(found) == [f"lengths {name} {multiple}" for name in ("sa", "sc", "sw") for multiple in (2, 4)]
    values = [-0.1 + NOISE[seed] for seed in range(3)]
    two = found["lengths sa 2"]
    assert two.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue) and two.differences == pytest.approx(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert two.interval == f"95 %: −{-low:.3f} to −{-high:.3f} nats" and two.effect == "−0.100 nats"
    assert found["lengths sa 4"].verdict == "holds" and found["lengths sa 4"].effect == "−0.200 nats"
    assert {found[f"lengths sw {multiple}"].verdict for multiple in (2, 4)} == {"contradicted"}
    assert found["lengths sc 2"].verdict == "not judged" and "since it has 64 positions" in found["lengths sc 2"].text


def test_two_seeds_indicate_and_one_claims_nothing(tmp_path):
    two = claims_of(load(study_with(tmp_path / "two", seeds=2)))["lengths sw 2"]
    assert two.text.startswith("Indicated against (n = 2): sw: text of 2 times the trained length, at 1e-3, changes")
    one = claims_of(load(study_with(tmp_path / "one", seeds=1)))["lengths sw 2"]
    assert one.verdict == "no claim" and one.interval == "" and math.isnan(one.p)


def test_the_table_has_every_rate_and_says_which_scheme_cannot(tmp_path):
    study = load(study_with(tmp_path, phases=("terminal", "earliest")))
    first, second = TABLES.of_study(study)
    assert first.title == "ΔNLL of longer texts, terminal checkpoint" and "earliest" in second.title
    assert first.header == ("mechanism", "LR", "NLL", "2 times", "4 times") and len(first.rows) == 6
    cells = {(row[0].text, row[1].text): [cell.text for cell in row[2:]] for row in first.rows}
    assert cells["sa", "1e-3"] == ["2.600", "-0.1000", "-0.2000"]  # as the claims say
    assert cells["sw", "1e-2"] == ["2.600", "+9.5000", "+10.0000"]
    assert cells["sc", "1e-3"] == ["2.600", "cannot: 64 positions", "cannot: 64 positions"]


def test_the_figure_starts_at_the_trained_length_and_has_no_line_beyond_a_limit(tmp_path):
    (ax,) = figures(load(study_with(tmp_path)))["lengths"].figure.axes
    lines = {line.get_color(): line for line in ax.lines if line.get_marker() in ("None", "", None)}
    points = [[*zip(line.get_xdata(), line.get_ydata(), strict=True)] for line in lines.values()]
    assert [(1.0, 2.6), (2.0, 2.497), (4.0, 2.397)] in [[(x, round(y, 9)) for x, y in line] for line in points]
    assert sorted(sum(math.isfinite(y) for _, y in line) for line in points) == [1, 3, 3]


def test_the_report_shows_verdicts_figure_and_table(tmp_path, drawn):
    drawn("lengths")
    pages = PdfReader(build(study_with(tmp_path), tmp_path)).pages
    text = " ".join("".join(page.extract_text() for page in pages).split())
    for words in ("Texts longer than in training", "ΔNLL of longer texts", "sa: text of 2 times the trained length"):
        assert words in text


def test_one_run_has_a_table_of_its_own(tmp_path):
    rows = pd.read_parquet(study_with(tmp_path) / "results" / "lengths.parquet").iloc[:2]
    (table,) = TABLES.of_run({"lengths": rows}, "sa", Words())
    assert "One run." in table.caption and [cell.text for cell in table.rows[0]][:2] == ["sa", "1e-3"]
