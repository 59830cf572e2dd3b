"""What outlives a killed driver, and what does not."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stability.runs.processes import Process, read_start_time
from tests.sweeps import fakes

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "import time; time.sleep(120)"
# A driver with what a session consists of: an heir, its child without the environment, one that only writes into the
# folder; and a reader that is none of it.
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from sweeps.reaper import start_reaper
folder, ending = Path(sys.argv[1]), sys.argv[2]
sleep, bare = [sys.executable, "-c", "import time; time.sleep(120)"], {"PATH": os.environ["PATH"]}
parent = "import subprocess, sys; child = subprocess.Popen(sys.argv[1:], env={}); print(child.pid, flush=True); child.wait()"
with start_reaper(folder):
    heir = subprocess.Popen([sys.executable, "-c", parent, *sleep], env={**bare, "RAY_TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True)
    writer = subprocess.Popen(sleep, env=bare, stdout=open(folder / "log", "a"), start_new_session=True)
    reader = subprocess.Popen(sleep, env=bare, stdin=open(folder / "log"), stdout=subprocess.DEVNULL)
    mine = open(folder / "driver.log", "a")
    print(heir.pid, heir.stdout.readline().strip(), writer.pid, reader.pid, flush=True)
    if ending == "kill":
        time.sleep(120)
for process in (heir, writer):
    process.wait()
print("went on", flush=True)
"""


@pytest.mark.parametrize("ending", ["kill", "normal"])
def test_the_session_of_a_driver_ends_with_it_and_nothing_else_does(tmp_path, ending):
    folder = tmp_path / "stability-ray-test"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), ending], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    *session, reader = map(int, driver.stdout.readline().split())
    try:
        if ending == "kill":
            driver.kill()
        assert driver.stdout.readline() == ("" if ending == "kill" else "went on\n")
        driver.wait()
        deadline = time.monotonic() + 60
        while (folder.exists() or any(map(read_start_time, session))) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not folder.exists()
        assert [read_start_time(pid) for pid in session] == [None] * 3
        assert read_start_time(reader) is not None
    finally:
        os.kill(reader, 9)


def test_a_worker_whose_driver_is_gone_saves_its_trial_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(fakes.imported("sweeps.launchers.ray.trainable"), "LOOK_S", 0.0)
    trial = fakes.make_trial(tmp_path, steps=5)
    with pytest.raises(SystemExit):
        fakes.worker(trial, fakes.run_fake, tmp_path, replace(Process.current(), started="1")).step()
    assert (trial.directory.path / "saved.json").read_text() == "1"
    for driver in (Process.current(), replace(Process.current(), machine="ffffffff")):
        fakes.worker(trial, fakes.run_fake, tmp_path, driver).step()
    assert trial.directory.status()["state"] == "stable"
