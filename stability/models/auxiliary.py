"""Losses of a model's parts beside their outputs, e.g. a router's load balancing, and the training loss with them.

They are passed from a part to the training loss as values: a module stores nothing of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call


class WithLoss(NamedTuple):
    """The output of a mixer or feed-forward network with its own loss.

    Blocks and models pass it on in this form.

    Attributes:
        output: the output.
        loss_B: in nats, added to each sequence's share of the training loss, in float32 or wider. It may depend on this
            sequence alone, or microbatches would not add up to the batch. In a bfloat16 run, the output of a linear map
            must be widened first (`stability.models.precision.at_least_float32`).
    """

    output: Any
    loss_B: Tensor


def split_loss(found: Any, losses: list[Tensor]) -> Any:
    """Return a part's output; append its loss, if any, to ``losses``.

    Raises:
        ValueError: the loss is not (B,), or narrower than float32.
    """
    if not isinstance(found, WithLoss):
        return found
    if found.loss_B.ndim != 1:
        raise ValueError(
            f"an auxiliary loss has shape {tuple(found.loss_B.shape)}; expected (B,), a number for each sequence"
        )
    if torch.finfo(found.loss_B.dtype).bits < 32:
        dtype = str(found.loss_B.dtype).removeprefix("torch.")
        raise ValueError(f"an auxiliary loss is {dtype}; expected float32 or wider: at_least_float32 widens")
    losses.append(found.loss_B)
    return found.output


def attach_losses(output: Any, losses: Sequence[Tensor]) -> Any:
    """Return the output, with the sum of ``losses`` if not empty."""
    return WithLoss(output, sum_losses(losses)) if losses else output


def average_losses(losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of one part's losses over its evaluations, as a list.

    The list is empty without a loss.
    """
    return [sum_losses(losses) / len(losses)] if len(losses) > 1 else [*losses]


def sum_losses(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more losses, (B)."""
    loss_B, *others = losses
    for other_B in others:
        loss_B = loss_B + other_B
    return loss_B


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
