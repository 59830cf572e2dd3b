"""Masked language modelling: hide some tokens, predict them from both sides."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.objectives._base import AbstractObjective, Examples, weighted_cross_entropy
from stability.objectives._mask_rates import ScheduleName, mask_rates, random_mask


class MaskedLanguageModel(AbstractObjective):
    """Cross entropy averaged over a sequence's masked positions, then over sequences (as the paper averages proteins, E.1).

    With the uniform schedule this is, per token, the 1/t-weighted bound on the NLL that masked diffusion trains (a batch mean over all
    masked positions would weigh a sequence by its mask rate). The mask token is one id past the vocabulary; the head does not predict it.
    """

    class Config(Settings):
        mask_rate: ScheduleName = Field(default="uniform", description="schedule that each sequence's mask rate is drawn from")

    direction = "bidirectional"

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_outputs, self.num_inputs = vocab_size, vocab_size + 1
        self.mask_id = vocab_size

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        rates_B = mask_rates(self.config.mask_rate, len(tokens_BN), generator)
        masked_BN = random_mask(rates_B, tokens_BN.shape[1], generator)
        weights_BN = masked_BN / masked_BN.sum(dim=1, keepdim=True)
        return Examples(tokens_BN.masked_fill(masked_BN, self.mask_id), tokens_BN, weights_BN)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)


EXPORT = MaskedLanguageModel
