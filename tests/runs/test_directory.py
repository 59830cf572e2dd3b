from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stability.runs.directory import (
    RunDirectory,
    checkpoint_name,
    read_json,
    read_jsonl,
    read_tail,
    replace_folder,
    step_of,
    write_atomically,
    write_json,
)
from stability.runs.log import truncate_after
from stability.runs.results import collect
from stability.runs.study import StudyFolder


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_json(path, {"state": "running"})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"half")
    assert read_json(path) == {"state": "running"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["fill", "second rename"])
def test_a_folder_is_replaced_whole_or_stays_and_leaves_no_debris(tmp_path, monkeypatch, failing):
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "old").touch()
    renamed, own = [], Path.replace

    def replace(path, target):
        renamed.append(path)
        if len(renamed) == 2:
            raise OSError(5, "Input/output error")
        return own(path, target)

    if failing == "second rename":
        monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match=r"Input/output|planted"), replace_folder(folder) as aside:
        (aside / "new").touch()
        if failing == "fill":
            raise OSError("planted")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "old"]
    with replace_folder(folder) as aside:
        (aside / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "new"]


def test_a_run_that_was_never_started_is_queued(tmp_path):
    directory = RunDirectory(tmp_path, "abc")
    assert directory.status() == {"state": "queued", "step": 0}
    assert not directory.finished


@pytest.mark.parametrize("state", ["stable", "spiked", "plateaued", "diverged"])
def test_every_verdict_is_an_end_and_a_crash_is_none(tmp_path, state):
    directory = RunDirectory(tmp_path, "abc")
    directory.set_status(state, step=3)
    assert directory.finished
    directory.set_status("failed", step=3, reason="crash")
    assert not directory.finished


def test_a_folder_with_another_spec_under_the_same_id_is_refused(tmp_path):
    directory = RunDirectory(tmp_path, "abc")
    spec = {"data": {"name": "text", "path": "a"}, "model": {"name": "nano"}, "seed": 0}
    directory.write_spec(spec)
    directory.write_spec({**spec, "data": {"name": "text", "path": "moved"}})
    with pytest.raises(ValueError, match="is the spec of another run"):
        directory.write_spec({**spec, "seed": 1})


def test_checkpoints_are_in_the_order_of_their_steps_beyond_a_million(tmp_path):
    directory = RunDirectory(tmp_path, "abc")
    steps = [5, 200_000, 999_999, 1_000_000, 10_000_000]
    for step in reversed(steps):
        (directory.path / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
    (directory.path / "checkpoints" / ".step_000004.00000000-12.tmp").mkdir()
    assert [path.name for path in directory.checkpoints()] == [
        "step_000005",
        "step_200000",
        "step_999999",
        "step_1000000",
        "step_10000000",
    ]
    assert list(map(step_of, directory.checkpoints())) == steps


def test_a_line_cut_by_a_crash_is_left_out_and_damage_elsewhere_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert list(read_jsonl(path)) == [{"step": 0}, {"step": 1}]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, is damaged"):
        list(read_jsonl(path))


def test_truncation_keeps_rows_up_to_a_step_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": {3 / 7 + step}}}\n' for step in range(5)]
    path.write_text("".join(lines) + '{"step": 5')
    truncate_after(path, 2)
    assert path.read_text() == "".join(lines[:3])


def test_tail_reads_whole_lines_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(100)) + '{"step"')
    assert [row["step"] for row in read_tail(path, 64)] == [96, 97, 98, 99]


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(ValueError, match="status.json is damaged"):
        read_json(tmp_path / "status.json")
    with pytest.raises(ValueError, match="no spec.json in"):
        read_json(tmp_path / "spec.json")


def test_a_study_with_queued_and_failed_runs_is_collected_as_it_stands(tmp_path):
    study = StudyFolder.of(tmp_path, "mine")
    study.write(run_ids := ["0" * 12, "1" * 12])
    parts = {
        name: {"name": name} for name in ("mechanism", "residual", "optimizer", "norm", "objective", "data", "model")
    }
    for run_id in run_ids:
        spec = {**parts, "lr_peak": 0.1, "seed": 0, "steps": 4, "data_fingerprint": "f"}
        write_json(RunDirectory(study.pool, run_id).spec_file, spec)
    RunDirectory(study.pool, "1" * 12).set_status("failed", step=3, reason="crash")
    runs = collect(study.path).runs.set_index("run_id")
    assert list(runs.status) == ["queued", "failed"]
    assert runs.loc["1" * 12, "reason"] == "crash"


def test_a_study_that_is_none_names_those_that_are(tmp_path):
    StudyFolder.of(tmp_path, "mine").write([])
    with pytest.raises(ValueError, match="studies there: mine"):
        collect(tmp_path / "studies" / "mien")


@pytest.mark.parametrize(
    "run_id",
    ["../../../../etc", "0123456789ab\n", "0123456789AB", "0123456789abc", "", "a" * 400, "\0" * 12, "０" * 12],
)
def test_a_study_lists_nothing_that_is_no_runs_id(tmp_path, run_id):
    study = StudyFolder.of(tmp_path, "mine")
    study.write(["0123456789ab", run_id])
    with pytest.raises(ValueError, match=f"^{re.escape(str(study.file))} is damaged \\(its run_ids hold ") as caught:
        study.runs()
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300 + len(str(study.file))
