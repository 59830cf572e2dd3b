"""Autoregressive language modelling: predict each token from those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.objectives._base import Examples, weighted_cross_entropy
from stability.objectives._vocabulary import AbstractVocabularyObjective, VocabularySettings


class Autoregressive(AbstractVocabularyObjective):
    """Mean cross entropy of the next token."""

    class Config(VocabularySettings):
        """The settings that every objective over a vocabulary has, and none of its own."""

    direction = "causal"
    samplers = ("ar",)

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_inputs = self.num_outputs = vocab_size

    def tokens_needed(self, positions: int) -> int:
        return positions + 1

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        inputs_BN, targets_BN = tokens_BN[:, :-1], tokens_BN[:, 1:]
        return Examples(inputs_BN, targets_BN, torch.ones(targets_BN.shape))

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)


EXPORT = Autoregressive
