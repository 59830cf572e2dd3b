"""The batches that a run trains on."""

from __future__ import annotations

from typing import Any

from stability.config import RunSpec
from stability.data._corpus import AbstractCorpus
from stability.objectives._base import Examples
from stability.training.seeds import generator_for


def training_examples(spec: RunSpec, corpus: AbstractCorpus, objective: Any, purpose: str, index: int, *, seed: int, batch: int) -> Examples:
    """Batch number ``index`` of a purpose ("train", "curvature"): windows, augmentations and masks depend on nothing else."""
    generator = generator_for(seed, purpose, index)
    drawn = corpus.batch("train", batch, objective.tokens_needed(spec.model.positions), generator)
    return objective.examples(objective.augmented(drawn, generator), generator)
