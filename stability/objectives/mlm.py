"""Masked language modelling: hide some tokens, predict them from both sides."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config.identity import Since
from stability.models.passes import at_least_float32
from stability.objectives import AbstractVocabularyObjective, VocabularySettings, refuse_unread
from stability.objectives._examples import (
    Examples,
    ScheduleName,
    ZLoss,
    mask_rates,
    random_mask,
    reverse,
    weighted_cross_entropy,
)


class MaskedLanguageModel(AbstractVocabularyObjective):
    """Cross entropy averaged over a sequence's masked positions, then over sequences.

    The paper averages proteins in this way (E.1). With the uniform schedule this is, per token, the 1/t-weighted bound
    on the NLL of masked diffusion (a batch mean over all masked positions would weigh a sequence by its mask rate). The
    mask token is one id past the vocabulary; the head does not predict it. With ``context=J`` a window has J + N
    tokens: the first J are the context, never masked and not in the loss. BERT's objective (Devlin et al. 2019, section
    3.1) is ``mask_rate=fixed corruption=bert``: 15 % of the positions are predicted; of them 80 % hold the mask, 10 % a
    random token, 10 % their own.
    """

    class Config(VocabularySettings):
        mask_rate: ScheduleName = Field(
            default="uniform", description="schedule that each sequence's mask rate is drawn from; fixed: fixed_rate"
        )
        fixed_rate: Annotated[float, Since(0.15, of=("mlm",))] = Field(
            default=0.15, gt=0, le=1, description="mask rate of every sequence (mask_rate=fixed)"
        )
        corruption: Annotated[Literal["mask", "bert"], Since("mask", of=("mlm",))] = Field(
            default="mask",
            description=(
                "what stands at a position to predict: the mask, or for 10 % of them each a random token and their "
                "own (bert)"
            ),
        )
        context: Annotated[int, Since(0, of=("mlm",))] = Field(
            default=0,
            ge=0,
            le=2**24,
            description="tokens before each sequence, given whole as what a cross mechanism reads (cross=auto)",
        )

        z_loss: ZLoss = 0.0

        @model_validator(mode="after")
        def _rate_is_read(self) -> MaskedLanguageModel.Config:
            refuse_unread(
                self,
                ("fixed_rate",),
                self.mask_rate == "fixed",
                f"objective.mask_rate=fixed (objective.mask_rate={self.mask_rate} given)",
            )
            return self

    task = "a masked language model, which reads both sides; objective=ar predicts the next token instead"
    direction = "bidirectional"
    without_mirror = None
    samplers = ("top_prob", "random")
    mask_id: int
    num_outputs: int

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_outputs, self.num_inputs = vocab_size, vocab_size + 1
        self.mask_id = vocab_size

    @classmethod
    def summary(cls, config: Config) -> str:
        rate = f"fixed at {config.fixed_rate:g}" if config.mask_rate == "fixed" else config.mask_rate
        return f"mlm, mask rate {rate}{', corruption bert' if config.corruption == 'bert' else ''}"

    @classmethod
    def num_context(cls, config: Config) -> int:
        return config.context

    def tokens_needed(self, positions: int) -> int:
        return self.config.context + positions

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        context_BJ, tokens_BN = tokens_BN[:, : self.config.context], tokens_BN[:, self.config.context :]
        rates_B = mask_rates(self.config.mask_rate, len(tokens_BN), generator, self.config.fixed_rate)
        masked_BN = random_mask(rates_B, tokens_BN.shape[1], generator)
        weights_BN = masked_BN / masked_BN.sum(dim=1, keepdim=True)
        inputs_BN = tokens_BN.masked_fill(masked_BN, self.mask_id)
        if self.config.corruption == "bert":
            inputs_BN = torch.where(masked_BN, self._corrupt_as_bert(inputs_BN, tokens_BN, generator), inputs_BN)
        return Examples(inputs_BN, tokens_BN, weights_BN, context_BJ if self.config.context else None)

    def _corrupt_as_bert(self, inputs_BN: Tensor, tokens_BN: Tensor, generator: torch.Generator) -> Tensor:
        """Return the inputs with a tenth random tokens and a tenth unchanged tokens."""
        draws_BN = torch.rand(inputs_BN.shape, generator=generator)
        random_BN = torch.randint(self.num_outputs, inputs_BN.shape, generator=generator)
        return torch.where(draws_BN < 0.1, random_BN, torch.where(draws_BN < 0.2, tokens_BN, inputs_BN))

    def mirrored(self, examples: Examples) -> Examples:
        """Return the windows read backwards, with the same tokens masked.

        A context is reversed, too, and remains the context.
        """
        return reverse(examples)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)

    @torch.no_grad()
    def clean_probs(self, model: nn.Module, tokens_BN: Tensor) -> Tensor:
        """Return the softmax of the logits.

        A model with cross branches raises its own error: it has no context here.
        """
        return at_least_float32(model(tokens_BN)).softmax(-1)


EXPORT = MaskedLanguageModel
