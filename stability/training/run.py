"""One run from its spec to its verdict, step by step: it can be left and resumed after any of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stability.build import described, resolve_device, shapes
from stability.config.run import RunSpec
from stability.corpora.cache import load
from stability.runs.directory import RunDirectory
from stability.runs.sinks import Sinks
from stability.training.devices.base import Devices
from stability.training.devices.one import OneDevice
from stability.training.devices.sharded import ShardedDevices
from stability.training.devices.shared import SharedDevices
from stability.training.trainer import Trainer
from stability.training.weights import Weights


def train(
    spec: RunSpec,
    directory: RunDirectory,
    *,
    cache_dir: Path,
    device: str = "auto",
    sinks: Sinks | None = None,
    command: str = "",
    devices: int = 1,
    shard: bool = False,
    stop_at: int | None = None,
) -> Iterator[None]:
    """Train a run to its verdict, yielding after every optimizer step. A finished run is left alone.

    Closing the generator writes a checkpoint at the step it stands at (``interrupted``); called again it goes on from
    the last checkpoint that can be read, bit for bit as if it had never stopped (same hardware). Divergence is a
    result, not an error. ``devices``: how many share the microbatches, which changes no bit either; with ``shard`` they
    share parameters and batch, which rounds otherwise (`sharded`). ``stop_at``: a step before the last after which the
    run is left, ``stopped``, as if it had been closed there. ``sinks``: get what is logged, too, and are left open.
    """
    if directory.finished:
        return
    corpus, first = load(cache_dir, spec.data_fingerprint), resolve_device(device)
    weights = None if spec.weights is None else Weights.kept(spec.weights, cache_dir)
    with _devices_of(spec, cache_dir, first, devices, shard) as taken:
        trainer = Trainer(spec, directory, corpus, first, taken, weights)
        directory.write_spec(spec.model_dump(mode="json"))
        known: dict[str, Any] = {"data": {"description": described(spec, corpus), "fingerprint": corpus.fingerprint}}
        if weights is not None:
            known["weights"] = weights.account(shapes(spec, corpus.format))
        trainer.open(command, sinks, **known)
        yield from trainer.steps(stop_at)


def _devices_of(spec: RunSpec, cache_dir: Path, first: torch.device, num: int, shard: bool) -> Devices:
    """Return the run's devices, the processes of all but the first started."""
    if shard:
        return ShardedDevices.start(spec, cache_dir, first, num)
    return SharedDevices(spec, cache_dir, first, num) if num > 1 else OneDevice(first)
