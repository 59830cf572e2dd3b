"""Autoregressive language modelling: predict each token from those before it."""

from __future__ import annotations

import torch
from torch import Tensor

from stability.objectives import AbstractVocabularyObjective, VocabularySettings
from stability.objectives._examples import Examples, ZLoss, weighted_cross_entropy


class Autoregressive(AbstractVocabularyObjective):
    """Mean cross entropy of the next token."""

    class Config(VocabularySettings):
        """The settings common to all objectives over a vocabulary."""

        z_loss: ZLoss = 0.0

    task = "next-token prediction; objective=mlm is a masked language model"
    direction = "causal"
    without_mirror = None
    samplers = ("ar",)

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_inputs = self.num_outputs = vocab_size

    def tokens_needed(self, positions: int) -> int:
        return positions + 1

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        inputs_BN, targets_BN = tokens_BN[:, :-1], tokens_BN[:, 1:]
        return Examples(inputs_BN, targets_BN, torch.ones(targets_BN.shape))

    def mirrored(self, examples: Examples) -> Examples:
        """Return the reversed windows, predicted left to right.

        The N + 1 tokens are reversed and shifted again: the window's first token is predicted instead of its last.
        """
        tokens_BN = torch.cat([examples.inputs_BN[:, :1], examples.targets_BN], 1).flip(1)
        return examples._replace(
            inputs_BN=tokens_BN[:, :-1], targets_BN=tokens_BN[:, 1:], weights_BN=examples.weights_BN.flip(1)
        )

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)


EXPORT = Autoregressive
