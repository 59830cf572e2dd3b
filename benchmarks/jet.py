"""Slope and uᵀHu by one second-order forward pass, in gradients of the same model: ``python -m benchmarks.jet``.

The quickstart's model with sa, sc and sw (N = 64, d = 64, 4 layers), wider (N = 256, d = 256) and longer (N = 1,024),
float32, one CPU thread. "taylor": `directional` of the loss. "recorded": `directional` of a `RecordedLoss`, whose
operations run without Python. "jax": `jax.experimental.jet` of a plain GPT's loss, jitted, in jitted gradients of that
loss, and in this process's own milliseconds; needs the extra `peers`. All calls take turns; medians of the processor
time's ratios are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks._measuring import Call, interleaved  # isort: skip (before torch, see there)

import torch
from torch import Tensor

from benchmarks._curvature_models import quickstart_model
from benchmarks._jax_jet import jax_calls
from benchmarks._machine import machine
from stability.curvature import GradientWithGraph, RecordedLoss, directional, loss_along

SIZES = {"nano": (64, 64, 8), "N = 256, d = 256": (256, 256, 1), "N = 1,024": (1024, 256, 1)}  # positions, width, rows
LIMITS = {"nano": 1.2, "N = 256, d = 256": 1.75, "N = 1,024": 1.7}
MECHANISMS = ("sa", "sc", "sw")


def calls_of(mechanism: str, positions: int, width: int, rows: int) -> dict[str, Call]:
    """Return the compared calls by name; "gradient" is the unit.

    Args:
        mechanism: name of the mechanism.
        positions: sequence length N.
        width: d.
        rows: sequences in the batch.
    """
    torch.manual_seed(0)
    model, loss = quickstart_model(mechanism, positions=positions, width=width, rows=rows)
    params = {name: param.detach() for name, param in model.named_parameters()}
    u = {name: 0.1 * torch.randn_like(param) for name, param in params.items()}
    recorded = RecordedLoss(loss)
    return {
        "gradient": lambda: gradient(loss, params),
        "taylor": lambda: directional(loss, params, u, "taylor"),
        "recorded": lambda: directional(recorded, params, u, "taylor"),
        "recorded gradient": lambda: GradientWithGraph(recorded, params, method="taylor"),
        "loss": lambda: loss_along(loss, params, u, [0.0]),
        "recorded loss": lambda: loss_along(recorded, params, u, [0.0]),
    }


def gradient(loss: Callable[[dict[str, Tensor]], Tensor], params: dict[str, Tensor]) -> tuple[Tensor, ...]:
    leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
    return torch.autograd.grad(loss(leaves), list(leaves.values()))


def compare(size: str, mechanisms: list[str], repeats: int) -> None:
    """Print one size's table.

    Args:
        size: a key of `SIZES`.
        mechanisms: names of mechanisms.
        repeats: turns.
    """
    positions, width, rows = SIZES[size]
    print(f"\n{size}: {rows} sequence(s); slope and uᵀHu may take {LIMITS[size]} gradients")
    for mechanism in mechanisms:
        calls = calls_of(mechanism, positions, width, rows)
        if mechanism == "sa":
            calls |= jax_calls(positions, width, rows)
        for _ in range(3):  # the first calls record or compile
            for call in calls.values():
                call()
        times = interleaved(calls, repeats, time.process_time)  # XLA computes in threads of its own
        unit = times["gradient"]
        print(f"{mechanism:4s} gradient {statistics.median(unit) * 1e3:.1f} ms;", end=" ")
        ratios = {name: statistics.median(a / b for a, b in zip(times[name], unit, strict=True)) for name in calls}
        print("; ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "gradient"))
        if "jax jet" in times:
            pairs = zip(times["jax jet"], times["jax gradient"], strict=True)
            print(f"     jax's jet in jax's gradients {statistics.median(a / b for a, b in pairs):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--mechanisms", nargs="*", default=list(MECHANISMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for size in options.sizes:
        compare(size, options.mechanisms, options.repeats)


if __name__ == "__main__":
    main()
