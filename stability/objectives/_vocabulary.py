"""Objectives whose loss at a position takes three sums over the vocabulary alone, so that kernels can compute it
without the logits (`kernels.loss`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stability.config.impl import Impl, Use
from stability.objectives._base import AbstractObjective, Examples, ObjectiveSettings


class VocabularySettings(ObjectiveSettings):
    """The settings that every objective over a vocabulary has."""

    impl: Impl = "reference"


class AbstractVocabularyObjective(AbstractObjective):
    """Base of an objective whose loss at a position is a function of the log-sum-exp of its logits, of the logit of its
    target and of the logits' sum: a cross entropy, if it does not say otherwise.

    With ``impl=triton`` the loss is computed from the head's inputs and its weights, and the logits never exist; what
    generation and accuracies read of a model are logits all the same. Under autocast the factors are rounded to
    bfloat16 as those of the reference are, the logits are not.
    """

    kernels_second_order = True

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return None if config.loss_chunk is None else f"loss_chunk={config.loss_chunk}"

    def left_out(self, rows: Examples) -> Tensor | None:
        """Return for each of the positions (R, 1) a column that enters neither log-sum-exp nor sum; None: all enter,
        and there is no sum."""
        return None

    def losses_of(self, sums: Tensor, rows: Examples) -> Tensor:
        """Return the losses (R) of positions by themselves (R, 1), not weighted, of their sums as
        `kernels.loss.vocabulary_sums` returns them."""
        return sums[0] - sums[1]

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.config.impl != "triton":
            return super().loss(model, examples, params)
        total = examples.logits(model, params, readout=partial(self._summed, examples))
        return total, self.count(examples, total.dtype)

    def _summed(self, examples: Examples, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return the weighted sum of the losses of all positions that count."""
        from kernels.loss import vocabulary_sums  # triton, which a run without it need not have

        rows, index_R = examples.counted()
        hidden_RD = hidden_BND.flatten(0, 1).index_select(0, index_R)
        bias_V = None if bias_V is None else _as_products_take_it(bias_V)
        factors = _as_products_take_it(hidden_RD), _as_products_take_it(weight_VD), bias_V
        sums = vocabulary_sums(*factors, rows.targets_BN.squeeze(1), self.left_out(rows))
        return (self.losses_of(sums, rows) * rows.weights_BN.squeeze(1).to(sums.dtype)).sum()


def _as_products_take_it(factor: Tensor) -> Tensor:
    """Return a factor in the dtype to which autocast would round it."""
    if factor.dtype == torch.float64 or not torch.is_autocast_enabled(factor.device.type):
        return factor
    return factor.to(torch.get_autocast_dtype(factor.device.type))
