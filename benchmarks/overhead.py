"""Measure what the sweep engine costs on top of the training: ``python -m benchmarks.overhead``.

``--runs`` runs of ``--seconds`` seconds each (the number of steps is found by timing one run) are trained twice, in
fresh pools, and then found finished:

* bare, half of the runs before the sweep and half after it, since a machine is not equally fast all the time:
  ``--workers`` processes at a time, each training its share back to back with the product's loop and nothing around it.
  The ideal is the mean over the processes of what they spent within the loop: no import of torch, no start of a process
  in it;
* the sweep's command with ``launcher=ray``, from the shell's start to its exit: imports, data, Ray, locks, results'
  tables; no report;
* the same command again, which finds everything finished.

All of it ``--repeats`` times: two runs of the same thing differ by a tenth on a machine that others share. α_max is not
measured: it is work, not overhead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._machine import machine
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.config.sweep import SweepSpec
from stability.corpora.cache import prepare
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training.run import train

MOST = 1.15
CALIBRATION_STEPS = 150


def words(folder: Path, pool: str, num_runs: int, steps: int, launcher: str = "ray") -> list[str]:
    """Return a sweep's command line: four rates, the rest seeds.

    Args:
        folder: folder for text and pools.
        pool: the pool's name.
        num_runs: runs in the sweep.
        steps: steps per run.
        launcher: the launcher.
    """
    data = ["data=text", f"data.path={folder / 'text.txt'}", f"runs_dir={folder / pool}", "name=overhead", "device=cpu"]
    what = [
        "mechanism=sa",
        "lr=[1e-3,2e-3,3e-3,4e-3]" if num_runs > 1 else "lr=[1e-3]",
        f"seeds={max(num_runs // 4, 1)}",
        f"steps={steps}",
    ]
    return [
        *data,
        *what,
        "evaluation.every_steps=100000",
        "hessian=false",
        "report=false",
        f"launcher={launcher}",
        *(["cpus_per_trial=1"] if launcher == "ray" else []),
    ]


def share_of(folder: Path, pool: str, num_runs: int, steps: int, first: int, every: int) -> dict[str, float]:
    """Train every ``every``-th run in this process.

    Args:
        folder: folder for text and pools.
        pool: the pool's name.
        num_runs: runs in the sweep.
        steps: steps per run.
        first: the first run's index.
        every: distance between runs.

    Returns:
        Seconds spent within the loop (``spent_s``), and per step in the last run (``step_s``).
    """
    spec = read(SweepSpec, Invocation.of(words(folder, pool, num_runs, steps)))
    runs = spec.expand(prepare(spec.data, folder / "cache").fingerprint)[first::every]
    spent_s = 0.0
    directory = RunDirectory(folder / pool, "")
    for run in runs:
        run = parse_run(run.model_dump(mode="json"))
        directory = RunDirectory(folder / pool, run_id(run))
        started = time.perf_counter()
        for _ in train(run, directory, cache_dir=folder / "cache", device="cpu"):
            pass
        spent_s += time.perf_counter() - started
    clock = [row["wall_s"] for row in read_jsonl(directory.timing_file)]
    return {"spent_s": spent_s, "step_s": (clock[-1] - clock[len(clock) // 3]) / (len(clock) - 1 - len(clock) // 3)}


def bare(
    folder: Path, pool: str, num_runs: int, steps: int, firsts: Sequence[int], every: int
) -> list[dict[str, float]]:
    """Run `share_of` in parallel processes, one for each in ``firsts``.

    Args:
        folder: folder for text and pools.
        pool: the pool's name.
        num_runs: runs in the sweep.
        steps: steps per run.
        firsts: each process's first run, by index.
        every: distance between a process's runs.

    Raises:
        RuntimeError: a process failed.
    """
    script = [sys.executable, "-m", "benchmarks.overhead", "--folder", str(folder), "--share"]
    jobs = [[*script, json.dumps([pool, num_runs, steps, first, every])] for first in firsts]
    started = [subprocess.Popen(job, stdout=subprocess.PIPE, text=True) for job in jobs]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a bare process failed; its traceback is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def timed(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "stability.sweep", *argv], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(folder: Path, num_runs: int, seconds: float, workers: int, repeats: int) -> None:
    """Print sweep's and bare training's wall seconds by turn, and their median ratio.

    Args:
        folder: folder for text and pools.
        num_runs: runs in the sweep.
        seconds: training time per run.
        workers: runs at a time.
        repeats: turns.
    """
    (folder / "text.txt").write_text(
        "".join(f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000))
    )
    step_s = max(
        share["step_s"] for share in bare(folder, "calibration", workers, CALIBRATION_STEPS, range(workers), workers)
    )
    steps = round(seconds / step_s)
    print(f"{num_runs} runs of {steps} steps of {1e3 * step_s:.1f} ms, {workers} at a time; wall seconds")
    print(f"{'':8}{'ideal':>10}{'(before':>10}{'after)':>10}{'sweep':>10}{'× ideal':>10}{'again':>10}")
    ratios = [_once(folder, f"{index}", num_runs, steps, workers) for index in range(1, repeats + 1)]
    middle = statistics.median(ratios)
    print(f"median {middle:.3f} × ideal, {'met' if middle <= MOST else 'MISSED'}: at most {MOST:g}")


def _once(folder: Path, label: str, num_runs: int, steps: int, workers: int) -> float:
    """Print a row, the sweep between two halves of the bare runs; return its ratio to the ideal."""

    def half(firsts: Sequence[int]) -> float:
        return (
            sum(share["spent_s"] for share in bare(folder, f"bare{label}", num_runs, steps, firsts, 2 * workers))
            / workers
        )

    argv = words(folder, f"swept{label}", num_runs, steps)
    before_s = half(range(workers))
    swept_s, again_s = timed(argv), timed(argv)
    after_s = half(range(workers, 2 * workers))
    ideal_s = before_s + after_s
    print(
        f"{label:8}{ideal_s:>10.1f}{before_s:>10.1f}{after_s:>10.1f}{swept_s:>10.1f}"
        f"{swept_s / ideal_s:>10.3f}{again_s:>10.1f}",
        flush=True,
    )
    return swept_s / ideal_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24, help="a multiple of 4 and of twice the workers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of training each")
    parser.add_argument("--repeats", type=int, default=3, help="of it all; the median ratio counts")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time; as many as the machine has cores")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        print(json.dumps(share_of(options.folder, *options.share)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options.runs, options.seconds, options.workers, options.repeats)


if __name__ == "__main__":
    main()
