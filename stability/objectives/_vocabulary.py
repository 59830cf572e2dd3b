"""Objectives with kernels (`kernels.loss`) that need no logits.

Their loss at a position is a function of three sums over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stability.config.impl import Impl, Use
from stability.models.precision import autocast_dtype
from stability.objectives import AbstractObjective, Examples, ObjectiveSettings


class VocabularySettings(ObjectiveSettings):
    """The settings common to all objectives over a vocabulary."""

    impl: Impl = "reference"


class AbstractVocabularyObjective(AbstractObjective):
    """Base of objectives with a loss of three numbers per position; by default cross entropy.

    The numbers: log-sum-exp of the logits, the target's logit, and the sum of the logits.

    With ``impl=triton`` the loss is computed from the head's inputs and weights, without logits; generation and
    accuracies still use logits. Under autocast the factors are rounded to bfloat16 as in the reference, the logits are
    not.
    """

    kernels_second_order = True

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return None if config.loss_chunk is None else f"loss_chunk={config.loss_chunk}"

    def choose_omitted(self, rows: Examples) -> Tensor | None:
        """Return one column per position (R, 1) to omit from log-sum-exp and sum.

        None: all columns enter, and the sum is not computed.
        """
        return None

    def losses_of(self, sums: Tensor, rows: Examples) -> Tensor:
        """Return the unweighted losses (R) of single positions (R, 1).

        Args:
            sums: result of `kernels.loss.vocabulary_sums`.
            rows: the positions.
        """
        return sums[0] - sums[1]

    def loss(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `loss_sum` of the model on a batch.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        if self.config.impl != "triton":
            return super().loss(model, examples, params)
        total, _ = examples.logits(model, params, readout=partial(self._sum_losses, examples))
        return total, self.count(examples, total.dtype)

    def loss_with_own(
        self, model: nn.Module, examples: Examples, params: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `loss` and the z-loss, which the kernels' log-sum-exp gives as well.

        Args:
            model: the model.
            examples: the batch.
            params: parameters to use instead of the model's own.
        """
        if self.config.impl != "triton" or not self.z_loss:
            return super().loss_with_own(model, examples, params)
        total, own = examples.logits(model, params, readout=partial(self._sum_losses, examples))
        return total, self.count(examples, total.dtype), own

    def _sum_losses(
        self, examples: Examples, hidden_BND: Tensor, weight_VD: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums over all counted positions: the losses, and the z-loss or None."""
        from kernels.loss import vocabulary_sums  # needs triton, so imported on demand

        rows, index_R = examples.counted()
        hidden_RD = hidden_BND.flatten(0, 1).index_select(0, index_R)
        bias_V = None if bias_V is None else _autocast(bias_V)
        factors = _autocast(hidden_RD), _autocast(weight_VD), bias_V
        sums = vocabulary_sums(*factors, rows.targets_BN.squeeze(1), self.choose_omitted(rows))
        weights_R = rows.weights_BN.squeeze(1).to(sums.dtype)
        own = self.z_loss * (sums[0].square() * weights_R).sum() if self.z_loss else None
        return (self.losses_of(sums, rows) * weights_R).sum(), own


def _autocast(factor: Tensor) -> Tensor:
    """Return a factor in autocast's dtype."""
    dtype = autocast_dtype(factor.device)
    return factor if dtype is None or factor.dtype == torch.float64 else factor.to(dtype)
