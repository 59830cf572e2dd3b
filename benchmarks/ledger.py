"""Measure what the ledger costs when nothing is left to train: ``python -m benchmarks.ledger``.

Pools of finished runs are made under ``--folder`` by the product's own writers: spec, status with its result, 200 steps
in metrics.jsonl and timing.jsonl, a curvature table of 40 recorded steps; none of the runs was trained. Then are timed,
in fresh processes with the files in the page cache:

* a finished sweep of ``--recognised`` runs that is started again: the whole command, and the same while its report has
  to be made anew;
* ``python -m stability.status`` of that study;
* ``--collected`` run directories read by `stability.runs.results.collect` and written as the parquet that the analysis
  reads.

Wall seconds, least and median of ``--repeats``, and the least of the processor's seconds (user and system, of children,
too), which what else runs disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._machine import machine
from benchmarks._runs import TEXT, MadeUp, write_run
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.curvature import CurvatureSpec
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.cache import prepare
from stability.runs.directory import RunDirectory, write_json
from stability.runs.provenance import provenance
from stability.runs.results import collect, write
from stability.runs.study import StudyFolder

STEPS, RECORDED, SEEDS = 200, 20, 10
MECHANISMS = ("sa", "sw", "sc", "mix")
RECOGNISED_S, COLLECTED_S = 5.0, 10.0


def words(folder: Path, name: str, num_runs: int) -> list[str]:
    """Return a sweep's command line over the four mechanisms, ten seeds each.

    Args:
        folder: folder for text, pools and reports.
        name: the study's and its pool's name.
        num_runs: runs in the sweep.
    """
    rates = ",".join(f"{1e-4 * 1.02**index:.6g}" for index in range(num_runs // (SEEDS * len(MECHANISMS))))
    data = ["data=text", f"data.path={folder / 'text.txt'}"]
    where = [f"runs_dir={folder / name}", f"reports_dir={folder / 'reports'}", f"name={name}"]
    return [
        *data,
        *where,
        f"mechanism=[{','.join(MECHANISMS)}]",
        f"lr=[{rates}]",
        f"seeds={SEEDS}",
        f"steps={STEPS}",
        "launcher=serial",
        "device=cpu",
    ]


def make_pool(folder: Path, name: str, num_runs: int) -> StudyFolder:
    """Make a pool of finished runs and the study with them.

    Args:
        folder: folder for text, pools and reports.
        name: the study's and its pool's name.
        num_runs: runs in the pool.
    """
    spec = read(SweepSpec, Invocation.of(words(folder, name, num_runs)))
    pool = Path(spec.runs_dir)
    corpus, origin = prepare(spec.data, pool / "cache"), provenance()
    ids = []
    for index, run in enumerate(spec.expand(corpus.fingerprint)):
        directory = RunDirectory(pool, run_id(run))
        write_json(directory.provenance_file, origin)
        made = made_up(run, corpus.unigram_nats, 2.0 + index % 7 / 10, spec.curvature)
        write_run(directory, run, made, spec.curvature)
        ids.append(directory.run_id)
    study = StudyFolder.of(pool, name)
    study.write(
        ids,
        spec=spec.model_dump(mode="json"),
        launcher=spec.launcher,
        command="python -m benchmarks.ledger",
        provenance=origin,
    )
    return study


def made_up(run: RunSpec, unigram_nll: float, val_nll: float, curvature: CurvatureSpec) -> MadeUp:
    """Return a stable run's numbers, without checkpoints.

    Args:
        run: its spec.
        unigram_nll: of token frequencies, in nats.
        val_nll: at its end, in nats.
        curvature: the α_max measurement's settings.
    """
    losses = [val_nll + 3 / (step + 1) for step in range(1, run.steps + 1)]
    recorded = {state: [1 / (300 + step / 3) for step in range(RECORDED)] for state in curvature.state}
    measured = {"alpha_max": {"terminal": recorded}, "phases": {"terminal": run.steps}}
    return MadeUp("stable", losses, val_nll, unigram_nll, **measured)


def timed(call: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Return (wall seconds, processor seconds) of each call."""
    seconds = []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), sum(os.times()[:4])
        call()
        seconds.append((time.perf_counter() - wall, sum(os.times()[:4]) - processor))
    return seconds


def command(*argv: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.DEVNULL)


def line(label: str, seconds: Sequence[tuple[float, float]], num_runs: int, limit_s: float | None = None) -> str:
    """Return a table row: wall and processor seconds, runs a second.

    Args:
        label: begins the row.
        seconds: each repeat's (wall, processor).
        num_runs: runs per repeat.
        limit_s: largest median wall seconds; None without a promise.
    """
    wall, processor = zip(*seconds, strict=True)
    median_s = statistics.median(wall)
    promised = "" if limit_s is None else f"  {'met' if median_s <= limit_s else 'MISSED'}: at most {limit_s:g} s"
    return (
        f"{label:58}{min(wall):>8.2f}{median_s:>8.2f} s{min(processor):>10.2f} s{num_runs / median_s:>9,.0f} "
        f"runs/s{promised}"
    )


def recognise(folder: Path, num_runs: int, repeats: int) -> None:
    """Print a finished sweep's times, with and without a new report, and its status's.

    Args:
        folder: folder for text, pools and reports.
        num_runs: runs in the sweep.
        repeats: times each command runs.
    """
    study, argv = make_pool(folder, "recognised", num_runs), words(folder, "recognised", num_runs)
    sweep, report = command("-m", "stability.sweep", *argv), folder / "reports" / "recognised.pdf"

    def with_report() -> None:
        report.unlink(missing_ok=True)
        sweep()

    print(line(f"finished sweep of {num_runs} runs, its report made anew", timed(with_report, repeats), num_runs))
    print(line(f"finished sweep of {num_runs} runs, recognised", timed(sweep, repeats), num_runs, RECOGNISED_S))
    status = command("-m", "stability.status", study.path.name, f"runs_dir={study.pool}")
    print(line(f"status of {num_runs} runs", timed(status, repeats), num_runs))
    print(line("python -c 'import torch', for comparison", timed(command("-c", "import torch"), repeats), num_runs))


def read_all(folder: Path, num_runs: int, repeats: int) -> None:
    """Print the times for collecting run directories into tables.

    Args:
        folder: folder for text, pools and reports.
        num_runs: run directories.
        repeats: times each call runs.
    """
    started = time.perf_counter()
    study = make_pool(folder, "collected", num_runs)
    made_s = time.perf_counter() - started
    num_files = sum(path.is_file() for path in study.pool.rglob("*"))
    print(f"{num_runs} run directories made in {made_s:.0f} s: {num_files} files")
    both = timed(lambda: write(collect(study.path), study.results), repeats)
    print(line(f"{num_runs} run directories into the results' tables", both, num_runs, COLLECTED_S))
    print(line("  of it collect", timed(lambda: collect(study.path), repeats), num_runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recognised",
        type=int,
        default=200,
        help=f"runs of the finished sweep, a multiple of {SEEDS * len(MECHANISMS)}; 0: left out",
    )
    parser.add_argument(
        "--collected", type=int, default=2000, help="runs that become tables, a multiple of the same; 0: left out"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the pools lie while they are measured; default: the system's temporary folder",
    )
    options = parser.parse_args()
    print(machine())
    print(f"{'':58}{'least':>8}{'median':>8}{'processor':>14}")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        if options.recognised:
            recognise(folder, options.recognised, options.repeats)
        if options.collected:
            read_all(folder, options.collected, options.repeats)


if __name__ == "__main__":
    main()
