"""Measure what each launcher costs on top of the training: ``python -m benchmarks.launchers``.

As `benchmarks.overhead`, in turns: ``--runs`` runs of ``--seconds`` seconds each are trained bare, half of them before
and half after, and by the sweep's command with every one of ``--launchers`` in between, each in a fresh pool. Beside
the ratio to the ideal (of serial, which takes one run at a time: to as many times the ideal as there are workers):

* first run: seconds from the shell's start until the first run has begun;
* again: the same command once more, which finds everything finished;
* a round: what one more round of a search takes, its training (which is every launcher's) included: two sweeps of a
  population of four in short segments, one of them of ``--rounds`` more.

A machine that others use disturbs all of it: read the median of several ``--repeats``, on a quiet one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks._machine import machine
from benchmarks.overhead import CALIBRATION_STEPS, MOST, bare, timed, words

SEGMENT_STEPS = 20
COLUMNS = ("wall s", "× ideal", "first run s", "again s", "a round s")


def begun_at(pool: Path) -> float:
    """Return the start of a pool's first run, in seconds since 1970."""
    return min(path.stat().st_mtime for path in pool.glob("*/provenance.json"))


def round_s(folder: Path, pool: str, launcher: str, num_more: int) -> float:
    """Return the seconds per additional round of a search, a mean over ``num_more``.

    Args:
        folder: the pools' folder.
        pool: begins the pools' names.
        launcher: the launcher.
        num_more: additional rounds of the longer search.
    """
    taken = []
    for num_rounds in (2, 2 + num_more):
        own = words(folder, f"{pool}-{num_rounds}", 4, num_rounds * SEGMENT_STEPS, launcher)
        taken.append(timed([*own, "search=pbt", f"search.every_steps={SEGMENT_STEPS}"]))
    return (taken[1] - taken[0]) / num_more


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Train the runs bare and by each launcher, ``--repeats`` times; print a row each, then median ratios.

    Files go to ``folder``.
    """
    workers, num_runs = options.workers, options.runs
    lines = [f"Line {number} of a text that says little, {number * number % 97} times.\n" for number in range(4000)]
    (folder / "text.txt").write_text("".join(lines))
    shares = bare(folder, "calibration", workers, CALIBRATION_STEPS, range(workers), workers)
    step_s = max(share["step_s"] for share in shares)
    steps = round(options.seconds / step_s)
    print(f"{num_runs} runs of {steps} steps of {1e3 * step_s:.1f} ms, {workers} at a time")
    print(f"{'':14}{'ideal':>10}" + "".join(f"{name:>14}" for name in COLUMNS), flush=True)
    ratios: dict[str, list[float]] = defaultdict(list)
    for repeat in range(1, options.repeats + 1):

        def half(firsts: range, repeat: int = repeat) -> float:
            shares = bare(folder, f"bare{repeat}", num_runs, steps, firsts, 2 * workers)
            return sum(share["spent_s"] for share in shares) / workers

        before_s, rows = half(range(workers)), {}
        for launcher in options.launchers:
            pool = f"{launcher}{repeat}"
            started, argv = time.time(), words(folder, pool, num_runs, steps, launcher)
            wall_s = timed(argv)
            first_s, again_s = begun_at(folder / pool) - started, timed(argv)
            rows[launcher] = wall_s, first_s, again_s, round_s(folder, f"{pool}-rounds", launcher, options.rounds)
        ideal_s = before_s + half(range(workers, 2 * workers))
        for launcher, (wall_s, first_s, again_s, each_s) in rows.items():
            ratio = wall_s / (ideal_s * (workers if launcher == "serial" else 1))
            ratios[launcher].append(ratio)
            numbers = f"{wall_s:>14.1f}{ratio:>14.3f}{first_s:>14.1f}{again_s:>14.1f}{each_s:>14.2f}"
            print(f"{repeat} {launcher:12}{ideal_s:>10.1f}{numbers}", flush=True)
    for launcher, each in ratios.items():
        print(f"{launcher}: median {statistics.median(each):.3f} × ideal (at most {MOST:g} is the aim)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", default=["serial", "ray"])
    parser.add_argument("--runs", type=int, default=24, help="a multiple of 4 and of twice the workers")
    parser.add_argument("--seconds", type=float, default=5.0, help="of training each")
    parser.add_argument("--repeats", type=int, default=3, help="of it all; the median ratio counts")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time; as many as the machine has cores")
    parser.add_argument("--rounds", type=int, default=4, help="that the longer search has more than the shorter")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options)


if __name__ == "__main__":
    main()
