"""Measure what the logs of signals add to training: ``python -m benchmarks.signals``.

Runs of ``model=nano`` take turns in one process, step by step: without logs, with ``log.activations=20``, with
``log.curvature=50``, and a second one without logs, whose ratio to the first is the noise. A ratio is of the same step
of both. The share is what a log adds to the time of training: the median ratio at its own steps less 1, by its
interval. On a CPU the seconds are those that the process computed, so that a machine that others use may be timed on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks._machine import machine
from benchmarks._training import Size, interleaved, replica

LOGS = {"activations": (20, 0.02), "curvature": (50, 0.04)}  # interval, and the largest share that is wanted


def measure(mechanism: str, objective: str, batch: int, steps: int, device: str, pool: Path) -> None:
    """Print one mechanism's rows.

    Args:
        mechanism: name of the mechanism.
        objective: name of the objective.
        batch: sequences a step.
        steps: steps of each run.
        device: "cpu" or "cuda".
        pool: folder of the prepared data.
    """
    logs = {"plain": {}, **{name: {name: every} for name, (every, _) in LOGS.items()}, "again": {}}
    parts, nano = {"mechanism": mechanism, "objective": objective}, Size(4, 64, 4, 64, batch)
    runs = {key: replica(parts | {"log": log}, nano, steps + 2, device, pool) for key, log in logs.items()}
    taken = dict.fromkeys(runs, 0)

    def step(key: str) -> None:
        taken[key] += 1
        runs[key].train_step(taken[key])

    seconds = interleaved({key: lambda key=key: step(key) for key in runs}, steps, device)
    for name, (every, most) in LOGS.items():
        # two steps of warm-up come first
        own = [index for index in range(steps) if (index + 3) % every == 0]
        low, middle, high = statistics.quantiles([seconds[name][i] / seconds["plain"][i] for i in own])
        noise = statistics.median(seconds["again"][i] / seconds["plain"][i] for i in range(steps))
        share = (middle - 1) / every
        milliseconds = 1e3 * statistics.median(seconds["plain"])
        print(
            f"{mechanism:<6}{objective:<6}{batch:>5}  {f'{name}={every}':<16}{milliseconds:>8.2f}{middle:>10.2f}"
            f"{f'{low:.2f}-{high:.2f}':>14}{share:>9.2%}{noise:>10.4f}   {'met' if share <= most else 'MISSED'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    asked = parser.parse_args()
    print(machine())
    print("            batch                    ms a step  at its steps  quartiles  of all   noise")
    with tempfile.TemporaryDirectory() as folder:
        for mechanism, objective, batch in (("sa", "mlm", 8), ("sa", "mlm", 16), ("gla", "ar", 8)):
            measure(mechanism, objective, batch, asked.steps, asked.device, Path(folder))


if __name__ == "__main__":
    main()
