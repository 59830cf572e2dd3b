"""Evaluate the monitored loss again, as in the training step.

The batches of accumulated blocks are evaluated one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from stability.curvature._autocast import Autocast, find_depth, record_autocasts
from stability.curvature._inputs import Objective, RandomState, Tensors, norm
from stability.curvature.alpha_max import (
    ROUNDING_LIMIT,
    rounding_share,
)


@dataclass(frozen=True)
class Item:
    """The initial state for a replay of one block's forward pass.

    Attributes:
        batch: the block's batch.
        random: random state before the forward pass.
        buffers: the model's buffers before it, by name.
        share: share of the batch's rows.
        first: whether this is the batch's first piece.
        autocast: the step's outermost autocast, or None.
    """

    batch: Any
    random: RandomState
    buffers: Tensors
    share: float = 1.0
    first: bool = True
    autocast: Autocast | None = None


class ReplayedLoss:
    """The user's loss_fn of the model, with other parameters and buffers lent to it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]):
        self.model, self.loss_fn = model, loss_fn
        self.is_scalar = False  # whether the last result was a mean, not (sum, count)
        self._lent = ExitStack()
        self._around: Autocast | None = None  # the step's autocast, if the loop enters it around loss_fn

    @contextmanager
    def restore_model(self) -> Iterator[None]:
        """Give the model its own parameters, buffers and modes back after the block.

        The block contains the `evaluate` calls.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        finally:
            self._lent.close()
            for module, training in modes:
                module.training = training

    def evaluate(self, params: Tensors, item: Item) -> tuple[Tensor, float]:
        """Compute (sum, count) of one piece from its random state and copied buffers.

        The parameters stay lent until the next call or the end of `restore_model`. Code that runs again in the backward
        pass (other checkpoints, hooks on saved tensors) then uses the same parameters as the loss.
        """
        self._lent.close()
        if item.first:
            item.random.restore()
        lent = {**params, **{name: buffer.clone() for name, buffer in item.buffers.items()}}
        self._lent.enter_context(_reparametrize_module(self.model, lent, tie_weights=True))
        result, like_step = self._call(item)
        if not like_step:
            self._around = item.autocast
            try:
                return self.evaluate(params, item)
            except Exception:
                self._around = None  # undecided again
                raise
        self.is_scalar = isinstance(result, Tensor)
        if isinstance(result, Tensor):
            return result * item.share, item.share
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                f"loss_fn(model, batch) returns a scalar tensor or (sum, count); it returned a {type(result).__name__}"
            )
        return result[0], result[1]

    def _call(self, item: Item) -> tuple[Any, bool]:
        """Call loss_fn; return its result, and False if it lacks the loop's autocast."""
        loop = item.autocast
        if loop is None:
            return self.loss_fn(self.model, item.batch), True
        if self._around == loop:
            with torch.autocast(loop.device, dtype=loop.dtype):
                return self.loss_fn(self.model, item.batch), True
        with record_autocasts() as own:
            try:
                result = self.loss_fn(self.model, item.batch)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # e.g. types that only fit under autocast; any other error recurs under it
                return None, False
        # the step nested its autocasts more deeply
        return result, find_depth(own.entries, loop.device, torch.is_grad_enabled()) >= loop.depth


def pieces_of(item: Item, rows: int | None) -> list[Item]:
    """Cut the batch into pieces of ``rows`` rows; None: one piece."""
    if rows is None:
        return [item]
    total, cuts = num_rows(item.batch), split_rows(item.batch, rows)
    return [
        replace(item, batch=cut, share=item.share * num_rows(cut) / total, first=item.first and index == 0)
        for index, cut in enumerate(cuts)
    ]


def adds_up_rows(loss: ReplayedLoss, params: Tensors, item: Item, rows: int) -> bool:
    """Return whether a scalar loss is a sum over rows, not a mean.

    For a sum, twice the rows give a loss nearer to twice as large.

    Args:
        loss: the replayed loss.
        params: θ by name.
        item: a batch with its random state.
        rows: number of rows of each half compared.
    """
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
    """Return a note if rounding of θ⁺ exceeds 1 % of the step.

    This happens at tiny learning rates. Otherwise None.

    Args:
        before: θ by name.
        direction: u = (θ⁺ − θ)/lr by name.
        lr: learning rate.
    """
    share = rounding_share(before, {name: lr * norm({name: step}) for name, step in direction.items()})
    return f"about {share:.0%} of this step is float rounding of the parameters" if share > ROUNDING_LIMIT else None


def num_rows(batch: Any) -> int:
    """Return the first dimension shared by all tensors of the batch.

    The batch is a tensor, or tuples, lists and dicts of them. Numbers and 0-d tensors are ignored.

    Raises:
        ValueError: no tensor, or different first dimensions.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch)}
    if len(sizes) != 1:
        found = f"tensors of {sorted(sizes)} rows" if sizes else f"no tensor in a {type(batch).__name__}"
        raise ValueError(
            f"rows= needs a batch whose tensors share their first dimension (in tuples, lists, dicts); it has {found}"
        )
    return sizes.pop()


def split_rows(batch: Any, rows: int) -> list[Any]:
    """Return the batch as views of ``rows`` rows each; the last may be smaller.

    Raises:
        ValueError: as in `num_rows`.
    """
    total = num_rows(batch)
    return [
        _map_tensors(lambda tensor, start=start: tensor[start : start + rows], batch) for start in range(0, total, rows)
    ]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


def _map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [_map_tensors(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
