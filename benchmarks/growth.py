"""Measure how the ledger's commands grow with a study: ``python -m benchmarks.growth``.

For each of ``--runs`` a finished study is made as in `benchmarks.report_scale`; nothing is trained. Each command then
runs once in a fresh process, the files in the page cache:

* ledger: the sweep's command, which collects every run into the results' tables and prints the study's; tables and
  answers of an earlier measurement are removed first;
* recognition: the same command again, which finds everything finished and nothing changed;
* status: ``python -m stability.status`` of the study;
* report: ``python -m stability.report``, the PDF.

Processor seconds (user and system), largest resident memory in MiB, and the size of the PDF. After the second size the
last columns are the powers of the number of runs by which seconds and memory grew from the size before: 1 is linear.
Sizes are taken in order, so that a long measurement may be stopped at any time.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path

from benchmarks._machine import machine
from benchmarks._runs import TEXT
from benchmarks.recognition import finish_study
from benchmarks.report_scale import Spent, spent, words
from stability.runs.study import StudyFolder

COMMANDS = ("ledger", "recognition", "status", "report")
MOST_POWER = 1.15  # near linear


def command_lines(folder: Path, num_runs: int) -> dict[str, list[str]]:
    """Return each command's words, after Python's name.

    Args:
        folder: place of the study.
        num_runs: its runs.
    """
    study = StudyFolder.of(folder / "runs", f"runs{num_runs}")
    sweep = ["-m", "stability.sweep", *words(folder, num_runs), "report=false"]
    where = [f"runs_dir={study.pool}", f"reports_dir={folder / 'reports'}"]
    return {
        "ledger": sweep,
        "recognition": sweep,
        "status": ["-m", "stability.status", study.path.name, where[0]],
        "report": ["-m", "stability.report", f"name={study.path.name}", *where],
    }


def forget(study: StudyFolder) -> None:
    """Remove a study's tables and the pool's stored answers, so that the ledger collects the runs again."""
    for folder in (study.results, study.pool / "cache" / "answers"):
        shutil.rmtree(folder, ignore_errors=True)


def row(name: str, num_runs: int, taken: Spent, before: tuple[int, Spent] | None) -> str:
    """Return a command's table row.

    Args:
        name: the command.
        num_runs: runs of the study.
        taken: its cost.
        before: number of runs and cost of the size before, if any.
    """
    line = f"{name:13}{num_runs:>7,}{taken.processor_s:>13.2f}{taken.peak_mib:>9,.0f}"
    if before is None:
        return line
    ratio = math.log(num_runs / before[0])
    powers = [
        math.log(now / then) / ratio
        for now, then in ((taken.processor_s, before[1].processor_s), (taken.peak_mib, before[1].peak_mib))
    ]
    met = "met" if max(powers) <= MOST_POWER else "MISSED"
    return f"{line}{powers[0]:>9.2f}{powers[1]:>9.2f}  {met}: at most {MOST_POWER:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[1000, 5200, 20_000], help="multiples of 200, from 2000 on of 400"
    )
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--folder", type=Path, help="where the studies lie, and stay; default: a temporary folder")
    options = parser.parse_args()
    print(machine())
    print(f"{'':13}{'runs':>7}{'processor s':>13}{'MiB':>9}{'s: power':>9}{'MiB':>9}", flush=True)
    before: dict[str, tuple[int, Spent]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT)
        for num_runs in options.runs:
            forget(finish_study(folder, num_runs))
            argvs = command_lines(folder, num_runs)
            for command in COMMANDS:
                if command in options.commands or (command == "ledger" and "recognition" in options.commands):
                    taken = spent(argvs[command])
                    print(row(command, num_runs, taken, before.get(command)), flush=True)
                    before[command] = num_runs, taken
            pdf = folder / "reports" / f"runs{num_runs}.pdf"
            if pdf.exists():
                print(f"{'PDF':13}{num_runs:>7,}{pdf.stat().st_size / 2**20:>12.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
