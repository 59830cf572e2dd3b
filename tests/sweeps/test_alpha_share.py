"""The share of wall time that α_max takes of a run and of a sweep: recorded as it is measured, said at the end."""

from __future__ import annotations

import json
import math
import re
import time

import pytest

from stability import sweep
from stability.config.curvature import CurvatureSpec
from stability.probes.curvature import alpha_max
from stability.runs.directory import RunDirectory, read_jsonl, readable_rows
from stability.runs.study import StudyFolder
from sweeps.record import alpha_share


def recorded(pool, name: str, training: list[float], measured: list[tuple[float, float]]) -> RunDirectory:
    """Return a run with these clocks of its steps, and (seconds, end) of what was measured."""
    run = RunDirectory(pool, name)
    run.curvature_timing_file.parent.mkdir(parents=True, exist_ok=True)
    run.timing_file.write_text("".join(json.dumps({"step": 1, "wall_s": each}) + "\n" for each in training))
    rows = [{"phase": "terminal", "wall_s": wall_s, "ended": ended} for wall_s, ended in measured]
    run.curvature_timing_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_the_line_is_arithmetic_over_what_runs_recorded(tmp_path):
    """10 of 40 s, 30 of 40 s, and 20 of 100 s; of the launch from 1000 to 1050 only what ended in it, on two at a time."""
    runs = [
        recorded(tmp_path, "one", [5.0, 30.0], [(10.0, 1010.0)]),
        recorded(tmp_path, "two", [10.0], [(10.0, 500.0), (20.0, 1040.0)]),
        recorded(tmp_path, "three", [80.0], [(20.0, 900.0)]),
        recorded(tmp_path, "four", [7.0], []),
    ]
    assert alpha_share(runs, 1000.0, 1050.0, 2) == (
        "α_max took 30 % of 50 s, 20 to 75 % of each run; hessian=false leaves it out"
    )
    assert alpha_share(runs[:1], 1000.0, 1050.0, 1) == (
        "α_max took 20 % of 50 s, 25 % of each run; hessian=false leaves it out"
    )
    assert alpha_share(runs, 2000.0, 2050.0, 2) == "" and alpha_share(runs[3:], 0.0, 2000.0, 2) == ""


def test_seconds_between_steps_are_not_counted_and_those_of_a_measurement_that_was_left_are(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(alpha_max.time, "perf_counter", lambda: now[0])

    def steps():
        for _ in range(3):
            now[0] += 2.0
            yield
        now[0] += 1.0

    run = RunDirectory(tmp_path, "run")
    for _ in alpha_max._time_steps(steps(), run, "terminal"):
        now[0] += 50.0
    left = alpha_max._time_steps(steps(), run, "earliest")
    next(left)
    now[0] += 50.0
    left.close()
    rows = list(read_jsonl(run.curvature_timing_file, ()))
    assert [(row["phase"], row["wall_s"]) for row in rows] == [("terminal", 7.0), ("earliest", 2.0)]


def test_a_row_that_a_crash_cut_short_is_dropped(tmp_path):
    run = recorded(tmp_path, "run", [1.0], [(3.0, 10.0)])
    with open(run.curvature_timing_file, "a") as file:
        file.write('{"phase": "termi')
    list(alpha_max._time_steps(iter(()), run, "terminal"))
    assert [row["phase"] for row in read_jsonl(run.curvature_timing_file, ())] == ["terminal", "terminal"]


def test_a_sweep_ends_with_the_line_and_a_second_one_that_measures_nothing_has_none(lab, capsys):
    words = [
        "data=text",
        f"data.path={lab.text}",
        f"runs_dir={lab.pool}",
        "name=shared",
        "launcher=serial",
        "device=cpu",
    ]
    words += [
        "mechanism=sa",
        "lr=[1e-3,3e-3]",
        "seeds=1",
        "steps=6",
        "batch=2",
        "evaluation.sequences=4",
        "report=false",
    ]
    words += [
        "model.layers=1",
        "model.width=8",
        "model.heads=2",
        "curvature.recorded_steps=2",
        "curvature.warmup_steps=1",
    ]
    assert sweep.main(words) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    pattern = r"α_max took (\d+) % of (\d+) s, (\d+)(?: to (\d+))? % of each run; .*"
    found = [None if each is None else int(each) for each in re.fullmatch(pattern, line).groups()]
    of_sweep, seconds, low, high = found[:3] + [found[2] if found[3] is None else found[3]]
    runs = StudyFolder(lab.pool / "studies" / "shared").runs()
    alpha_s = [sum(row["wall_s"] for row in read_jsonl(run.curvature_timing_file, ())) for run in runs]
    train_s = [list(read_jsonl(run.timing_file))[-1]["wall_s"] for run in runs]
    shares = sorted(100 * one / (one + other) for one, other in zip(alpha_s, train_s, strict=True))
    assert [low, high] == pytest.approx(shares, abs=0.51)
    # a whole number of seconds stands for half a second on either side; 0 for less than half of one
    lowest, highest = (100 * sum(alpha_s) / each if each > 0 else math.inf for each in (seconds + 0.5, seconds - 0.5))
    assert lowest - 0.5 <= of_sweep <= highest + 0.5
    assert sweep.main(words) == 0
    assert "α_max took" not in capsys.readouterr().out


def test_a_measurement_of_its_own_is_recorded_too(lab):
    spec = lab.spec()
    run = lab.train(spec)
    started = time.perf_counter()
    short = CurvatureSpec(warmup_batches=1, warmup_steps=0, recorded_steps=1)
    assert len(list(alpha_max.measure(run, short, cache_dir=lab.cache, device="cpu"))) == 2
    (row,) = read_jsonl(run.curvature_timing_file, ())
    assert row["phase"] == "terminal" and 0 < row["wall_s"] < time.perf_counter() - started


def test_the_trainings_logs_are_not_read_if_no_alpha_max_was_measured_now(tmp_path, monkeypatch):
    run, read = recorded(tmp_path, "one", [5.0, 30.0], [(10.0, 1010.0)]), []
    monkeypatch.setattr(
        "sweeps.record.readable_rows", lambda path, numbers: read.append(path) or readable_rows(path, numbers)
    )
    assert alpha_share([run], 2000.0, 2050.0, 1) == "" and read == [run.curvature_timing_file]
