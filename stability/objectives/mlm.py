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
    With ``context=J`` a window is J + N tokens: the first J are the context, never masked and not in the loss.
    """

    class Config(Settings):
        mask_rate: ScheduleName = Field(default="uniform", description="schedule that each sequence's mask rate is drawn from")
        context: int = Field(default=0, ge=0, description="tokens before each sequence, given whole as what a cross mechanism reads (cross=auto)")

    direction = "bidirectional"

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_outputs, self.num_inputs = vocab_size, vocab_size + 1
        self.mask_id = vocab_size

    @classmethod
    def num_context(cls, config: Config) -> int:
        return config.context

    def tokens_needed(self, positions: int) -> int:
        return self.config.context + positions

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        context_BJ, tokens_BN = tokens_BN[:, : self.config.context], tokens_BN[:, self.config.context :]
        rates_B = mask_rates(self.config.mask_rate, len(tokens_BN), generator)
        masked_BN = random_mask(rates_B, tokens_BN.shape[1], generator)
        weights_BN = masked_BN / masked_BN.sum(dim=1, keepdim=True)
        inputs_BN = tokens_BN.masked_fill(masked_BN, self.mask_id)
        return Examples(inputs_BN, tokens_BN, weights_BN, context_BJ if self.config.context else None)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)


EXPORT = MaskedLanguageModel
