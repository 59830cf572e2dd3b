"""How many trials a GPU holds, with a GPU that is made up."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stability.runs.leftovers import find_abandoned, remove_abandoned
from sweeps import gpu_memory
from sweeps.gpu_memory import CONTEXT_MB, MARGIN, Peak, kinds, probe, shorten_trial
from sweeps.trial import run_trial
from tests.sweeps.real import make_sweep


class MadeUp:
    """A GPU of 80,000 MiB on which each trial, in turn, takes what is given."""

    def __init__(self, *peaks):
        self.peaks = list(peaks)
        self.forgotten = 0

    def free_mb(self):
        return 80_000.0

    def peak_mb(self):
        return self.peaks.pop(0)

    def forget(self):
        self.forgotten += 1


@pytest.mark.parametrize(
    ("largest_mb", "fitting", "share"),
    [
        (80_000 / 3 / MARGIN, 2, 0.5),  # three would fit without the processes' own memory
        ((80_000 / 3 - CONTEXT_MB) / MARGIN - 0.01, 3, 0.3333),
        (100.0, 87, 0.0114),
        (70_000.0, 1, 1.0),  # fits, the margin does not: a GPU to itself
        (float("inf"), 1, 1.0),
    ],
)
def test_as_many_trials_share_a_gpu_as_fit_with_the_margin(largest_mb, fitting, share):
    peak = Peak("sa", largest_mb, 80_000.0)
    assert (peak.num_fitting, peak.share) == (fitting, share)
    assert int(1 / peak.share) == fitting
    assert fitting * (MARGIN * largest_mb + CONTEXT_MB) <= 80_000 or fitting == 1


def test_one_trial_of_each_kind_is_begun_and_the_largest_decides(tmp_path):
    _, trials = make_sweep(tmp_path, "hessian=true", "generate.num=3", "seeds=2")
    begun, gpu = [], MadeUp(300.0, 500.0)

    def run(trial):
        begun.append(trial)
        yield

    peak = probe(trials, run, gpu)
    assert (
        [trial.spec["mechanism"]["name"] for trial in begun]
        == ["sa", "sc"]
        == [trial.spec["mechanism"]["name"] for trial in kinds(trials).values()]
    )
    assert (peak.label, peak.largest_mb, gpu.forgotten) == ("sc lr=0.001 seed=0", 500.0, 2)
    assert (
        peak.describe()
        == "measured: at most 0.49 GiB (sc lr=0.001 seed=0) of a GPU's 78.1 GiB; with 15% and 800 MiB a process to "
        "spare, 58 trials a GPU"
    )


def test_the_beginning_of_a_trial_trains_measures_and_samples_and_leaves_nothing(tmp_path):
    more = [
        "hessian=true",
        "generate.num=2",
        "checkpoint.every_steps=3",
        "checkpoint.keep_last=1",
        "schedule=cosine",
        "schedule.warmup_steps=5",
    ]
    _, trials = make_sweep(tmp_path, *more, "lr=1e-3")
    before, seen = sorted((tmp_path / "runs").iterdir()), []

    def run(trial):
        yield from run_trial(trial)
        seen.append((trial.directory.status(), {path.name for path in trial.directory.path.iterdir()}))

    probe(trials[:1], run, MadeUp(1.0))
    ((status, names),) = seen
    assert status["state"] in ("stable", "plateaued"), status
    assert status["step"] == gpu_memory.PROBE_STEPS
    assert {"checkpoints", "curvature", "samples"} <= names
    assert sorted((tmp_path / "runs").iterdir()) == before


def test_what_a_killed_probe_leaves_in_the_pool_goes_with_the_next_launch(tmp_path):
    _, trials = make_sweep(tmp_path, "lr=1e-3")
    pool = tmp_path / "runs"
    code = """
import os, pickle, signal, sys
from sweeps.gpu_memory import _peak_mb
def run(trial):
    os.makedirs(trial.directory.path)
    os.kill(os.getpid(), signal.SIGKILL)
    yield
_peak_mb(pickle.load(sys.stdin.buffer), run, lambda: 0.0)
"""
    before = set(pool.iterdir())
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], input=pickle.dumps(trials[0]))
    assert killed.returncode == -signal.SIGKILL
    (left,) = set(pool.iterdir()) - before
    assert (left / "probe").is_dir() and find_abandoned(pool) == [left]
    remove_abandoned(pool)
    assert set(pool.iterdir()) == before and any((pool / "cache").iterdir()), (
        "its link to the cache is gone, the cache is not"
    )


def test_a_kind_that_runs_out_of_memory_gets_a_gpu_to_itself_and_one_that_fails_otherwise_counts_what_it_took(tmp_path):
    _, trials = make_sweep(tmp_path, "lr=1e-3")
    reasons = iter(["ValueError: planted", "OutOfMemoryError: CUDA out of memory"])

    def run(trial):
        trial.directory.set_status("failed", step=0, reason=next(reasons))
        yield

    peak = probe(trials, run, MadeUp(200.0))
    assert (peak.share, peak.describe()) == (
        1.0,
        "sc lr=0.001 seed=0 needs more than the 78.1 GiB of a GPU: one trial a GPU",
    )


def test_the_beginning_takes_less_of_everything_but_memory(tmp_path):
    _, trials = make_sweep(tmp_path, "hessian=true", "curvature.batch=3", "generate.num=100", "generate.batch=8")
    begun = shorten_trial(trials[0], "elsewhere")
    assert (begun.spec["steps"], begun.spec["batch"], begun.spec["model"]) == (
        2,
        trials[0].spec["batch"],
        trials[0].spec["model"],
    )
    assert (begun.curvature["batch"], begun.curvature["recorded_steps"], begun.generate["num"]) == (3, 1, 8)
