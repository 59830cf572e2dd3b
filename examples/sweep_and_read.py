"""This example sweeps two mechanisms from Python, reads the study's tables with pandas and loads the best checkpoint.

    python examples/sweep_and_read.py [FOLDER]

The sweep is as small as one can be (a minute on two cores): what it finds is no result, what it shows is where the
numbers lie. Words are those of the command line; called again, it trains nothing and reads what is there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stability.runs.results import collect
from stability.training.checkpoint import load


def main(folder: str) -> None:
    runs = Path(folder) / "runs"
    words = f"name=example mechanism=[sa,sc] lr=[1e-3,1e-2,1e-1] seeds=1 steps=40 runs_dir={runs}"
    small = "model.width=32 model.layers=2 model.positions=32 curvature.recorded_steps=2 launcher=serial"
    command = [sys.executable, "-m", "stability.sweep", *words.split(), *small.split(), f"reports_dir={folder}/reports"]
    subprocess.run(command, check=True)

    study = collect(runs / "studies" / "example")
    runs_by_lr = study.runs.sort_values(by=["mechanism", "lr"])
    print(runs_by_lr[["mechanism", "lr", "seed", "status", "val_nll"]].to_string(index=False))
    terminal = study.curvature[study.curvature["phase"] == "terminal"].merge(study.runs[["run_id", "mechanism"]])
    print(terminal.groupby(["mechanism", "lr", "state"])["alpha_max"].median().unstack())

    best = study.runs.loc[study.runs["val_nll"].idxmin()]
    checkpoint = sorted((runs / best["run_id"] / "checkpoints").iterdir())[-1]
    spec, model = load(checkpoint)
    print(f"best: {spec.mechanism.name} at {best['lr']:g}, {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["example"]))
