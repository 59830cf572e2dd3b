"""This module evaluates the monitored loss again, one block's batch after another, as the step saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

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


class _Loss:
    """The user's loss_fn of the model, with other parameters and buffers lent to the model."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]):
        self.model, self.loss_fn = model, loss_fn
        self._lent = ExitStack()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Allow `evaluate` inside the block; at its end the model has its own parameters, buffers and modes again."""
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        finally:
            self._lent.close()
            for module, training in modes:
                module.training = training

    def evaluate(self, params: Tensors, item: _Item) -> tuple[Tensor, float]:
        """Compute (sum, count) of one piece from its own random state and a copy of its buffers.

        The parameters stay lent until the next call or the end of `lending`: whatever runs again in the backward pass
        (checkpoints of others, hooks on saved tensors) finds those that the loss was evaluated with.
        """
        self._lent.close()
        if item.first:
            item.random.restore()
        lent = {**params, **{name: buffer.clone() for name, buffer in item.buffers.items()}}
        self._lent.enter_context(_reparametrize_module(self.model, lent, tie_weights=True))
        result = self.loss_fn(self.model, item.batch)
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
