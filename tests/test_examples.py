"""The scripts of ``examples/`` run as their first lines say, in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(name, folder, *words):
    out = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "examples" / name, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_every_example_is_run_here():
    assert sorted(file.name for file in (ROOT / "examples").glob("*.py")) == [
        "alpha_max_in_a_loop.py",
        "loss_along_the_step.py",
        "sweep_and_read.py",
    ]


def test_the_loop_s_predictions_are_what_happens_while_steps_are_short(tmp_path):
    rows = [line.split() for line in run("alpha_max_in_a_loop.py", tmp_path).splitlines()[1:-1]]
    assert len(rows) == 30
    short = [row for row in rows if float(row[1]) < 1e-2]
    assert all(float(row[3]) == pytest.approx(float(row[4]), abs=2e-4) for row in short)
    beyond = [row for row in rows if float(row[1]) > float(row[2])]
    assert beyond and all(float(row[3]) > 0 for row in beyond)  # predicted to raise the batch's loss
    assert (tmp_path / "reports" / "alpha_max_in_a_loop.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow  # a process of its own; the numbers it prints are those of the loop above
def test_the_step_s_alpha_max_is_where_its_parabola_comes_back(tmp_path):
    said = run("loss_along_the_step.py", tmp_path)
    slope, curvature, alpha_max = map(float, re.findall(r"-?\d+\.?\d*", said)[:3])
    assert slope < 0 < curvature
    assert alpha_max == pytest.approx(-2 * slope / curvature, rel=1e-3)
    assert (tmp_path / "reports" / "loss_along_the_step.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_sweep_is_read_as_its_tables_say(tmp_path):
    said = run("sweep_and_read.py", tmp_path, "out")
    runs = pd.read_parquet(next((tmp_path / "out").rglob("results/runs.parquet")))
    assert len(runs) == 6 and set(runs["mechanism"]) == {"sa", "sc"}
    best = runs.loc[runs["val_nll"].idxmin()]
    assert f"best: {best['mechanism']} at {best['lr']:g}, {best['num_params']} parameters" in said
    assert (tmp_path / "out" / "reports" / "example.pdf").exists()
