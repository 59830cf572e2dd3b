"""Run the project's own training steps on a fixed batch, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.parse import parse_run
from stability.models.backbone import num_parameters

BYTES = 257


class Size(NamedTuple):
    """The size of a model and a step: layers, width, heads, positions, sequences a step."""

    layers: int
    width: int
    heads: int
    positions: int
    batch: int


class Training(NamedTuple):
    """A training step on a fixed batch; ``loss`` is the batch's loss as a function of named parameters."""

    step: Callable[[], None]
    num_parameters: int
    net: nn.Module
    loss: Callable[[dict[str, Tensor]], Tensor]


def training(parts: Mapping[str, Any], size: Size, device: str) -> Training:
    """Return the steps on a fixed batch of random bytes: forward, backward, gradient clipping, AdamW.

    Args:
        parts: differences from a plain model with `sa` and layer norms, e.g. ``{"mechanism": "sw", "objective":
            "ar"}``.
        size: model and batch.
        device: "cpu" or "cuda".

    Raises:
        ValueError: the settings do not fit the size; one line.
    """
    sizes = {"name": "benchmark", **dict(zip(("layers", "width", "heads", "positions"), size, strict=False))}
    usual = {"mechanism": "sa", "residual": "identity", "optimizer": "adamw", "norm": "layernorm", "data": "stdlib"}
    numbers = {"steps": 1, "batch": size.batch, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0}
    spec = parse_run(
        {"model": sizes, "schedule": {"name": "constant"}, "data_fingerprint": "none", **usual, **numbers, **parts}
    )
    net, objective = build_model(spec, BYTES).to(device), build_objective(spec, BYTES)
    optimizer, generator = build_optimizer(spec, net), torch.Generator().manual_seed(0)
    tokens = torch.randint(BYTES, (size.batch, objective.tokens_needed(size.positions)), generator=generator)
    examples = objective.examples(tokens, generator).to(torch.device(device))

    def step() -> None:
        total, count = objective.loss(net, examples)
        (total / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), spec.clip_norm)
        optimizer.step()
        optimizer.zero_grad()  # gradients are freed, so that the next step's allocations are all its own
        if device == "cuda":
            torch.cuda.synchronize()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        total, count = objective.loss(net, examples, parameters)
        return total / count

    return Training(step, num_parameters(net), net, loss)


def interleaved(steps: Mapping[Any, Callable[[], None]], repeats: int, device: str) -> dict[Any, list[float]]:
    """Measure the seconds a step in turns, after two turns of warm-up.

    Args:
        steps: the calls, by name.
        repeats: turns.
        device: on "cuda" wall time; on "cpu" this process's CPU time, usable on a shared machine.
    """
    now, times = (time.perf_counter if device == "cuda" else time.process_time), {name: [] for name in steps}
    for turn in range(-2, repeats):
        for name, step in steps.items():
            start = now()
            step()
            if turn >= 0:
                times[name].append(now() - start)
    return times
