"""This module evaluates the monitored loss again, one block's batch after another, as the step saw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.curvature._inputs import RandomState, Tensors, norm
from stability.curvature.alpha_max import (
    ROUNDING_LIMIT,
    rounding_share,
)


@dataclass(frozen=True)
class _Item:
    """The state from which a replay of one block's forward pass starts. ``rows``: those of this piece; ``share``: its
    part of the batch; ``first``: of the pieces."""

    batch: Any
    random: RandomState
    buffers: Tensors
    share: float = 1.0
    first: bool = True


class _Loss(nn.Module):
    """A module that puts loss_fn around the model, so that functional_call can lend the model other parameters whatever
    loss_fn calls of it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Any:
        return self.loss_fn(self.model, batch)

    def evaluate(self, params: Tensors, item: _Item) -> tuple[Tensor, float]:
        """Return (sum, count) of one piece from the random state and a copy of the buffers that its forward pass
        met."""
        if item.first:
            _restore(item.random)
        lent = {**params, **{name: buffer.clone() for name, buffer in item.buffers.items()}}
        result = functional_call(self, {f"model.{name}": tensor for name, tensor in lent.items()}, (item.batch,))
        if isinstance(result, Tensor):
            return result * item.share, item.share
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                f"loss_fn(model, batch) returns a scalar tensor or (sum, count); it returned a {type(result).__name__}"
            )
        return result[0], result[1]


def _rounding(before: Tensors, direction: Tensors, lr: float) -> str | None:
    """Return a note where the rounding of θ⁺ makes up more than 1 % of the step, as it does at tiny learning rates."""
    share = rounding_share(before, {name: lr * norm({name: step}) for name, step in direction.items()})
    return f"about {share:.0%} of this step is float rounding of the parameters" if share > ROUNDING_LIMIT else None


def _restore(random: RandomState) -> None:
    """Put the global generators where they stood then; called inside a `RandomState.replayed`, which puts them back."""
    torch.set_rng_state(random.cpu)
    for device, state in zip(random.devices, random.cuda, strict=True):
        torch.cuda.set_rng_state(state, device)
