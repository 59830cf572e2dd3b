"""A preparation in worker processes that is killed: its shards stay, its workers do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability.corpora.proteins import shards as sharding
from stability.corpora.proteins.parsing import parse
from tests.corpora.test_protein_corpus import write_structures

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
from stability.corpora.proteins import shards as sharding
sharding.FILES_PER_SHARD = sharding.FEWEST_FILES = 1
sharding.os.sched_getaffinity = lambda _: {0, 1}
list(sharding.shards(sorted(Path(sys.argv[1]).iterdir()), Path(sys.argv[2]), "auto", 10))
"""
PATIENCE_S = 60.0


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def children_of(pid):
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_preparation_keeps_its_shards_and_leaves_no_process_behind(tmp_path, monkeypatch, number):
    files, place = write_structures(tmp_path / "models", num=24, length=60), tmp_path / "shards"
    command = [sys.executable, "-c", SCRIPT, str(files), str(place)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for(lambda: list(place.glob("shard-*.npz")))
        workers = children_of(process.pid)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # Ctrl-C reaches the workers, too
        _, told = process.communicate(timeout=PATIENCE_S)
    assert len(workers) >= 2 and told.count("Traceback") <= 1, told
    wait_for(lambda: not any(map(lives, workers)))
    kept = len(list(place.glob("shard-*.npz")))
    assert 1 <= kept < 24
    parsed = []
    monkeypatch.setattr(sharding, "FILES_PER_SHARD", 1)
    monkeypatch.setattr(sharding, "parse", lambda name, *rest: parsed.append(name) or parse(name, *rest))
    assert len(list(sharding.shards(sorted(files.iterdir()), place, "auto", 10))) == 24
    assert len(parsed) == 24 - kept
