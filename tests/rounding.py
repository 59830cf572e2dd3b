"""Run the numeric tests as other processors round, and print how near their tolerances they come: `make rounding`.

Exits with 1 if a test fails, or if a comparison that rounding moves is above `LIMIT` under some setting.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.margins import Ratios, largest, read

# the folders whose tests compare what torch computes; the others compare text, files, counts and times
FOLDERS = (
    *("mechanisms", "curvature", "kernels", "residuals", "models", "objectives", "optimizers", "norms", "ffns"),
    *("positions", "linears", "training", "probes", "structure"),
)
# What is set for each run of those tests. `native`: what this processor offers most. A CPU without AVX2 or AVX-512 takes
# the widest that it has instead.
SETTINGS: dict[str, dict[str, str]] = {
    "native": {},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "moved inputs": {},
}
LIMIT = 0.7
# A ratio that moves by less than this share of its room to 1 is about sampling or a step's size, not about rounding.
STILL = 0.1


def divided(by_setting: Mapping[str, Ratios]) -> tuple[Ratios, Ratios]:
    """Return the largest ratio of each comparison, of those that rounding moves and of those that it does not.

    Args:
        by_setting: For each setting error ÷ tolerance by test and line of code; what is missing is 0.
    """
    moving, still = {}, {}
    for key in {key for ratios in by_setting.values() for key in ratios}:
        ratios = [each.get(key, 0.0) for each in by_setting.values()]
        high, low = max(ratios), min(ratios)
        # of one setting nothing is known, and above 1 a test has failed
        is_still = len(ratios) > 1 and high <= 1 and high - low < STILL * (1 - high)
        (still if is_still else moving)[key] = high
    return moving, still


def at_risk(by_setting: Mapping[str, Ratios]) -> Ratios:
    """Return the comparisons above `LIMIT` that rounding moves."""
    return {key: ratio for key, ratio in divided(by_setting)[0].items() if ratio > LIMIT}


def run_tests(setting: str, folder: Path, jobs: int, paths: list[str]) -> tuple[int, str]:
    """Run pytest under one setting; its exit code and last line."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["-p", "tests.margins", f"--margins={folder}", "-n", str(jobs), "--dist", "worksteal", *paths]
    words += ["--moved"] if setting == "moved inputs" else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **SETTINGS[setting]}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], env=environment, capture_output=True, text=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.txt").write_text(done.stdout + done.stderr)
    for failed in re.findall(r"^_+ (.+) _+$", done.stdout, re.M):
        print(f"  failed: {failed}")
    return done.returncode, (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rounding", description=__doc__)
    parser.add_argument("paths", nargs="*", default=[f"tests/{name}" for name in FOLDERS], help="tests to run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    parser.add_argument("--folder", type=Path, default=Path("build/rounding"), help="where the ratios are written")
    options = parser.parse_args()
    by_setting, is_green = {}, True
    for setting in options.settings:
        start, folder = time.perf_counter(), options.folder.resolve() / setting.replace(" ", "_")
        code, last = run_tests(setting, folder, options.jobs, options.paths)
        by_setting[setting], is_green = read(folder), is_green and code == 0
        print(f"{setting}: {last} ({time.perf_counter() - start:.0f} s)", flush=True)
    moving, still = divided(by_setting)
    print("largest error ÷ tolerance under any setting:", *largest(moving), sep="\n")
    print(
        "the same of those that rounding does not move (sampling, steps of differences):", *largest(still, 5), sep="\n"
    )
    if risky := at_risk(by_setting):
        print(f"above {LIMIT}:", *largest(risky, len(risky)), sep="\n")
    return int(bool(risky) or not is_green)


if __name__ == "__main__":
    sys.exit(main())
