"""Disks that are full or closed, and checkpoints that are not what they were: each ends in the documented way."""

from __future__ import annotations

import json
import pickle
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from stability import sweep
from stability.cli.entry import run_entry
from stability.runs import log
from stability.runs.directory import read_jsonl
from stability.training import checkpoint
from sweeps.launchers import Interrupt
from sweeps.launchers.serial import launch
from sweeps.trial import run_trial
from tests.sweeps.real import make_sweep


@contextmanager
def files_up_to(num_bytes):
    """Within the block a write beyond ``num_bytes`` fails as on a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def work(trials):
    launch(trials, interrupt=Interrupt())


def hidden(trial):
    return [path.name for path in trial.directory.path.rglob(".*")]


def test_a_row_that_does_not_fit_the_disk_is_taken_back(tmp_path):
    rows = log.JsonLines(tmp_path / "metrics.jsonl")
    rows.write({"step": 0})
    with files_up_to(16), pytest.raises(OSError, match="File too large"):
        rows.write({"step": 1, "loss": 1.25})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    rows.write({"step": 1, "loss": 1.25})
    rows.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_checkpoint_that_does_not_fit_the_disk_fails_its_run_and_the_same_command_finishes_it(tmp_path):
    _, [calm, _] = make_sweep(tmp_path, "lr=1e-2", pool="calm")
    _, [trial, _] = make_sweep(tmp_path, "lr=1e-2", pool="full")
    work([calm])
    with files_up_to(4096):
        work([trial])
    status = trial.directory.status()
    assert status["state"] == "failed" and "File too large" in status["reason"]
    assert "File too large" in trial.directory.traceback_file.read_text()
    assert trial.directory.checkpoints() == [] and hidden(trial) == []
    work([trial])
    assert trial.directory.status()["state"] == calm.directory.status()["state"]
    assert trial.directory.metrics_file.read_bytes() == calm.directory.metrics_file.read_bytes()


class Touch:
    """As a pickle it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("damage", ["truncated", "one bit flipped", "a pickle with code in it"])
def test_an_interrupted_run_whose_checkpoint_is_damaged_goes_on_from_before_and_ends_as_if_nothing_had_been(
    tmp_path, damage, capsys
):
    _, [calm, _] = make_sweep(tmp_path, "lr=1e-2", pool="calm")
    _, [trial, _] = make_sweep(tmp_path, "lr=1e-2", pool="damaged")
    work([calm])
    steps = run_trial(trial)
    for _ in range(8):
        next(steps)
    steps.close()
    folder = trial.directory.checkpoints()[-1]
    path = folder / ("trainer.pt" if "pickle" in damage else checkpoint.MODEL)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 3])
    elif damage == "one bit flipped":
        path.write_bytes(content[:500] + bytes([content[500] ^ 4]) + content[501:])
    else:
        path.write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
        manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
        manifest["sha256"][path.name] = checkpoint.sha256_of(path)
        (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    list(run_trial(trial))
    assert "skips a damaged checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()
    assert trial.directory.metrics_file.read_bytes() == calm.directory.metrics_file.read_bytes()
    for one, other in zip(calm.directory.checkpoints(), trial.directory.checkpoints(), strict=True):
        assert one.name == other.name
        assert (
            checkpoint.verify_manifest(other)["sha256"][checkpoint.MODEL]
            == checkpoint.verify_manifest(one)["sha256"][checkpoint.MODEL]
        )


def test_a_damaged_checkpoint_of_the_last_step_is_written_anew(tmp_path):
    _, [trial, _] = make_sweep(tmp_path, "lr=1e-2")
    list(run_trial(trial))
    last = trial.directory.checkpoints()[-1]
    (last / checkpoint.MODEL).write_bytes(b"cut")
    trial.directory.status_file.unlink()
    list(run_trial(trial))
    checkpoint.verify_manifest(last)
    assert trial.directory.finished and hidden(trial) == []


def test_rows_are_on_the_disk_before_the_checkpoint_that_a_run_resumes_from(tmp_path, monkeypatch):
    order = []
    sync, save = log.RunLog.sync, checkpoint.save
    monkeypatch.setattr(log.RunLog, "sync", lambda self: order.append("rows") or sync(self))
    monkeypatch.setattr(checkpoint, "save", lambda *args, **named: order.append("checkpoint") or save(*args, **named))
    _, [trial, _] = make_sweep(tmp_path, "lr=1e-2")
    list(run_trial(trial))
    assert order == ["rows", "checkpoint"] * 2


def test_a_runs_folder_that_cannot_be_written_is_two_lines_and_exit_code_2(tmp_path, monkeypatch, capsys):
    make_sweep(tmp_path)
    (tmp_path / "file").touch()
    words = [
        "data=text",
        f"data.path={tmp_path / 'text.txt'}",
        f"runs_dir={tmp_path / 'file' / 'runs'}",
        "launcher=serial",
        "report=false",
    ]
    monkeypatch.setattr(sys, "argv", ["sweep", *words])
    with pytest.raises(SystemExit) as ended:
        run_entry(sweep.main, "sweep", "")
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and len(printed.err.splitlines()) <= 2 and "Traceback" not in printed.err
    assert str(tmp_path / "file") in printed.err
