"""This module evaluates the monitored loss again, one block's batch after another, as the step saw it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from stability.curvature._autocast import Autocast, deepest, entered
from stability.curvature._inputs import Objective, RandomState, Tensors, norm
from stability.curvature.alpha_max import (
    ROUNDING_LIMIT,
    rounding_share,
)


@dataclass(frozen=True)
class Item:
    """The state from which a replay of one block's forward pass starts.

    ``share``: of the batch's rows; ``first``: of the pieces; ``autocast``: the step's outermost, None if it has none.
    """

    batch: Any
    random: RandomState
    buffers: Tensors
    share: float = 1.0
    first: bool = True
    autocast: Autocast | None = None


class ReplayedLoss:
    """The user's loss_fn of the model, with other parameters and buffers lent to the model."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any]):
        self.model, self.loss_fn = model, loss_fn
        self.is_scalar = False  # whether the last result was a mean, not (sum, count)
        self._lent = ExitStack()
        self._around: Autocast | None = None  # the autocast of the step that the loop was found to put around loss_fn

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Give the model its own parameters, buffers and modes back at the end of a block of `evaluate` calls."""
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
        result, like_step = self._called(item)
        if not like_step:
            self._around = item.autocast
            try:
                return self.evaluate(params, item)
            except Exception:
                self._around = None  # nothing is known yet
                raise
        self.is_scalar = isinstance(result, Tensor)
        if isinstance(result, Tensor):
            return result * item.share, item.share
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                f"loss_fn(model, batch) returns a scalar tensor or (sum, count); it returned a {type(result).__name__}"
            )
        return result[0], result[1]

    def _called(self, item: Item) -> tuple[Any, bool]:
        """Call loss_fn; return its result, and False if it lacks the loop's autocast."""
        loop = item.autocast
        if loop is None:
            return self.loss_fn(self.model, item.batch), True
        if self._around == loop:
            with torch.autocast(loop.device, dtype=loop.dtype):
                return self.loss_fn(self.model, item.batch), True
        with entered() as own:
            try:
                result = self.loss_fn(self.model, item.batch)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # as types that only fit under autocast; any other is raised inside it, too
                return None, False
        # the step nested its autocasts more deeply
        return result, deepest(own.entries, loop.device, torch.is_grad_enabled()) >= loop.depth


def pieces_of(item: Item, rows: int | None) -> list[Item]:
    """Cut the batch into pieces of ``rows`` rows; None: whole."""
    if rows is None:
        return [item]
    total, cuts = num_rows(item.batch), split_rows(item.batch, rows)
    return [
        replace(item, batch=cut, share=item.share * num_rows(cut) / total, first=item.first and index == 0)
        for index, cut in enumerate(cuts)
    ]


def adds_up_rows(loss: ReplayedLoss, params: Tensors, item: Item, rows: int) -> bool:
    """Return whether a scalar loss is a sum over rows: for twice the rows it is nearer to twice as large."""
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


def num_rows(batch: Any) -> int:
    """Return the first dimension that the batch's tensors share. ``batch``: a tensor, or tuples, lists and dicts of
    them; numbers and 0-d tensors go along.

    ValueError where there is no tensor or they differ.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch)}
    if len(sizes) != 1:
        found = f"tensors of {sorted(sizes)} rows" if sizes else f"no tensor in a {type(batch).__name__}"
        raise ValueError(
            f"rows= needs a batch whose tensors share their first dimension (in tuples, lists, dicts); it has {found}"
        )
    return sizes.pop()


def split_rows(batch: Any, rows: int) -> list[Any]:
    """Return the batch in pieces of ``rows`` rows, the last one smaller; views. ValueError as in `num_rows`."""
    total = num_rows(batch)
    return [_mapped(lambda tensor, start=start: tensor[start : start + rows], batch) for start in range(0, total, rows)]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [_mapped(function, item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
