"""What killed processes leave half-written: named so that it can be told, and removed by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.runs.directory import RunDirectory
from stability.runs.leftovers import ABANDONED_S, find_leftovers, name_temporary, remove_abandoned
from stability.runs.processes import machine
from stability.runs.study import StudyFolder


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def debris(folder, name="status.json", of=None, pid=None, age_s=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}.{of or machine()}-{pid or dead_pid()}.tmp"
    path.mkdir()
    (path / "half").touch()
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_a_temporary_name_tells_machine_and_process(tmp_path):
    assert name_temporary(tmp_path / "a.json") == tmp_path / f".a.json.{machine()}-{os.getpid()}.tmp"


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    mine, dead = debris(tmp_path, pid=os.getpid()), debris(tmp_path)
    elsewhere, long_ago = debris(tmp_path, of="00000000"), debris(tmp_path, of="00000001", age_s=ABANDONED_S + 60)
    (tmp_path / ".hidden").touch()
    remove_abandoned(tmp_path)
    assert [path.exists() for path in (mine, dead, elsewhere, long_ago)] == [True, False, True, False]
    assert (tmp_path / ".hidden").exists()


def test_a_runs_leftovers_lie_in_its_folders_and_nothing_else_is_one(tmp_path):
    directory = RunDirectory(tmp_path, "0" * 12)
    directory.set_status("running", step=1)
    found = [
        debris(directory.path),
        debris(directory.path / "checkpoints", "step_000004"),
        debris(directory.path / "curvature", of="00000000"),
    ]
    (directory.path / ".lock-1.json").touch()
    assert sorted(find_leftovers(directory.path)) == sorted(found)
    assert find_leftovers(tmp_path / "absent") == []


def test_a_study_and_the_data_cache_are_cleared_when_they_are_next_written(tmp_path):
    study = StudyFolder.of(tmp_path / "runs", "mine")
    (tmp_path / "text.txt").write_text("a line of a text\n" * 2000)
    cache = tmp_path / "runs" / "cache"
    left = [
        debris(study.path),
        debris(study.results, "runs.parquet"),
        debris(cache, "partial-0"),
        debris(cache / "index", "0"),
    ]
    study.write([])
    prepare(part("data", {"name": "text", "path": str(tmp_path / "text.txt")}), cache)
    assert not any(path.exists() for path in left)


def test_a_spec_that_is_taken_for_a_leftover_while_it_is_written_is_written_again(tmp_path, monkeypatch):
    """Whoever holds the run's lock removes what has a temporary name; `write_spec` is the one writer without the
    lock."""
    directory, fsync, seen = RunDirectory(tmp_path, "0" * 12), os.fsync, []

    def interfere(descriptor):
        fsync(descriptor)
        seen.append(descriptor)
        if len(seen) == 1:
            for path in find_leftovers(directory.path):
                path.unlink()

    monkeypatch.setattr(os, "fsync", interfere)
    spec = {"data": {"name": "text", "path": "a"}, "model": {"name": "nano"}, "seed": 0}
    directory.write_spec(spec)
    assert directory.spec_file.exists() and len(seen) > 1
