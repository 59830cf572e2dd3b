"""Run the project's own training steps on a fixed batch, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stability.build import build_model, build_objective, build_optimizer
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.corpora.cache import prepare
from stability.models.backbone import num_parameters
from stability.models.passes import differentiated_once
from stability.training.step import Replica

BYTES = 257
PAGE = "\n".join(f"Line {number} of a page, {number * number % 97} times." for number in range(2000))


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


def _spec(parts: Mapping[str, Any], size: Size) -> RunSpec:
    sizes = {"name": "benchmark", **dict(zip(("layers", "width", "heads", "positions"), size, strict=False))}
    usual = {"mechanism": "sa", "residual": "identity", "optimizer": "adamw", "norm": "layernorm", "data": "stdlib"}
    numbers = {"steps": 1, "batch": size.batch, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0}
    return parse_run(
        {"model": sizes, "schedule": {"name": "constant"}, "data_fingerprint": "none", **usual, **numbers, **parts}
    )


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
    spec = _spec(parts, size)
    net, objective = build_model(spec, BYTES).to(device), build_objective(spec, BYTES)
    optimizer, generator = build_optimizer(spec, net), torch.Generator().manual_seed(0)
    tokens = torch.randint(BYTES, (size.batch, objective.tokens_needed(size.positions)), generator=generator)
    examples = objective.examples(tokens, generator).to(torch.device(device))

    def step() -> None:
        with differentiated_once():
            total, count = objective.loss(net, examples)
        (total / count).backward()
        nn.utils.clip_grad_norm_(net.parameters(), spec.clip_limit)
        optimizer.step()
        optimizer.zero_grad()  # gradients are freed, so that the next step's allocations are all its own
        if device == "cuda":
            torch.cuda.synchronize()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        total, count = objective.loss(net, examples, parameters)
        return total / count

    return Training(step, num_parameters(net), net, loss)


def replica(parts: Mapping[str, Any], size: Size, steps: int, device: str, pool: Path) -> Replica:
    """Return the product's own training steps, on the text of Python's standard library, without a run's folder.

    Args:
        parts: differences from a plain model, as in `training`.
        size: model and batch; a size of fewer than 64 positions reads a synthetic page, prepared in no time.
        steps: steps of the run.
        device: "cpu" or "cuda".
        pool: folder of the prepared data, kept from call to call.

    Raises:
        ValueError: the settings do not fit the size or the device; one line.
    """
    if size.positions < 64:
        page = pool / "page.txt"
        page.write_text(PAGE)
        parts = {"data": {"name": "text", "path": str(page)}, **parts}
    spec = _spec(parts | {"steps": steps, "evaluation": {"every_steps": steps, "sequences": 1}}, size)
    corpus = prepare(spec.data, pool / "cache")
    return Replica(spec, corpus, torch.device(device))


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
