"""Measure the quickstart in two checkouts, in turns: ``python -m benchmarks.quickstart ../before --turns 2``.

Each turn runs ``python -m stability.sweep launcher=serial logger=files`` in an empty folder, with its α_max, tables and
PDF, first in the other checkout and then in this one. It prints wall time and the processor's seconds (of the command
and all of its processes), their shares of training and of α_max by the runs' own clocks, and the ratio after over
before. Other work on the machine adds to the wall time, much less to the processor's. ``--words`` adds to the command
line, e.g. for fewer runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks._machine import machine

HERE = Path(__file__).parents[1]


class Seconds(NamedTuple):
    """Seconds of one quickstart: wall time, processor's, training and α_max by the runs' own clocks."""

    wall: float
    processor: float
    training: float
    alpha_max: float


def run(checkout: Path, more: list[str]) -> Seconds:
    """Run the quickstart of a checkout in an empty folder.

    Args:
        checkout: folder with the packages.
        more: further words of the command line.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["launcher=serial", "logger=files", f"runs_dir={folder}/runs", f"reports_dir={folder}/reports", *more]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "stability.sweep", *words],
            cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        runs = [path.parent for path in Path(folder, "runs").glob("*/timing.jsonl")]
        training = sum(_rows(run / "timing.jsonl")[-1]["wall_s"] for run in runs)
        alpha_max = sum(row["wall_s"] for run in runs for row in _rows(run / "curvature_timing.jsonl"))
    return Seconds(wall, processor, training, alpha_max)


def _rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=2, help="turns (default 2)")
    parser.add_argument("--words", nargs="*", default=[], help="further words of the command line")
    arguments = parser.parse_args()
    print(machine())
    print(f"{'':<8}{'turn':>6}{'wall s':>9}{'processor s':>13}{'training s':>12}{'alpha_max s':>13}")
    taken: dict[str, list[Seconds]] = {"before": [], "after": []}
    for turn in range(arguments.turns):
        for name, checkout in (("before", arguments.before.resolve()), ("after", HERE)):
            seconds = run(checkout, arguments.words)
            taken[name].append(seconds)
            print(
                f"{name:<8}{turn + 1:>6}{seconds.wall:>9.0f}{seconds.processor:>13.0f}{seconds.training:>12.0f}"
                f"{seconds.alpha_max:>13.0f}",
                flush=True,
            )
    ratios = [after.processor / before.processor for before, after in zip(taken["before"], taken["after"], strict=True)]
    print(f"after / before, processor: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


if __name__ == "__main__":
    main()
