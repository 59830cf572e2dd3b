"""`RunLock`: one holder at a time, stale claims recognised, takeovers without a race."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from stability.runs import lock as lock_module
from stability.runs import processes
from stability.runs.lock import STALE_S, Owner, RunLock
from stability.runs.processes import Process

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = Process("gpu-07", "ffffffff", 1234, "5")


def claim_as(folder, process, *, launch="", age_s=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".lock-{len(list(folder.iterdir())):016x}.json"
    path.write_text(json.dumps(asdict(Owner(process, launch))))
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def dead_process():
    """This process's description as of one that is gone: the number of a child that was waited for."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return replace(Process.current(), pid=child.pid)


def claims(folder):
    return sorted(folder.glob(".lock-*"))


def test_a_lock_is_held_by_one_and_says_by_whom_until_it_is_released(tmp_path):
    first, second = RunLock(tmp_path / "run", "a"), RunLock(tmp_path / "run", "b")
    assert first.owner() is None
    assert first.acquire() and first.refresh()
    assert not second.acquire()
    assert second.owner() == Owner(Process.current(), "a", (tmp_path / "run").stat().st_ino)
    assert str(second.owner()) == f"{Process.current().host}:{os.getpid()}"
    first.release()
    assert second.owner() is None and list((tmp_path / "run").iterdir()) == []
    assert second.acquire()
    second.release()


@pytest.mark.parametrize("owner", ["gone", "reused", "another machine's, silent", "damaged, silent"])
def test_a_stale_claim_is_no_owner_and_is_removed_by_the_next(tmp_path, owner):
    process = {"gone": dead_process(), "reused": replace(Process.current(), started="1")}.get(owner, ELSEWHERE)
    path = claim_as(tmp_path, process, age_s=0 if owner in ("gone", "reused") else STALE_S + 5)
    if "damaged" in owner:
        stamp = path.stat().st_mtime
        path.write_text("")
        os.utime(path, (stamp, stamp))
    lock = RunLock(tmp_path)
    assert lock.owner() is None and lock.has_stale_claims()
    assert lock.acquire()
    assert path not in claims(tmp_path) and len(claims(tmp_path)) == 1
    lock.release()


@pytest.mark.parametrize("owner", ["this process's", "another machine's", "damaged"])
def test_a_living_claim_is_left_alone(tmp_path, owner):
    path = claim_as(
        tmp_path, Process.current() if "this" in owner else ELSEWHERE, age_s=0 if "this" not in owner else 10 * STALE_S
    )
    if owner == "damaged":
        path.write_text("{")
    lock = RunLock(tmp_path)
    assert not lock.acquire()
    assert lock.owner() is not None
    assert claims(tmp_path) == [path]
    assert [file for file in tmp_path.iterdir() if file != path] == [], "the clock's probe is gone"


@pytest.mark.parametrize("process", [ELSEWHERE, None])
def test_a_claim_of_next_year_holds_nothing(tmp_path, process):
    """The file system's clock was set back; of a damaged claim the same is true."""
    path = claim_as(tmp_path, process or ELSEWHERE, age_s=-365 * 86_400)
    if process is None:
        stamp = path.stat().st_mtime
        path.write_text("")
        os.utime(path, (stamp, stamp))
    lock = RunLock(tmp_path)
    assert lock.owner() is None and lock.acquire()
    lock.release()


def test_a_claim_that_was_copied_with_its_folder_holds_nothing_there_once_it_is_old(tmp_path):
    original = RunLock(tmp_path / "run")
    assert original.acquire()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    [claim] = claims(tmp_path / "copy")
    copied = RunLock(tmp_path / "copy")
    assert copied.owner(), "it may be the claim of a folder whose inode changed: it counts while it is touched"
    os.utime(claim, (time.time() - STALE_S - 5,) * 2)
    assert copied.owner() is None and copied.acquire()
    assert RunLock(tmp_path / "run").owner() == original.owner() is not None
    copied.release()
    original.release()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"process": {"pid": "x"}}', b"[" * 100_000])
def test_a_damaged_claim_says_what_it_is(tmp_path, content):
    claim_as(tmp_path, ELSEWHERE).write_bytes(content)
    assert str(RunLock(tmp_path).owner()) == "a damaged lock file, which counts for 120 s"


@pytest.mark.parametrize("change", [{"pid": "x"}, {"pid": -1}, {"pid": 2**40}, {"started": None}, {"host": 3}])
def test_a_claim_of_no_process_is_a_damaged_one(tmp_path, change):
    path = claim_as(tmp_path, Process.current())
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"process": values["process"] | change}))
    assert RunLock(tmp_path).owner() == lock_module.UNKNOWN


def test_a_claim_older_than_the_folders_inode_is_read(tmp_path):
    path = claim_as(tmp_path, Process.current(), age_s=10 * STALE_S)
    values = json.loads(path.read_text())
    del values["folder"]
    path.write_text(json.dumps(values))
    assert RunLock(tmp_path).owner() == Owner(Process.current())


def test_within_a_launch_a_dead_machines_claim_falls_to_the_next_worker_at_once(tmp_path):
    claim_as(tmp_path, ELSEWHERE, launch="mine")
    assert not RunLock(tmp_path, "another").acquire()
    lock = RunLock(tmp_path, "mine")
    assert lock.acquire()
    lock.release()


def test_within_a_launch_a_worker_that_is_seen_to_live_keeps_its_claim(tmp_path):
    claim_as(tmp_path, Process.current(), launch="mine")
    assert not RunLock(tmp_path, "mine").acquire()


def test_a_holder_beats_from_a_thread_and_learns_that_its_claim_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.02)
    lock = RunLock(tmp_path)
    assert lock.acquire()
    [claim] = claims(tmp_path)
    os.utime(claim, (1.0, 1.0))
    deadline = time.monotonic() + 10
    while claim.stat().st_mtime == 1.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert claim.stat().st_mtime > 1.0
    claim.unlink()
    while lock.refresh() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lock.refresh()
    lock.release()
    assert lock.acquire() and lock.refresh(), "what was lost before is forgotten"
    lock.release()


def test_a_zombie_is_gone():
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + 10
    while processes.read_start_time(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (processes.PROC / str(child)).exists() and processes.read_start_time(child) is None
    os.waitpid(child, 0)
    assert processes.read_start_time(os.getpid()) is not None


def contend(folder, start, queue, rounds):
    """In a process of its own: in each round claim a run whose last holder is dead, and say when it was held."""
    for number in range(rounds):
        start.wait()
        lock = RunLock(Path(folder) / str(number))
        won = lock.acquire()
        if won:
            began = time.monotonic_ns()
            time.sleep(0.002)
            queue.put((number, began, time.monotonic_ns()))
            lock.release()
        start.wait()


def test_of_processes_that_find_the_same_stale_claim_no_two_hold_the_run_at_once(tmp_path):
    rounds, contenders = 15, 3
    stale = dead_process()
    for number in range(rounds):
        claim_as(tmp_path / str(number), stale)
    context = multiprocessing.get_context("spawn")
    start, queue = context.Barrier(contenders), context.SimpleQueue()
    workers = [context.Process(target=contend, args=(str(tmp_path), start, queue, rounds)) for _ in range(contenders)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    held: list[tuple[int, int, int]] = []
    while not queue.empty():
        held.append(queue.get())
    assert set(Counter(number for number, _, _ in held)) == set(range(rounds)), "somebody always gets it"
    for number in range(rounds):
        times = sorted((began, ended) for each, began, ended in held if each == number)
        assert all(earlier[1] <= later[0] for earlier, later in zip(times, times[1:], strict=False))
        assert claims(tmp_path / str(number)) == []
