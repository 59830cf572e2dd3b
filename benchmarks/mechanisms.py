"""Time of a training step of each mechanism over that of softmax attention (`sa`), side by side in one process:
``python -m benchmarks.mechanisms``.

A step is forward, backward, gradient clipping and AdamW on the project's own model, masked LM over bytes, float32, on
one CPU thread. The mechanisms take turns, so that what else the machine does hits all alike; the ratio is of each turn,
its median is what the claim is about.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.parse import parse_run

BATCH, LAYERS, HEADS, BYTES = 8, 4, 4, 257
# name, positions, width, ξ of sc, the most that a step of sc may cost in steps of sa
SIZES = (("N=128 d=64 xi=16", 128, 64, 16, 3.0), ("N=256 d=128 xi=32", 256, 128, 32, 2.5))
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sa": lambda hidden: {},
    "sw": lambda hidden: {"window": 2},
    "sc": lambda hidden: {"window": 2, "rank": 4, "edge_hidden": hidden},
    "mix": lambda hidden: {"sc": {"window": 2, "rank": 4, "edge_hidden": hidden}},
}


def training_step(mechanism: str, positions: int, width: int, hidden: int) -> Callable[[], None]:
    """Return one step on a fixed batch, to be called."""
    sizes = {"name": "benchmark", "layers": LAYERS, "width": width, "heads": HEADS, "positions": positions}
    parts = {
        "objective": "mlm",
        "data": "stdlib",
        "residual": "identity",
        "optimizer": "adamw",
        "norm": "layernorm",
        "schedule": {"name": "constant"},
    }
    numbers = {"steps": 1, "batch": BATCH, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0, "data_fingerprint": "none"}
    spec = parse_run(
        {"model": sizes, "mechanism": {"name": mechanism, **SETTINGS[mechanism](hidden)}, **parts, **numbers}
    )
    model, objective = build_model(spec, BYTES), build_objective(spec, BYTES)
    optimizer = build_optimizer(spec, model)
    generator = torch.Generator().manual_seed(0)
    examples = objective.examples(torch.randint(BYTES, (BATCH, positions), generator=generator), generator)

    def step() -> None:
        loss_sum, count = objective.loss_sum(model(examples.inputs_BN), examples)
        optimizer.zero_grad()
        (loss_sum / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
        optimizer.step()

    return step


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Measure the seconds per step, a turn of all mechanisms at a time; two turns beforehand warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="turns per size (default 25)")
    parser.add_argument(
        "--mechanisms",
        nargs="+",
        default=list(SETTINGS),
        choices=list(SETTINGS),
        help="beside sa, which is always timed",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'size (4 layers, batch 8)':<26}{'mechanism':<11}{'ms/step':>9}{'/ sa':>7}{'quartiles':>14}{'allowed':>9}")
    for label, positions, width, hidden, allowed in SIZES:
        names = ["sa", *(name for name in arguments.mechanisms if name != "sa")]
        times = interleaved({name: training_step(name, positions, width, hidden) for name in names}, arguments.repeats)
        for name in names:
            ratios = [mine / base for mine, base in zip(times[name], times["sa"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            bound = f"{allowed:.1f}" if name == "sc" else ""
            print(
                f"{label:<26}{name:<11}{1e3 * statistics.median(times[name]):>9.1f}{middle:>7.2f}"
                f"{f'{low:.2f}-{high:.2f}':>14}{bound:>9}"
            )


if __name__ == "__main__":
    main()
