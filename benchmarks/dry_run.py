"""Measure a plan's seconds of processor: ``python -m benchmarks.dry_run``.

``python -m stability.sweep study=quickstart dry_run=true`` runs in fresh processes, the files in the page cache:

* first: in an empty folder, no time of a step is stored;
* prepared, first: in a pool with prepared data, no time of a step is stored;
* prepared, again: the same once more;
* import torch: ``python -c 'import torch'``, for comparison.

The four are taken in turns, ``--repeats`` times. Wall seconds, and the processor's (user and system), which other work
on the machine disturbs less: least and median.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks._machine import machine
from benchmarks.report_scale import Spent, spent
from stability.config.parts import part
from stability.corpora.cache import prepare

LIMIT_S = 4.0  # of a processor


def plan(pool: Path) -> Spent:
    return spent(["-m", "stability.sweep", "study=quickstart", "dry_run=true", f"runs_dir={pool}"])


def take_turn(folder: Path, prepared: Path) -> dict[str, Spent]:
    """Run each command once, and return its cost by name.

    Args:
        folder: an empty folder, left empty.
        prepared: a pool with prepared data.
    """
    taken = {"first": plan(folder / "runs")}
    shutil.rmtree(folder / "runs", ignore_errors=True)
    shutil.rmtree(prepared / "cache" / "timings", ignore_errors=True)
    for name in ("prepared, first", "prepared, again"):
        taken[name] = plan(prepared)
    return taken | {"import torch": spent(["-c", "import torch"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    print(f"{'':18}{'wall s':>16}{'processor s':>16}\n{'':18}{'least  median':>16}{'least  median':>16}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder, prepared = Path(name) / "new", Path(name) / "runs"
        folder.mkdir()
        prepare(part("data", {"name": "stdlib"}), prepared / "cache")
        turns = [take_turn(folder, prepared) for _ in range(options.repeats)]
    for command in turns[0]:
        wall, processor, _ = zip(*(turn[command] for turn in turns), strict=True)
        columns = "".join(f"{min(each):>8.2f}{statistics.median(each):>8.2f}" for each in (wall, processor))
        met = f"  {'met' if min(processor) <= LIMIT_S else 'MISSED'}: at most {LIMIT_S:g} s"
        print(f"{command:18}{columns}{met if command != 'import torch' else ''}", flush=True)


if __name__ == "__main__":
    main()
