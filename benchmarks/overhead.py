"""What the sweep engine costs on top of the training: ``python -m benchmarks.overhead``.

``--runs`` runs of ``--seconds`` seconds each (the number of steps is found by timing one run) are trained three times, in fresh pools:

* bare: ``--workers`` processes at a time, each training its share back to back with the product's loop and nothing around it. The ideal is the mean over
  the processes of what they spent within the loop: no import of torch, no start of a process in it;
* the sweep's command with ``launcher=ray``, from the shell's start to its exit: imports, data, Ray, locks, results' tables; no report;
* the same command again, which finds everything finished.

α_max is not measured: it is work, not overhead. Wall seconds and their ratio to the ideal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._machine import machine
from stability.command_line import read_spec
from stability.config import parse_run, run_id
from stability.data._cache import prepare
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training.loop import train

MOST = 1.15
CALIBRATION_STEPS = 150


def words(folder: Path, pool: str, num_runs: int, steps: int) -> list[str]:
    """The command line of a sweep of ``num_runs`` runs: four rates, the rest seeds."""
    data = ["data=text", f"data.path={folder / 'text.txt'}", f"runs_dir={folder / pool}", "name=overhead", "device=cpu"]
    what = ["mechanism=sa", "lr=[1e-3,2e-3,3e-3,4e-3]" if num_runs > 1 else "lr=[1e-3]", f"seeds={max(num_runs // 4, 1)}", f"steps={steps}"]
    return [*data, *what, "evaluation.every_steps=100000", "hessian=false", "report=false", "launcher=ray", "cpus_per_trial=1"]


def share_of(folder: Path, pool: str, num_runs: int, steps: int, worker: int, workers: int) -> dict[str, float]:
    """Train every ``workers``-th run of the sweep in this process; the seconds spent within the loop, and the seconds per step of the last run."""
    spec = read_spec("sweep", words(folder, pool, num_runs, steps))
    runs = spec.expand(prepare(spec.data, folder / "cache").fingerprint)[worker::workers]
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


def bare(folder: Path, pool: str, num_runs: int, steps: int, workers: int) -> list[dict[str, float]]:
    """`share_of` in as many processes at a time."""
    script = [sys.executable, "-m", "benchmarks.overhead", "--folder", str(folder), "--share"]
    jobs = [[*script, json.dumps([pool, num_runs, steps, worker, workers])] for worker in range(workers)]
    started = [subprocess.Popen(job, stdout=subprocess.PIPE, text=True) for job in jobs]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a bare process failed; its traceback is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def timed(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "stability.sweep", *argv], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(folder: Path, num_runs: int, seconds: float, workers: int) -> None:
    (folder / "text.txt").write_text("".join(f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000)))
    step_s = max(share["step_s"] for share in bare(folder, "calibration", workers, CALIBRATION_STEPS, workers))
    steps = round(seconds / step_s)
    print(f"{num_runs} runs of {steps} steps of {1e3 * step_s:.1f} ms, {workers} at a time")
    ideal_s = sum(share["spent_s"] for share in bare(folder, "bare", num_runs, steps, workers)) / workers
    argv = words(folder, "swept", num_runs, steps)
    swept_s = timed(argv)
    again_s = timed(argv)
    print(f"{'ideal: within the training loop, bare processes':58}{ideal_s:>8.1f} s  ({ideal_s * workers / num_runs:.2f} s a run)")
    verdict = "met" if swept_s <= MOST * ideal_s else "MISSED"
    print(f"{'the sweep, from the shell to its exit':58}{swept_s:>8.1f} s  {swept_s / ideal_s:.3f} × ideal, {verdict}: at most {MOST:g}")
    print(f"{'the same command again':58}{again_s:>8.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--seconds", type=float, default=5.0, help="of training each")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time; as many as the machine has cores")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        print(json.dumps(share_of(options.folder, *options.share)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options.runs, options.seconds, options.workers)


if __name__ == "__main__":
    main()
