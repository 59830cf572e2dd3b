"""Validation on the same held-out windows (or images) under the same masks for every run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stability.config import RunSpec
from stability.data._corpus import AbstractCorpus
from stability.objectives._base import AbstractObjective, Examples
from stability.training.seeds import generator_for

VALIDATION_SEED = 0
CHUNK = 64
CELLS = 1 << 22  # logits that exist at once where no model makes them


class Validation:
    """Held-out examples, drawn once: they depend on the data, the objective and their number, never on the mechanism or the run's seed."""

    def __init__(self, spec: RunSpec, corpus: AbstractCorpus, objective: AbstractObjective, device: torch.device):
        held_out = corpus.windows("val", spec.evaluation.sequences, objective.tokens_needed(spec.model.positions))
        chunks = enumerate(held_out.split(CHUNK))
        self._chunks: list[Examples] = [objective.examples(chunk, generator_for(VALIDATION_SEED, "validation", i)).to(device) for i, chunk in chunks]
        self._objective = objective

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """``val_nll``, nats per counted position, and what the objective validates beside it, by its name."""
        totals, count = {"val_nll": 0.0}, 0.0
        for examples in self._chunks:
            part, number, others = self._objective.validate(model, examples)
            for name, value in {"val_nll": part, **others}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
            count += float(number)
        return {name: total / count for name, total in totals.items()}

    def nll(self, model: nn.Module) -> float:
        return self.measure(model)["val_nll"]

    @torch.no_grad()
    def unigram_nll(self, log_frequencies_V: Tensor) -> float:
        """`nll` of a model that knows the tokens' frequencies and nothing else, on the same examples: what a mechanism has to beat.

        Not the entropy of these frequencies: the loss of a few hundred sequences scatters around its mean (by some per cent for score entropy), in this
        model as in any other.
        """
        total, count = 0.0, 0.0
        for examples in self._chunks:
            count += float(self._objective.count(examples, torch.float64))
            log_frequencies = log_frequencies_V.to(examples.inputs_BN.device)
            for part in examples.counted()[0].split(max(1, CELLS // len(log_frequencies))):
                total += float(self._objective.loss_sum(self._objective.unigram_logits(log_frequencies, part), part)[0])
        return total / count
