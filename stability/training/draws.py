"""The batches that a run trains on, and what its model drops of them."""

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
    """Draw batch number ``index`` of a purpose ("train", "curvature"): windows, augmentations and masks depend on
    nothing else."""
    generator = generator_for(seed, purpose, index)
    drawn = corpus.batch("train", batch, objective.tokens_needed(spec.model.positions), generator)
    return objective.examples(objective.augmented(drawn, generator), generator)


def generator_for(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """Return a CPU generator of its own for one draw, e.g. ``generator_for(spec.seed, "train", step)``; the same on
    every device."""
    return torch.Generator().manual_seed(_number(seed, purpose, index))


def drops(model: nn.Module) -> bool:
    """Return whether training mode drops anything in a model: whether one of its `nn.Dropout` modules has a share."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode, and each of its modules back into its own, whatever happens within.

    This is the only place where a mode changes. A model that is in the mode already is left as it is: one that trains
    stays in training mode from its first step to its last, but for validations; one that is read is in evaluation mode.
    No optimizer is told of it.
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
    """Have a forward pass of a microbatch within drop what training drops, by draws that depend on nothing but (seed,
    purpose, index of the batch, first row of the microbatch in it), and on the order of the model's own modules.

    Neither what was drawn before nor who computes the microbatch enters; a batch that is cut otherwise has other
    microbatches, and other draws. torch's own generators, the CPU's and the device's, are seeded so, and given back as
    they were: what a part of somebody's own draws in its forward pass is reproducible, too.
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
    """Return the number below 2^63 that seeds one draw."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
