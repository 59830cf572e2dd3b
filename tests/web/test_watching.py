"""What the page says of a study is what its files and its report say, and looking costs one `stat` a run."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import os
import re
from pathlib import Path

import pytest

from analysis.numbers.common_windows import common_windows
from analysis.numbers.windows import windows
from analysis.study.load import load
from benchmarks.web import plant
from stability.runs.directory import RunDirectory
from stability.runs.results import collect, write
from stability.runs.study import StudyFolder
from stability.web import app, watching

NUM = 200


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "POLL_S", 0.0)
    plant(tmp_path, "large", NUM)
    found = watching.Pool(tmp_path).study("large")
    found.poll()
    return found


def counted(monkeypatch, call):
    """How many files a call opens, and how often it asks for one's times."""
    opened, asked = [], []
    read, stat = builtins.open, os.stat
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda path, *more, **named: opened.append(path) or read(path, *more, **named))
        patch.setattr("io.open", builtins.open)
        patch.setattr(os, "stat", lambda path, **named: asked.append(path) or stat(path, **named))
        call()
    return [str(path) for path in opened], [str(path) for path in asked]


def test_a_look_at_finished_runs_opens_no_run_and_asks_each_once(watched, monkeypatch):
    ids = [row.trial.run_id for row in watched.rows]
    opened, asked = counted(monkeypatch, watched.poll)
    assert len(ids) == NUM and not [path for path in opened if any(run_id in path for run_id in ids)]
    assert sum(any(run_id in path for run_id in ids) for path in asked) == NUM


def test_a_changed_run_alone_is_read_again(watched, monkeypatch):
    directory = watched.rows[3].trial.directory
    status = json.loads(directory.status_file.read_text())
    directory.status_file.write_text(json.dumps({**status, "result": {**status["result"], "val_nll": 1.25}}))
    os.utime(directory.status_file, ns=(1, 1))
    before = watched.version
    opened, _ = counted(monkeypatch, watched.poll)
    assert {Path(path).parent.name for path in opened} - {"large"} == {directory.run_id}
    assert watched.version == before + 1 and watched.rows[3].val_nll == 1.25
    watched.poll()
    assert watched.version == before + 1


def test_windows_are_those_of_the_collected_tables(watched):
    write(collect(watched.folder.path), watched.folder.results)
    report, live = load(watched.folder.path), watched.study()
    assert live.series == report.series
    ours, theirs = windows(live), windows(report)
    assert {name: each.median for name, each in ours.items()} == {name: each.median for name, each in theirs.items()}
    assert {name: each.by_seed for name, each in ours.items()} == {name: each.by_seed for name, each in theirs.items()}
    both = common_windows(live), common_windows(report)
    assert (
        len(both[0]) == 4
        and [{n: e.median for n, e in each.items()} for each in both].count({n: e.median for n, e in both[1].items()})
        == 2
    )


def test_a_study_in_progress_is_drawn_with_its_running_runs_hollow(page):
    plant(page.pool, "large", NUM)
    study = StudyFolder.of(page.pool, "large")
    running = RunDirectory(page.pool, study.read()["run_ids"][0])
    running.set_status("interrupted", step=7, num_steps=200)
    running.metrics_file.write_text(
        "".join(
            json.dumps({"step": step, "loss": 3.0, "val_nll": 2.75 if step == 5 else None}) + "\n" for step in range(8)
        )
    )
    text = page.get("/studies/large").text
    assert f"{NUM} runs: {NUM - 1} done ({NUM - 1} stable)" in text and "1 interrupted" in text and "7/200" in text
    assert text.count('class="s-stable"') == NUM - 1 and "Stable windows" in text
    figure = page.get("/studies/large/figures").json()["nll"]
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines+markers"]
    assert [trace["name"] for trace in lines] == ["sa", "sc", "mix", "sw"]
    assert all(math.isfinite(value) for trace in lines for value in trace["y"])


def test_curves_of_a_run_follow_its_log_and_runs_are_compared(page):
    plant(page.pool, "large", 80)
    ids = StudyFolder.of(page.pool, "large").read()["run_ids"][:2]
    for shift, run_id in enumerate(ids):
        rows = [{"step": step, "loss": 5.0 - step / 1000 + shift, "lr": 1e-3, "grad_norm": 1.0} for step in range(3000)]
        RunDirectory(page.pool, run_id).metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = page.get(f"/runs/{ids[0]}/figures").json()
    (loss,) = figures["loss"]["data"]
    assert (loss["x"][0], loss["x"][-1]) == (0, 2999) and loss["y"][-1] == 5.0 - 2.999 and len(loss["x"]) <= 2000
    assert {"loss", "lr", "grad_norm"} == set(figures)
    with RunDirectory(page.pool, ids[0]).metrics_file.open("a") as file:
        file.write('{"step": 3000, "loss": 1.5, "lr": 1e-3}\n{"step": 3001, "lo')  # a line that is being written
    assert page.get(f"/runs/{ids[0]}/figures").json()["loss"]["data"][0]["y"][-1] == 1.5
    beside = page.get(f"/runs/{ids[0]}/figures?with={ids[1]}").json()["loss"]["data"]
    assert [trace["name"] for trace in beside] == [f"{run_id}: loss" for run_id in ids]
    text = page.get(f"/runs/{ids[1]}").text
    assert re.search(r"<code>seed</code></td><td>1</td><td>0</td>", text) and "model.width" not in text


def test_a_study_without_a_record_or_with_a_damaged_one_is_shown_as_such(page):
    folder = page.pool / "studies" / "broken"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text("{")
    assert "is damaged" in page.get("/studies").text and "is damaged" in page.get("/studies/broken").text
    assert page.get("/studies/nothing").status_code == 404 and page.get("/runs/0123456789ab").status_code == 404


def test_a_stream_begins_with_an_event_so_that_no_change_is_lost_between_page_and_stream(monkeypatch):
    monkeypatch.setattr(app, "TICK_S", 0.0)
    values = iter([1, 1, 2, 2, 2, 3])

    async def read():
        stream = app._stream(lambda: next(values)).body_iterator
        return [await anext(stream) for _ in range(3)]

    chunks = asyncio.run(read())
    assert all("event: rows" in chunk for chunk in chunks) and next(values, None) is None
