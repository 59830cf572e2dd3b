"""The batches that a run trains on."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

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
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
