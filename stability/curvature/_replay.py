"""This module evaluates the monitored loss again, one block's batch after another, as the step saw it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from stability.curvature._batches import num_rows, split_rows
from stability.curvature._inputs import Objective, RandomState, Tensors, norm
from stability.curvature.alpha_max import (
    ROUNDING_LIMIT,
    rounding_share,
)


@dataclass(frozen=True)
class Item:
    """The state from which a replay of one block's forward pass starts.

    ``share``: of the batch's rows; ``first``: of the pieces; ``autocast``: device and dtype, None if it was off.
    """

    batch: Any
    random: RandomState
    buffers: Tensors
    share: float = 1.0
    first: bool = True
    autocast: tuple[str, torch.dtype] | None = None


class ReplayedLoss:
    """The user's loss_fn of the model, with other parameters and buffers lent to the model."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]):
        self.model, self.loss_fn = model, loss_fn
        self.is_scalar = False  # whether the last result was a mean, not (sum, count)
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

    def evaluate(self, params: Tensors, item: Item) -> tuple[Tensor, float]:
        """Compute (sum, count) of one piece from its own random state and a copy of its buffers.

        The parameters stay lent until the next call or the end of `lending`: whatever runs again in the backward pass
        (checkpoints of others, hooks on saved tensors) finds those that the loss was evaluated with.
        """
        self._lent.close()
        if item.first:
            item.random.restore()
        lent = {**params, **{name: buffer.clone() for name, buffer in item.buffers.items()}}
        self._lent.enter_context(_reparametrize_module(self.model, lent, tie_weights=True))
        with _autocast_as_called(self.model, item.autocast):
            result = self.loss_fn(self.model, item.batch)
        self.is_scalar = isinstance(result, Tensor)
        if isinstance(result, Tensor):
            return result * item.share, item.share
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                f"loss_fn(model, batch) returns a scalar tensor or (sum, count); it returned a {type(result).__name__}"
            )
        return result[0], result[1]


def autocast_of(params: Tensors) -> tuple[str, torch.dtype] | None:
    """Device type and dtype of the autocast in force where the parameters are; None if there is none."""
    device = next(iter(params.values())).device.type
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


@contextmanager
def _autocast_as_called(model: nn.Module, state: tuple[str, torch.dtype] | None) -> Iterator[None]:
    """Switch autocast on where loss_fn calls the model, if it was on in the loop and loss_fn does not do so itself."""
    if state is None:
        yield
        return
    with ExitStack() as stack:
        device, dtype = state

        def enter(module: nn.Module, args: Any) -> None:
            if not torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype))

        stack.callback(model.register_forward_pre_hook(enter).remove)
        yield


def pieces_of(item: Item, rows: int | None) -> list[Item]:
    """The batch in pieces of ``rows`` rows; None: whole."""
    if rows is None:
        return [item]
    total, cuts = num_rows(item.batch), split_rows(item.batch, rows)
    return [
        replace(item, batch=cut, share=item.share * num_rows(cut) / total, first=item.first and index == 0)
        for index, cut in enumerate(cuts)
    ]


def adds_up_rows(loss: ReplayedLoss, params: Tensors, item: Item, rows: int) -> bool:
    """Whether a scalar loss is a sum over rows: two pieces' rows make it nearer to twice as large than to the same."""
    if num_rows(item.batch) <= rows:
        return False
    joint = replace(item, batch=split_rows(item.batch, 2 * rows)[0])
    halves = pieces_of(joint, rows)
    with torch.no_grad():
        joined = Objective(loss.evaluate, [joint]).total(params)[0]
        if not loss.is_scalar:
            return False
        mean = Objective(loss.evaluate, halves).total(params)[0]
    sum_ratio = 1 / sum(half.share**2 for half in halves)
    ratio = joined / mean if mean else 1.0
    return ratio > 0 and abs(math.log(ratio / sum_ratio)) < abs(math.log(ratio))


def rounding_note(before: Tensors, direction: Tensors, lr: float) -> str | None:
    """Return a note where the rounding of θ⁺ makes up more than 1 % of the step, as it does at tiny learning rates."""
    share = rounding_share(before, {name: lr * norm({name: step}) for name, step in direction.items()})
    return f"about {share:.0%} of this step is float rounding of the parameters" if share > ROUNDING_LIMIT else None
