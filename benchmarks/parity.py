"""Make a study's Table 5 once more, each recorded step by three methods: ``python -m benchmarks.parity
runs/studies/quickstart``.

Every method sees the same θ and the same u: the steps are taken once (curvature by taylor), and each is measured again
by double backward and by the paper's raw central difference, ε = 1e-4 (parity). Printed by mechanism, learning rate and
state: how often parity's sign of uᵀHu and its verdict (α_max above the rate) differ from taylor's, the relative error
of uᵀHu (median; parity's worst), and the table's medians and shares by method. The study is only read; where its
prepared data has gone, that is prepared again under its own cache.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.sections.steps import find_other_sign, relative_difference
from benchmarks._machine import machine
from stability.build import resolve_device
from stability.config.curvature import CurvatureSpec
from stability.curvature import directional
from stability.probes.checkpoints import Loaded
from stability.probes.curvature.checkpoint_descent import Probe
from stability.probes.curvature.descent import Step
from stability.runs.directory import RunDirectory, read_json
from stability.runs.phases import phases
from stability.runs.study import StudyFolder

METHODS = ("taylor", "double_backward", "parity")


def by_double_backward(step: Step) -> dict[str, Any]:
    """Return uᵀHu and α_max by double backward, at taylor's θ and u."""
    found = directional(step.loss, step.params, step.direction, "double_backward", batches=step.batches)
    return {"double_backward_curvature": found.curvature, "double_backward_alpha_max": found.alpha_max}


def measured(directory: RunDirectory, curvature: CurvatureSpec) -> Iterator[dict[str, Any]]:
    """Yield a run's recorded steps, one row each, with the protocol's own difference (`parity_steps`).

    A run without a checkpoint has no rows.
    """
    folder = phases(directory, curvature.phase).get(curvature.phase)
    if folder is None:
        return
    loaded = Loaded.read(folder, directory.path.parent / "cache")
    spec = loaded.spec
    for state in curvature.state:
        probe = Probe(loaded, curvature, resolve_device("cpu"), observe=by_double_backward)
        for row in probe.rows(state):
            if row is not None and row["method"] == "taylor":
                taylor = {"taylor_curvature": row["curvature"], "taylor_alpha_max": row["alpha_max"]}
                yield {"mechanism": spec.mechanism.name, "lr_peak": spec.lr_peak, "state": state, **row, **taylor}


def summary(rows: pd.DataFrame) -> dict[str, Any]:
    """Return one line of the table over a cell's rows; medians are over finite α_max, as in Table 5."""
    exact, parity = rows["taylor_curvature"], rows["parity_curvature"]
    rate = rows["lr"]
    line: dict[str, Any] = {"steps": len(rows), "sign differs": int(np.sum(find_other_sign(exact, parity)))}
    line["verdict differs"] = int(((rows["taylor_alpha_max"] > rate) != (rows["parity_alpha_max"] > rate)).sum())
    for method in METHODS[1:]:
        error: Any = relative_difference(exact, rows[f"{method}_curvature"])
        line[f"{method} error"] = f"{error.median():.1e}"
        line |= {"worst": f"{error.max():.1e}"} if method == "parity" else {}
    for method in METHODS:
        finite = rows[f"{method}_alpha_max"][rows[f"{method}_alpha_max"].abs() < math.inf]
        median = f"{finite.median():.2e}" if len(finite) else "--"
        line[method] = f"{median} {100 * (rows[f'{method}_alpha_max'] > rate).mean():.0f}%"
    return line


def print_tables(rows: pd.DataFrame) -> None:
    """Print each state's medians and stable shares by method, and the methods' differences."""
    for state, of_state in rows.groupby("state", sort=False):
        print(
            f"\nstate {state}: median of the finite α_max and share of stable steps, by each method; errors: median "
            "of |a − b| / max(|a|, |b|) of uᵀHu"
        )
        cells = [
            {"mechanism": name, "lr": f"{lr:g}", **summary(part)}
            for (name, lr), part in of_state.groupby(["mechanism", "lr_peak"])
        ]
        cells += [{"mechanism": name, "lr": "all", **summary(part)} for name, part in of_state.groupby("mechanism")]
        cells.append({"mechanism": "all", "lr": "all", **summary(of_state)})
        print(pd.DataFrame(cells).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a study's folder, runs/studies/<name>")
    parser.add_argument("--recorded-steps", type=int, default=25)
    parser.add_argument("--phase", choices=("terminal", "earliest"), default="terminal")
    parser.add_argument("--seed", type=int, help="runs of this seed only")
    parser.add_argument("--save", type=Path, help="parquet file for the rows")
    options = parser.parse_args()
    curvature = CurvatureSpec(
        phase=options.phase, recorded_steps=options.recorded_steps, parity_steps=options.recorded_steps, method="taylor"
    )
    study, started = StudyFolder(options.study), time.time()
    runs = [directory for directory in study.runs() if options.seed is None or seed_of(directory) == options.seed]
    rows = pd.DataFrame([row for directory in runs for row in measured(directory, curvature)])
    counts = f"{len(runs)} runs, {len(rows)} steps, {options.phase} checkpoints"
    print(f"{machine()}\n{options.study}: {counts}, {time.time() - started:.0f} s")
    print_tables(rows)
    if options.save is not None:
        rows.to_parquet(options.save)


def seed_of(directory: RunDirectory) -> int:
    return read_json(directory.spec_file)["seed"]


if __name__ == "__main__":
    main()
