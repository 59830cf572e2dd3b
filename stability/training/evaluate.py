"""Validation NLL on the same held-out windows under the same masks for every run."""

from __future__ import annotations

import torch
from torch import nn

from stability.config import RunSpec
from stability.data._base import Corpus
from stability.objectives._base import AbstractObjective, Examples
from stability.training.seeds import generator_for

VALIDATION_SEED = 0
CHUNK = 64


class Validation:
    """Held-out examples, drawn once: they depend on the data, the objective and their number, never on the mechanism or the run's seed."""

    def __init__(self, spec: RunSpec, corpus: Corpus, objective: AbstractObjective, device: torch.device):
        tokens_BN = corpus.windows("val", spec.evaluation.sequences, objective.tokens_needed(spec.model.positions))
        chunks = enumerate(tokens_BN.split(CHUNK))
        self._chunks: list[Examples] = [objective.examples(chunk, generator_for(VALIDATION_SEED, "validation", i)).to(device) for i, chunk in chunks]
        self._objective = objective

    @torch.no_grad()
    def nll(self, model: nn.Module) -> float:
        """Nats per counted position."""
        total, count = 0.0, 0.0
        for examples in self._chunks:
            part, number = self._objective.loss(model, examples)
            total, count = total + float(part), count + float(number)
        return total / count
