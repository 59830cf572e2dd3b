"""The training loss: the objective's loss plus auxiliary losses of the model's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.models.auxiliary import split_loss, sum_losses


class TrainingLoss(NamedTuple):
    """The minimised loss, ``total / count``.

    Attributes:
        total: sum of the loss in nats, auxiliary losses included.
        count: divisor of the mean.
        auxiliary: auxiliary losses alone, each sequence weighted by its part of ``count``; None without any.
    """

    total: Tensor
    count: Tensor
    auxiliary: Tensor | None

    def sums(self) -> tuple[Tensor, ...]:
        """Return the detached sums for the log: the total, then the auxiliary one if any."""
        found = (self.total,) if self.auxiliary is None else (self.total, self.auxiliary)
        return tuple(each.detach() for each in found)


def with_auxiliary(
    objective: Any, model: nn.Module, examples: Any, params: Mapping[str, Tensor] | None = None
) -> TrainingLoss:
    """Return the objective's `loss` on a batch plus its own and the model's auxiliary losses (`WithLoss`).

    A sequence has the same weight in the auxiliary mean as in the mean loss, so microbatches add up to the batch. The
    model runs once, as in `loss`, and retains nothing of the pass. Only a `Backbone` has auxiliary losses.

    Args:
        objective: the objective.
        model: the model.
        examples: the batch.
        params: parameters to use instead of the model's own.
    """
    if not getattr(model, "gives_losses", False):
        total, count, own = objective.loss_with_own(model, examples, params)
        return TrainingLoss(total if own is None else total + own, count, own)
    losses: list[Tensor] = []

    def heard(inputs: Any, **given: Any) -> Any:
        asked = {"losses": True, **given}
        found = model(inputs, **asked) if params is None else functional_call(model, dict(params), (inputs,), asked)
        return split_loss(found, losses)

    total, count, own = objective.loss_with_own(heard, examples)
    if not losses:
        return TrainingLoss(total if own is None else total + own, count, own)
    loss_B = sum_losses(losses)
    loss_B = loss_B if loss_B.dtype == torch.float64 else loss_B.float()
    counts_B = torch.stack([objective.count(part, loss_B.dtype) for part in examples.split(1)])
    auxiliary = (loss_B * counts_B).sum()
    auxiliary = auxiliary if own is None else auxiliary + own
    return TrainingLoss(total + auxiliary, count, auxiliary)
