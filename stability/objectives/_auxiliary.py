"""The training loss: an objective's own, and the losses that parts of the model have beside what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.models.auxiliary import added, parted


class TrainingLoss(NamedTuple):
    """A loss as training minimises it, ``total / count``. ``total``: the sum of the loss in nats, with that of the
    auxiliary losses in it. ``auxiliary``: the latter alone, each sequence's weighted by its part of ``count``; None
    where no part of the model has any."""

    total: Tensor
    count: Tensor
    auxiliary: Tensor | None

    def sums(self) -> tuple[Tensor, ...]:
        """Return what a log divides by the count: the total, and the auxiliary sum where there is one; detached."""
        found = (self.total,) if self.auxiliary is None else (self.total, self.auxiliary)
        return tuple(each.detach() for each in found)


def with_auxiliary(
    objective: Any, model: nn.Module, examples: Any, params: Mapping[str, Tensor] | None = None
) -> TrainingLoss:
    """Return the objective's `loss` of the model on a batch, and what its parts return beside their outputs
    (`WithLoss`). ``params`` stand in for its own.

    A sequence weighs in the auxiliary mean as it does in the mean of the loss, so that microbatches add up to the
    batch. The model is run as `loss` runs it, once; nothing of the pass stays in it. A model that is no `Backbone` has
    no such losses.
    """
    if not getattr(model, "gives_losses", False):
        total, count = objective.loss(model, examples, params)
        return TrainingLoss(total, count, None)
    losses: list[Tensor] = []

    def heard(inputs: Any, **given: Any) -> Any:
        asked = {"losses": True, **given}
        found = model(inputs, **asked) if params is None else functional_call(model, dict(params), (inputs,), asked)
        return parted(found, losses)

    total, count = objective.loss(heard, examples)
    if not losses:
        return TrainingLoss(total, count, None)
    loss_B = added(losses)
    loss_B = loss_B if loss_B.dtype == torch.float64 else loss_B.float()
    counts_B = torch.stack([objective.count(part, loss_B.dtype) for part in examples.split(1)])
    auxiliary = (loss_B * counts_B).sum()
    return TrainingLoss(total + auxiliary, count, auxiliary)
