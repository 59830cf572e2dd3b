"""The kill storm, small: `python -m tests.faults.kill_storm` is the long one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_sweep_that_is_killed_again_and_again_leaves_what_an_undisturbed_one_leaves():
    options = ["--launcher=serial", "--runs=12", "--steps=40", "--kills=3", "--each=1", "--seed=4"]
    storm = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_storm", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert storm.returncode == 0, storm.stdout + storm.stderr
    summary = json.loads(storm.stdout.splitlines()[-1])
    assert (summary["kills"], summary["faults"]) == (3, [])
    assert all(summary["hits"][operation] >= 1 for operation in ("checkpoint", "metrics", "status"))
