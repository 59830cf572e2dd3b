"""`benchmarks.throughput`: a study's kinds of run take turns, and its report reads what came of it."""

from __future__ import annotations

import pytest

from analysis.numbers.side_by_side import ratio
from analysis.sections.throughput import throughput_table
from analysis.study.load import THROUGHPUT_VERSION, load
from benchmarks import throughput
from stability.runs.results import collect, write
from stability.runs.study import StudyFolder


def test_a_study_is_measured_side_by_side_and_its_report_reads_it(lab):
    names = ("identity", "mhc")
    runs = [
        lab.train(lab.spec(residual={"name": name}, objective={"name": "ar"}, steps=2, microbatch=2)) for name in names
    ]
    study = StudyFolder.of(lab.pool, "two")
    study.write([directory.run_id for directory in runs])
    write(collect(study.path), study.results)
    assert throughput.VERSION == THROUGHPUT_VERSION
    throughput.measure(study, 7, "cpu", 1)
    loaded = load(study.path)
    rows = {row["series"]: row for row in loaded.throughput["rows"]}
    assert set(rows) == {"sa identity", "sa mhc"} and all(
        len(row["seconds"]) == 7 and row["tokens_per_step"] == 4 * 16 for row in rows.values()
    )
    known = loaded.runs.set_index("series")["num_params"]
    assert all(row["num_params"] == known[name] for name, row in rows.items())
    found = ratio(loaded, "sa mhc", "sa identity")
    back = ratio(loaded, "sa identity", "sa mhc")
    assert 0 < found.low <= found.median <= found.high and found.median == pytest.approx(1 / back.median)
    assert (
        throughput_table(loaded).title == "Throughput side by side"
        and "CPU, 1 thread" in throughput_table(loaded).caption
    )


def test_the_estimates_that_an_optimizer_asks_for_are_in_its_steps(lab, monkeypatch):
    taken, estimate = [], throughput.hutchinson_diagonal
    monkeypatch.setattr(
        throughput, "hutchinson_diagonal", lambda *given, **more: taken.append(1) or estimate(*given, **more)
    )
    spec = lab.spec(optimizer={"name": "sophia", "hessian_every": 2})
    each = throughput.training(spec, lab.cache, "cpu")
    for _ in range(4):
        each.step()
    assert len(taken) == 2
