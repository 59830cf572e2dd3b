"""Measure how soon a finished study is recognised: ``python -m benchmarks.recognition``.

For each of ``--runs`` a finished study is made as in `benchmarks.report_scale`; nothing is trained. Each command is
then timed in a fresh process, the files in the page cache:

* first: the sweep's command, which collects the runs and prints their tables (no PDF);
* again: the same command, which finds everything finished and nothing changed;
* long way: again without the stored answer, as after a change of code: it reads the words, imports torch, prepares the
  data and reads every run;
* status: ``python -m stability.status`` of the study.

Wall and processor seconds (user and system), each the least of ``--repeats``; the ratio is of processor seconds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks._machine import machine
from benchmarks._runs import TEXT
from benchmarks.report_scale import Spent, make_study, spent, words
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.sweep import SweepSpec
from stability.probes.curvature.alpha_max import list_missing_phases
from stability.probes.curvature.protocol import StoredSteps
from stability.runs.study import StudyFolder

LIMITS_S = {200: 1.0, 5200: 8.0}  # of a processor, for `again`


def least(argv: list[str], repeats: int, forgotten: Path | None = None) -> Spent:
    """Return a command's least cost.

    Args:
        argv: its words, after Python's name.
        repeats: number of times.
        forgotten: folder removed before each time.
    """
    found = []
    for _ in range(repeats):
        if forgotten is not None:
            shutil.rmtree(forgotten)
        found.append(spent(argv))
    return min(found, key=lambda each: each.processor_s)


def finish_study(folder: Path, num_runs: int) -> StudyFolder:
    """Return a finished study of ``num_runs`` runs under ``folder``, made unless it is there."""
    study = StudyFolder.of(folder / "runs", f"runs{num_runs}")
    if not study.file.exists():
        make_study(folder, num_runs)
        curvature = read(SweepSpec, Invocation.of(words(folder, num_runs))).curvature
        for directory in study.runs():
            for phase in list_missing_phases(directory, curvature):  # of diverged runs
                StoredSteps(directory.curvature_file(phase), curvature).write([])
    return study


def measure(folder: Path, num_runs: int, repeats: int) -> None:
    """Time the commands on a study of ``num_runs`` runs under ``folder``, and print a row each.

    Args:
        folder: place of the study, which stays there.
        num_runs: its runs.
        repeats: times of each command.
    """
    study = finish_study(folder, num_runs)
    answers = study.pool / "cache" / "answers"
    sweep = ["-m", "stability.sweep", *words(folder, num_runs), "report=false"]
    status = ["-m", "stability.status", study.path.name, f"runs_dir={study.pool}"]
    rows = {"first": spent(sweep), "again": least(sweep, repeats)}
    rows |= {"long way": least(sweep, repeats, answers), "status": least(status, repeats)}
    for name, taken in rows.items():
        limit = LIMITS_S.get(num_runs) if name == "again" else None
        met = "" if limit is None else f"  {'met' if taken.processor_s <= limit else 'MISSED'}: at most {limit:g} s"
        ratio = taken.processor_s / rows["long way"].processor_s
        print(f"{num_runs:>6,} {name:12}{taken.wall_s:>8.2f}{taken.processor_s:>13.2f}{ratio:>12.3f}{met}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[200, 5200], help="multiples of 200, from 2000 on of 400"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the studies lie, and stay; default: a temporary folder")
    options = parser.parse_args()
    print(machine())
    print(f"{'runs':>6} {'command':12}{'wall s':>8}{'processor s':>13}{'× long way':>12}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT)
        for num_runs in options.runs:
            measure(folder, num_runs, options.repeats)


if __name__ == "__main__":
    main()
