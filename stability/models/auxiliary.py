"""Losses that parts of a model have of their own beside what they compute, e.g. of a router that spreads its load, are
carried from a part to the training loss as values: nothing of a forward pass stays in a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class WithLoss(NamedTuple):
    """The output of a mixer or a feed-forward network, with a loss that the part has of its own; blocks and models pass
    it on so.

    ``loss_B``: for each sequence, in nats, what is added to that sequence's share of the training loss. It may depend
    on that sequence alone, or microbatches would not add up to the batch. In float32 or wider, as every loss is: what a
    linear map gives in a run in bfloat16 is widened first (`stability.models.precision.at_least_float32`).
    """

    output: Any
    loss_B: Tensor


def parted(found: Any, losses: list[Tensor]) -> Any:
    """Return a part's output; its loss, where it has one, joins ``losses``."""
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


def joined(output: Any, losses: Sequence[Tensor]) -> Any:
    """Return the output, with the sum of ``losses`` where there are any."""
    return WithLoss(output, added(losses)) if losses else output


def averaged(losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of the losses that one part had at each of its evaluations, by itself in a list; [] where it had
    none."""
    return [added(losses) / len(losses)] if len(losses) > 1 else [*losses]


def added(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more losses, (B)."""
    loss_B, *others = losses
    for other_B in others:
        loss_B = loss_B + other_B
    return loss_B
