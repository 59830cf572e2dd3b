"""Random draws of training: batches, masks and dropout, each with its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.objectives import Examples


def training_examples(
    spec: RunSpec, corpus: AbstractCorpus, objective: Any, purpose: str, index: int, *, seed: int, batch: int
) -> Examples:
    """Draw one training batch with its augmentations and masks.

    The draw depends only on (seed, purpose, index).

    Args:
        spec: the run.
        corpus: source of the training windows.
        objective: turns windows into examples.
        purpose: stream of draws, "train" or "curvature".
        index: number of the batch in this stream.
        seed: seed of the stream.
        batch: number of windows.
    """
    generator = generator_for(seed, purpose, index)
    drawn = corpus.batch("train", batch, objective.tokens_needed(spec.model.positions), generator)
    return objective.examples(objective.augmented(drawn, generator), generator)


def generator_for(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """Return a fresh CPU generator for one draw, equal on every device.

    Args:
        seed: e.g. ``spec.seed``.
        purpose: name of the stream of draws, e.g. "train".
        index: number of the draw in the stream, e.g. the step.
    """
    return torch.Generator().manual_seed(_number(seed, purpose, index))


def drops(model: nn.Module) -> bool:
    """Return whether training mode has any dropout: an `nn.Dropout` with p > 0."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode; restore each module's mode on exit.

    Modes change only here. A model already in this mode is left alone: a training run leaves training mode only for
    validations, and a model loaded for reading stays in evaluation mode. Optimizers are not notified.
    """
    if model.training == training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def dropping(
    model: nn.Module, device: torch.device, seed: int, purpose: str, index: int, first_row: int
) -> Iterator[None]:
    """Run a forward pass with dropout seeded by (seed, purpose, index, first_row).

    The draws depend only on these and on the order of the model's modules, not on earlier draws or on the process of
    the microbatch. Other microbatch boundaries give other draws. torch's own generators (CPU and device) are seeded and
    restored on exit, so random draws inside plugins are reproducible, too.

    Args:
        model: put into training mode within.
        device: device of the forward pass.
        seed: seed of the run.
        purpose: stream of draws, e.g. "train".
        index: number of the batch.
        first_row: first row of the microbatch in its batch.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(_number(seed, f"{purpose}/dropout/{first_row}", index))
        with in_mode(model, training=True):
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _number(seed: int, purpose: str, index: int) -> int:
    """Return a seed below 2^63 for one draw."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
