"""`lr=edge` and `search=optuna` from words to the PDF, in process, on a page of text."""

from __future__ import annotations

import pytest

from stability import sweep
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from tests.analysis.test_report import text_of

TINY = """
    data=text objective=mlm tables=all launcher=serial device=cpu seeds=1 mechanism=[sa] steps=2 batch=2 evaluation.every_steps=1 evaluation.sequences=4 hessian=false
    model.layers=1 model.width=8 model.heads=2 model.positions=8 name=small
"""


@pytest.fixture
def words(lab, tmp_path):
    return [*TINY.split(), f"data.path={lab.text}", f"runs_dir={lab.pool}", f"reports_dir={tmp_path / 'reports'}"]


def test_one_command_finds_the_edges_and_again_trains_nothing(lab, words, tmp_path, capsys):
    words = [
        *words,
        "mechanism=[sa,sc]",
        "lr=edge",
        "lr.low=1e-3",
        "lr.high=1e-1",
        "lr.num=3",
        "lr.edge.resolution_decades=0.5",
        "lr.edge.extend_decades=1",
    ]
    assert sweep.main([*words, "dry_run=true"]) == 0
    assert (
        "lr=edge: these are the first round; best rate and edges to 0.5 decades take up to" in capsys.readouterr().out
    )
    assert sweep.main(words) == 0
    out = capsys.readouterr().out
    assert "round 1\ntrains 6\n" in out and "Best learning rates and edges of stability" in out
    edges = collect(lab.pool / "studies" / "small").searches["edges"]
    assert (
        len(edges) == 2
        and set(edges.state) == {"found"}
        and edges.num_runs.sum() == len(StudyFolder.of(lab.pool, "small").read()["run_ids"])
    )
    assert "Best learning rates and edges of stability" in text_of(tmp_path / "reports" / "small.pdf")
    record = StudyFolder.of(lab.pool, "small").read()
    assert sweep.main(words) == 0
    assert f"skips {len(record['run_ids'])} finished runs of" in capsys.readouterr().out
    assert StudyFolder.of(lab.pool, "small").read() == record
    grid = [word for word in words if not word.startswith("lr")]
    assert sweep.main([*grid, "lr=[1e-3,1e-2]", "report=false"]) == 0
    assert "skips 4 finished runs, trains none" in capsys.readouterr().out
    assert not (lab.pool / "studies" / "small" / "results" / "edges.parquet").exists(), "the study is a grid now"


def test_one_command_searches_and_more_points_go_on_from_there(lab, words, tmp_path, capsys):
    words = [
        *(word for word in words if not word.startswith("lr")),
        "search=optuna",
        "search.startup=2",
        "search.space.model.ffn_multiple={low:1,high:4}",
    ]
    assert sweep.main([*words, "search.num=2", "report=false"]) == 0
    assert "Search over lr_peak, model.ffn_multiple: sa" in capsys.readouterr().out
    assert sweep.main([*words, "search.num=3"]) == 0
    assert "round 3\ntrains 1\n" in capsys.readouterr().out
    found = collect(lab.pool / "studies" / "small").searches["search"]
    assert list(found.number) == [1, 1, 2, 2, 3, 3] and found.score.notna().all()
    assert "The search" in text_of(tmp_path / "reports" / "small.pdf")


def test_halving_leaves_the_worst_rates_early_and_the_best_ends_bit_for_bit_as_without(lab, words, tmp_path, capsys):
    words = [*words, "lr=[1e-3,1e-2,1e-1]", "steps=6"]
    assert sweep.main([*words, "search=asha", "search.first_step=2"]) == 0
    assert "stopped 1/1" in capsys.readouterr().out
    runs = collect(lab.pool / "studies" / "small").runs.set_index("run_id")
    assert sorted(runs.num_steps) == [2, 2, 6] and list(runs.status).count("stopped") == 2
    assert set(runs[runs.status == "stopped"].reason.str[:24]) == {"stopped at rung 1 of 1: "}
    assert "stopped at rung 1 of 1" in text_of(tmp_path / "reports" / "small.pdf")
    other = [f"runs_dir={tmp_path / 'other'}" if word.startswith("runs_dir=") else word for word in words]
    assert sweep.main([*other, "report=false"]) == 0
    for run_id in runs.index:
        whole = (tmp_path / "other" / run_id / "metrics.jsonl").read_text()
        assert whole.startswith((lab.pool / run_id / "metrics.jsonl").read_text())
    assert sweep.main([*words, "report=false"]) == 0
    assert all(
        (lab.pool / run_id / "metrics.jsonl").read_text() == (tmp_path / "other" / run_id / "metrics.jsonl").read_text()
        for run_id in runs.index
    )
