"""What the report says of `search=pbt`, from a study with made-up numbers."""

import json

import matplotlib
import pytest

from analysis.drawing.style import RC
from analysis.report import build, summary
from analysis.sections import search
from analysis.study.load import load
from stability.runs import results
from tests.analysis.synthetic import run_id, write_study
from tests.analysis.test_edge_and_search import write_table
from tests.analysis.test_report import text_of

RATES = (1e-3, 3e-3, 1e-2)


def with_lineage(folder):
    """Three members, two segments: the last of them took over from the first, and ends best. The ids are those of a
    study of a grid, where rates are members and seeds segments."""
    path = write_study(folder, mechanisms=("sc",), lrs=RATES)
    ids = [[run_id("synthetic", "sc", lr, seed, {}) for lr in RATES] for seed in range(2)]
    parents, second = [ids[0][0], ids[0][1], ids[0][0]], [1e-3, 3e-3, 1.25e-3]
    shared = {"population": 0}
    rows = [
        shared | {"run_id": own, "member": at, "segment": 1, "first_step": 0, "last_step": 10, "lr": RATES[at]}
        | {"parent": None, "took_over": False, "score": score}
        for at, (own, score) in enumerate(zip(ids[0], (2.5, 2.6, None), strict=True))
    ] + [
        shared | {"run_id": own, "member": at, "segment": 2, "first_step": 10, "last_step": 20, "lr": second[at]}
        | {"parent": parents[at], "took_over": at == 2, "score": score}
        for at, (own, score) in enumerate(zip(ids[1], (2.4, 2.5, 2.3), strict=True))
    ]  # fmt: skip
    write_table(path, "lineage", rows)
    return path, rows


def test_the_schedule_found_is_that_of_the_runs_the_best_member_descends_from(tmp_path):
    path, rows = with_lineage(tmp_path)
    study = load(path)
    ((series, mechanism, seed, members),) = search.populations(study)
    assert (series, mechanism, seed) == ("sc", "sc", 0)
    line = search.best_line(members)
    assert [row["run_id"] for row in line] == [rows[0]["run_id"], rows[5]["run_id"]]  # not the member's own first
    (table,) = search.lineage_tables(study)
    (cells,) = table.rows
    assert [cell.text for cell in cells] == ["sc, seed 0", "2.300", "1e-3 from 1, 1.25e-3 from 11", "1"]
    assert search.lineage_tables(load(write_study(tmp_path / "plain", mechanisms=("sc",)))) == []


def test_the_figure_has_every_segment_and_the_schedule(tmp_path):
    path, _ = with_lineage(tmp_path)
    with matplotlib.rc_context(RC):
        (ax,) = search.lineage_figures(load(path))["lineage"].figure.axes
    thick = max(ax.lines, key=lambda line: line.get_linewidth() if line.get_linestyle() == "-" else 0)
    assert list(thick.get_xdata()) == [0, 0, 10, 10, 20]
    assert list(thick.get_ydata()) == pytest.approx([1e-3, 1e-3, 1e-3, 1.25e-3, 1.25e-3])
    spans = [
        tuple(line.get_xdata()) for line in ax.lines if line.get_linewidth() == 0.6 and line.get_linestyle() == "-"
    ]
    assert sorted(spans) == [(0, 10)] * 3 + [(10, 20)] * 3
    assert sum(line.get_linestyle() == ":" for line in ax.lines) == 1  # who took over


def test_populations_of_several_seeds_are_drawn_in_a_panel_each(tmp_path):
    known = search.populations(load(with_lineage(tmp_path)[0]))
    [(series, mechanism, _, members)] = known
    panels = search._lineage_figure([(series, mechanism, seed, members) for seed in (3, 5, 8, 9)]).axes
    assert [ax.get_title() for ax in panels if ax.get_visible()] == ["seed 3", "seed 5", "seed 8", "seed 9"]
    assert {len(ax.lines) for ax in panels if ax.get_visible()} == {6 + 1 + 1 + 1}  # segments, taken over, line, points


def test_the_report_has_it_and_no_table_of_rates_whose_seeds_would_be_segments(tmp_path, drawn):
    drawn("lineage")
    path, rows = with_lineage(tmp_path)
    printed, pdf = summary(path), text_of(build(path, tmp_path))
    for text in (printed, pdf):
        assert "Population based training" in text and "Stable windows" not in text
        assert "Validation NLL against learning rate" not in text
    record = json.loads((path / "study.json").read_text())
    (path / "study.json").write_text(json.dumps(record | {"lineage": rows}))
    assert results.collect(path).searches["lineage"]["parent"].tolist()[3:] == [row["parent"] for row in rows[3:]]
