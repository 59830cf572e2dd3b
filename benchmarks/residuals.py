"""Measure the throughput of training with each residual scheme over that of the plain residual, side by side in one
process: ``python -m benchmarks.residuals``.

A step is forward, backward, gradient clipping and AdamW on the project's own causal model with `sa`, float32. The
schemes take turns, so that what else the machine does hits all alike; a ratio is of each turn, the table shows their
median and quartiles. ``--device cuda`` times on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from benchmarks._machine import machine
from stability.build import build_model, build_objective, build_optimizer
from stability.config.parse import parse_run
from stability.models.backbone import num_parameters

BYTES = 257
SCHEMES = ("identity", "hc", "mhc", "mhc_lite")


class Size(NamedTuple):
    """The size of a model and a step: layers, width, heads, positions, sequences a step."""

    layers: int
    width: int
    heads: int
    positions: int
    batch: int


SIZES = {
    "nano": Size(4, 64, 4, 64, 8),
    "width 256": Size(4, 256, 8, 256, 2),
    "gpt_s / 4": Size(6, 512, 8, 256, 1),
    "gpt_s": Size(6, 512, 8, 1024, 16),
}
DEFAULT = ("nano", "width 256", "gpt_s / 4")  # gpt_s itself is for a GPU


class Training(NamedTuple):
    step: Callable[[], None]
    num_parameters: int


def training(residual: str, size: Size, device: str) -> Training:
    """Return the steps on a fixed batch."""
    model = {
        "name": "benchmark",
        "layers": size.layers,
        "width": size.width,
        "heads": size.heads,
        "positions": size.positions,
    }
    parts = {
        "mechanism": "sa",
        "objective": "ar",
        "data": "stdlib",
        "residual": residual,
        "optimizer": "adamw",
        "norm": "layernorm",
    }
    numbers = {
        "schedule": {"name": "constant"},
        "steps": 1,
        "batch": size.batch,
        "clip_norm": 1.0,
        "lr_peak": 1e-3,
        "seed": 0,
        "data_fingerprint": "none",
    }
    spec = parse_run({"model": model, **parts, **numbers})
    net, objective = build_model(spec, BYTES).to(device), build_objective(spec, BYTES)
    optimizer, generator = build_optimizer(spec, net), torch.Generator().manual_seed(0)
    tokens = torch.randint(BYTES, (size.batch, objective.tokens_needed(size.positions)), generator=generator)
    examples = objective.examples(tokens, generator).to(device)

    def step() -> None:
        total, count = objective.loss(net, examples)
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), spec.clip_norm)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return Training(step, num_parameters(net))


def interleaved(steps: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    """Measure the seconds a step, a turn of all schemes at a time; two turns beforehand warm up. On a GPU by the clock;
    on a CPU those that this process computed, so that a shared machine may be timed on."""
    now, times = (time.perf_counter if device == "cuda" else time.process_time), {name: [] for name in steps}
    for turn in range(-2, repeats):
        for name, step in steps.items():
            start = now()
            step()
            if turn >= 0:
                times[name].append(now() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="turns per size (default 25)")
    parser.add_argument("--sizes", nargs="+", default=list(DEFAULT), choices=list(SIZES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} thread(s)",
        machine(),
        sep="; ",
    )
    print(
        f"{'size':<11}{'tokens/step':>12}  "
        f"{'residual':<10}{'parameters':>11}{'ms/step':>9}{'tokens/s':>10}{'/ identity':>11}{'quartiles':>12}"
    )
    for name in arguments.sizes:
        size = SIZES[name]
        trainings = {scheme: training(scheme, size, arguments.device) for scheme in SCHEMES}
        times = interleaved(
            {scheme: each.step for scheme, each in trainings.items()}, arguments.repeats, arguments.device
        )
        tokens = size.batch * size.positions
        for scheme in SCHEMES:
            ratios = [base / mine for mine, base in zip(times[scheme], times["identity"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            step_s = statistics.median(times[scheme])
            line = (
                f"{name:<11}{tokens:>12,}  "
                f"{scheme:<10}{trainings[scheme].num_parameters:>11,}{1e3 * step_s:>9.1f}{tokens / step_s:>10,.0f}"
            )
            print(f"{line}{middle:>11.2f}{f'{low:.2f}-{high:.2f}':>12}", flush=True)


if __name__ == "__main__":
    main()
