"""Measure α_max of the steps that a training loop takes, beside it: the loop, its numbers and its random state stay as
they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stability.curvature._batches import num_rows, split_rows
from stability.curvature._inputs import Objective, RandomState, Tensors, mean_of
from stability.curvature._replay import _Item, _Loss, _rounding
from stability.curvature.alpha_max import (
    NO_CHANGE,
    NO_STEP,
    NOT_DEFINED,
    exact_difference,
)
from stability.curvature.parallel import parallel_directional, parallel_mean
from stability.curvature.products import Directional, check_method, directional

NAN = math.nan


@dataclass(frozen=True)
class MonitorRow:
    """One measured optimizer step, θ⁺ = θ + lr·u, on the batch that it was taken on. Losses in the units of ``loss_fn``
    (nats, as a rule).

    - ``step``: number of steps begun before this one.
    - ``lr``: α, the rate that the optimizer used.
    - ``loss``: L(θ).
    - ``slope``: ⟨∇L, u⟩.
    - ``curvature``: uᵀHu.
    - ``alpha_max``: Eq. 18, −2·slope/curvature; ∞ without positive curvature, 0 where u ascends.
    - ``alpha_max_over_lr``: below 1, the step is beyond its second-order threshold.
    - ``predicted_change``: lr·slope + lr²·curvature/2.
    - ``actual_change``: L(θ⁺) − L(θ), same batch, dropout masks and buffers.
    - ``method``: what gave the curvature, "none" where nothing was measured, "not defined" where the step is zero or
      the loss does not change along it: such a step is neither stable nor unstable.
    - ``rel_error``: of the curvature against differences of gradients, where it was checked.
    - ``note``: why a number is missing or not finite; None where nothing is amiss.
    """

    step: int
    lr: float
    loss: float = NAN
    slope: float = NAN
    curvature: float = NAN
    alpha_max: float = NAN
    alpha_max_over_lr: float = NAN
    predicted_change: float = NAN
    actual_change: float = NAN
    method: str = "none"
    rel_error: float | None = None
    note: str | None = None


class AlphaMaxMonitor:
    """Measure the step that the loop itself takes::

        monitor = AlphaMaxMonitor(model, optimizer, loss_fn, every=10)
        for batch in loader:
            with monitor.step(batch):
                ...  # your own zero_grad, forward, backward, clipping, optimizer.step(), scheduler.step()
        monitor.history[-1].alpha_max_over_lr

    - ``loss_fn(model, batch)`` returns the loss that the step descends: either a scalar, the batch's mean (accumulated
      batches, and ranks, then weigh alike, as loss/n and DDP weigh them), or (sum, count), whose mean is taken over all
      of them. It is called with the batch as given to `step` (it moves it to the device itself) and the model (of a
      DistributedDataParallel the module inside) in the mode that it is in as the block ends.
    - ``every``: measure each k-th step; the others cost nothing.
    - ``rows``: evaluate the batch in pieces of that many rows, in bounded memory: the same numbers, exactly for (sum,
      count), for a scalar where every row counts alike; dropout then draws other masks than the step did.
    - ``method``: as in `directional`.
    - ``log``: called with each row as a dict.
    - ``group``: the ranks over which the batch is spread (taken from a DistributedDataParallel model); every rank then
      makes the same calls and gets the numbers of the whole batch.

    u = (θ⁺ − θ)/lr over the whole block, so clipping, weight decay, momentum and anything else that moved θ are in it;
    lr is what the first parameter group had as ``optimizer.step()`` was called (other groups' ratios to it are in u). A
    measured step holds two more copies of the parameters. Not touched: parameters, ``.grad``, buffers, optimizer and
    torch's random state; forward hooks and what the model's own code counts in Python run again. Dropout inside a fused
    attention kernel on a GPU draws other masks than the replay, whose attention can be differentiated twice. Source:
    consensus paper 5.2; the predicted change is the second-order model behind Eq. 18.

    ValueError: an optimizer that holds none of the model's trainable parameters or others than the model's; sharded
    parameters (FSDP, DTensor); ``every`` or ``rows`` below 1; ``rows`` with a batch that cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[nn.Module, Any], Any],
        every: int = 1,
        rows: int | None = None,
        *,
        method: str = "auto",
        log: Callable[[dict[str, Any]], Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        check_method(method)
        for name, number in (("every", every), ("rows", rows)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} is {number!r}; a whole number of at least 1 is needed")
        if isinstance(model, DistributedDataParallel):
            model, group = model.module, group or model.process_group
        # accelerate's and Lightning's wrappers
        self.model, self.optimizer, self.group = model, getattr(optimizer, "optimizer", optimizer), group
        self.every, self.rows, self.method, self.log = every, rows, method, log
        self.history: list[MonitorRow] = []
        self._loss = _Loss(model, loss_fn)
        self._steps = 0
        self._start: Tensors | None = None  # θ before the step that is under way
        self._items: list[_Item] = []
        self._lrs: list[float] = []
        self._hook: Any = None
        _check_optimizer(model, self.optimizer)

    @contextmanager
    def step(self, batch: Any, *, accumulate: bool = False) -> Iterator[None]:
        """Measure the optimizer step that is taken in this block. With gradient accumulation: around each batch,
        ``accumulate=True`` on all but the one in whose block the optimizer steps.

        Nothing is measured where the block raises. Where dropout is to repeat, the block's first draw of random numbers
        is the forward pass's.
        """
        self.begin(batch)
        try:
            yield
        except BaseException:
            self.cancel()
            raise
        if not accumulate:
            self.end()

    def begin(self, batch: Any) -> None:
        """Do what `step` does as it enters, for callbacks: remember θ, buffers, random state, and the batch."""
        if self._steps % self.every:
            return
        if self._start is None:
            self._start = {name: param.detach().clone() for name, param in self._moving().items()}
            self._hook = self.optimizer.register_step_pre_hook(
                lambda optimizer, *_: self._lrs.append(float(optimizer.param_groups[0]["lr"]))
            )
        random = RandomState(self._start)
        self._items.append(
            _Item(batch, random, {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()})
        )

    def end(self) -> MonitorRow | None:
        """Do what `step` does as it leaves: measure, append to ``history``, log. None on the steps in between."""
        step, self._steps = self._steps, self._steps + 1
        if self._start is None:
            return None
        start, items, lrs = self._start, self._items, self._lrs
        self.cancel()
        row = self._row(step, start, items, lrs)
        self.history.append(row)
        if self.log is not None:
            self.log(asdict(row))
        return row

    def cancel(self) -> None:
        """Forget the step that was begun."""
        self._start, self._items, self._lrs = None, [], []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _moving(self) -> Tensors:
        held = {id(tensor) for group in self.optimizer.param_groups for tensor in group["params"]}
        return {
            name: param for name, param in self.model.named_parameters() if param.requires_grad and id(param) in held
        }

    def _row(self, step: int, start: Tensors, items: list[_Item], lrs: list[float]) -> MonitorRow:
        """Measure one step from what was remembered before it; a row with a note where there was no step to measure."""
        if not lrs:
            return MonitorRow(
                step,
                NAN,
                note="no step: optimizer.step() was not called (a gradient scaler skipped it, or gradients accumulate)",
            )
        lr, current = lrs[0], dict(self.model.named_parameters())
        after = {name: current[name].detach() for name in start}
        if all(torch.equal(after[name], tensor) for name, tensor in start.items()):  # NaN equals nothing
            return MonitorRow(
                step,
                lr,
                method=NOT_DEFINED,
                note=f"{NO_STEP}: no parameter changed" + (", the learning rate is 0" if lr == 0 else ""),
            )
        if not (math.isfinite(lr) and lr > 0):
            return MonitorRow(step, lr, note=f"the learning rate is {lr}, by which no step can be divided")
        direction = {
            name: exact_difference(after[name], tensor).div_(lr).to(tensor.dtype) for name, tensor in start.items()
        }
        pieces = [piece for item in items for piece in self._pieces(item)]
        with items[0].random.replayed(), self._loss.lending():
            along = self._along(start, direction, pieces)
            change = self._loss_at(after, pieces) - along.loss
        predicted = lr * along.slope + lr * lr * along.curvature / 2
        notes = [f"optimizer.step() was called {len(lrs)} times; u is their sum"] if len(lrs) > 1 else []
        is_flat = along.slope == along.curvature == 0
        notes += [
            note for note in (_rounding(start, direction, lr), along.nonfinite, NO_CHANGE if is_flat else None) if note
        ]
        numbers = (along.loss, along.slope, along.curvature, along.alpha_max, along.alpha_max / lr, predicted, change)
        return MonitorRow(
            step,
            lr,
            *numbers,
            method=NOT_DEFINED if is_flat else along.method,
            rel_error=along.rel_error,
            note="; ".join(notes) or None,
        )

    def _pieces(self, item: _Item) -> list[_Item]:
        if self.rows is None:
            return [item]
        total, cuts = num_rows(item.batch), split_rows(item.batch, self.rows)
        return [
            _Item(cut, item.random, item.buffers, num_rows(cut) / total, index == 0) for index, cut in enumerate(cuts)
        ]

    def _along(self, params: Tensors, direction: Tensors, pieces: list[_Item]) -> Directional:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        if self.group is None:
            return directional(self._loss.evaluate, leaves, direction, self.method, batches=pieces)
        return parallel_directional(
            self._loss.evaluate, leaves, direction, self.method, batches=pieces, group=self.group
        )

    def _loss_at(self, params: Tensors, pieces: list[_Item]) -> float:
        total = count = 0.0
        with torch.no_grad():
            # the attention that `directional` uses, too
            for value, number in Objective(self._loss.evaluate, pieces).terms(params, twice=True):
                total, count = total + value.item(), count + number
        return mean_of(total, count) if self.group is None else parallel_mean(total, count, self.group)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError where the model is sharded, or the optimizer does not hold the model's parameters and nothing
    else."""
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad}
    own = {id(param): param for param in model.parameters()}
    if any(hasattr(param, "full_tensor") or hasattr(param, "_is_flat_param") for param in own.values()):
        raise ValueError(
            "the model's parameters are sharded (FSDP or DTensor); curvature needs them whole on each rank, as "
            "DistributedDataParallel keeps them"
        )
    if not held & own.keys():
        raise ValueError(
            f"this {type(optimizer).__name__} holds no trainable parameter of the model; its steps would all read as "
            "zero"
        )
    if held - own.keys():
        raise ValueError(
            f"this {type(optimizer).__name__} holds {len(held - own.keys())} tensors that are not the model's; pass "
            "a module that has them all"
        )
