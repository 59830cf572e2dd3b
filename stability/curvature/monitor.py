"""Measure α_max of a training loop's own steps.

The loop, its numbers and its random state are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stability.curvature._directional import Directional
from stability.curvature._graph import NoSecondDerivative
from stability.curvature._inputs import Objective, Tensors, mean_of
from stability.curvature._replay import Item, ReplayedLoss, adds_up_rows, pieces_of, rounding_note
from stability.curvature._step import StepUnderWay, check_optimizer
from stability.curvature._warnings import warn
from stability.curvature.alpha_max import NO_CHANGE, NO_STEP, NOT_DEFINED, exact_difference
from stability.curvature.parallel import parallel_directional, parallel_mean, run_together
from stability.curvature.products import BY_DIFFERENCES, check_method, directional

NAN = math.nan


@dataclass(frozen=True)
class MonitorRow:
    """One measured optimizer step, θ⁺ = θ + lr·u, on its own batch.

    Losses are in the unit of ``loss_fn`` (usually nats).

    Attributes:
        step: number of earlier steps.
        lr: α, the rate of the first parameter group; the largest rate if the first is 0 (then noted).
        loss: L(θ).
        slope: ⟨∇L, u⟩.
        curvature: uᵀHu.
        alpha_max: Eq. 18, −2·slope/curvature; ∞ without positive curvature, 0 if u ascends.
        alpha_max_over_lr: below 1, the step exceeds its second-order threshold.
        predicted_change: lr·slope + lr²·curvature/2.
        actual_change: L(θ⁺) − L(θ), with the same batch, dropout masks and buffers.
        method: source of the curvature. "none": nothing was measured. "not defined": the step is zero or the loss does
            not change along it, so the step is neither stable nor unstable.
        rel_error: relative error of the curvature against differences of gradients; None without a check.
        error_bar: largest error of a curvature by central differences, in its unit; None for an exact one.
        note: reason for a number missing, NaN or in doubt; None without one. α_max = ∞ is a result and has no note:
            ``curvature`` ≤ 0 explains it.
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
    error_bar: float | None = None
    note: str | None = None


__all__ = ["AlphaMaxMonitor", "MonitorRow"]


class AlphaMaxMonitor:
    """Measure α_max of the optimizer steps of a training loop.

    Usage::

        monitor = AlphaMaxMonitor(model, optimizer, loss_fn, every=10)
        for batch in loader:
            with monitor.step(batch):
                ...  # your own zero_grad, forward, backward, clipping, optimizer.step(), scheduler.step()
        monitor.history[-1].alpha_max_over_lr

    u = (θ⁺ − θ)/lr over the whole block, so it includes clipping, weight decay, momentum and any other change of θ. lr
    is the first parameter group's rate at the call of ``optimizer.step()``; the other groups' ratios to it are in u. A
    measured step needs two more copies of the parameters. Source: consensus paper 5.2; the predicted change is the
    second-order model behind Eq. 18.

    Unchanged: parameters, ``.grad``, buffers, modes, optimizer, and the global random states of torch, numpy and
    Python. Forward hooks run again, and so do counters in the model's own Python code. Checkpointed blocks
    (torch.utils.checkpoint) are evaluated with their activations stored. The replay uses the loop's autocast around the
    model's call.

    Dropout inside a fused attention kernel on a GPU draws other masks in the replay, because the replay's attention
    must be twice differentiable; all later dropout then differs, too. ``method="finite_difference"`` replays with the
    loop's own kernels. On a CPU torch fuses no attention with dropout.

    The replay's slope is compared with the slope of the ``.grad`` used by the optimizer. If they disagree, as with
    another ``loss_fn`` than the loop's, the row has a note, and the first such row gives a RuntimeWarning. Not
    compared: ranks, and the steps named in `StepGradient`.

    No error of a replay ends the training: its row has a note and no numbers, and the first one gives a RuntimeWarning.

    Args:
        model: the model in training; of a DistributedDataParallel, the module inside is measured.
        optimizer: contains trainable parameters of the model and no others.
        loss_fn: ``loss_fn(model, batch)`` returns the loss of the step. Either a scalar, the batch's mean; accumulated
            batches and ranks then have equal weights, as with loss/n and DDP. Or (sum, count), averaged over all
            batches and ranks. It is called with the batch given to `step` (and moves it to the device itself), and with
            the model in its mode at the end of the block.
        every: measure each k-th step; the others cost nothing.
        rows: evaluate the batch in pieces of this many rows, in bounded memory. The numbers are the same, exactly for
            (sum, count), and for a scalar if all rows have equal weight. Dropout then draws other masks than the step.
        method: as in `directional`.
        log: called with each row as a dict.
        group: the ranks that share the batch (taken from a DistributedDataParallel model). Every rank must make the
            same calls, and gets the numbers of the whole batch.

    Raises:
        ValueError: the optimizer has none of the model's trainable parameters, or other tensors; the parameters are
            sharded (FSDP, DTensor); ``every`` or ``rows`` is below 1.
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
        self.batches_per_step: int | None = None  # divisor of each batch's loss in the loop; None: number of batches
        self._loss = ReplayedLoss(model, loss_fn)
        self._steps = 0
        self._under_way: StepUnderWay | Exception | None = None  # an Exception if `begin` failed
        self._warned = False  # about a step not measured, or a failed log
        self._doubted = False  # warned about a replay different from the loop's step
        self._adds_up_rows: bool | None = None  # None: not compared yet
        check_optimizer(model, self.optimizer)

    @contextmanager
    def step(self, batch: Any, *, accumulate: bool = False) -> Iterator[None]:
        """Measure the optimizer step made in this block.

        With gradient accumulation, put a block around each batch, with ``accumulate=True`` on all but the one with the
        optimizer's step. Nothing is measured if the block raises. For dropout to repeat, the block's first draw of
        random numbers must be the forward pass's.
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
        """Record θ, buffers, random state and the batch, as `step` does on entry.

        For callbacks.
        """
        if self._steps % self.every or isinstance(self._under_way, Exception):
            return
        try:
            if self._under_way is None:
                self._under_way = StepUnderWay(self.model, self.optimizer, alone=self.group is None)
                # torch is restored also after a step without an end, e.g. if the training raises
                self._closing = finalize(self, self._under_way.close)
            self._under_way.add(batch)
        except Exception as error:  # noqa: BLE001  e.g. out of memory; `end` writes it into the row
            self.cancel()
            self._under_way = error

    def end(self) -> MonitorRow | None:
        """Measure, append to ``history`` and log, as `step` does on exit.

        Returns:
            The row; None for a step not to be measured.
        """
        step, self._steps = self._steps, self._steps + 1
        current = self._under_way
        self.cancel()
        if current is None:
            return None
        doubt = None
        try:
            row, doubt = self._row(step, current)
        except Exception as error:  # noqa: BLE001  a monitor never ends a training
            lr = current.lrs[0] if isinstance(current, StepUnderWay) and current.lrs else NAN
            row = MonitorRow(step, lr, note=f"not measured: {_line(error)}")
            self._warn(f"step {step} was {row.note}; training goes on, and later rows say so in their note only")
        self.history.append(row)
        if self.log is not None:
            self._log_row(self.log, row)
        if doubt and not self._doubted:
            self._doubted = True
            warn(f"AlphaMaxMonitor: at step {step}, {doubt}; later rows say so in their note only")
        return row

    def cancel(self) -> None:
        """Forget the step begun."""
        if isinstance(self._under_way, StepUnderWay):
            self._closing()
        self._under_way = None

    def _log_row(self, log: Callable[[dict[str, Any]], Any], row: MonitorRow) -> None:
        try:
            log(asdict(row))
        except Exception as error:  # noqa: BLE001  a monitor never ends a training
            self._warn(f"log failed at step {row.step}: {_line(error)}; training goes on")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn(f"AlphaMaxMonitor: {text}")

    def _row(self, step: int, begun: StepUnderWay | Exception) -> tuple[MonitorRow, str | None]:
        """Measure a step; return its row, and a note if the replay's slope is not the step's."""
        prepared = self._run_on_all(lambda: self._prepare(step, begun))
        if isinstance(prepared, MonitorRow):
            return prepared, None
        current, lr, after, direction, pieces, notes = prepared
        with pieces[0].random.replay(), self._loss.restore_model():
            along = self._measure_along(current.start, direction, pieces)
            exact = along.method not in BY_DIFFERENCES  # L(θ) then used the twice differentiable attention
            total, count = self._run_on_all(lambda: Objective(self._loss.evaluate, pieces).total(after, twice=exact))
            loss_after = mean_of(total, count) if self.group is None else parallel_mean(total, count, self.group)
        is_flat = along.slope == along.curvature == 0
        notes += [along.nonfinite, along.note, NO_CHANGE if is_flat else None]
        doubt = None
        if current.gradient is not None and not self._adds_up_rows:
            batches = len(current.items)
            doubt = current.gradient.disagreement(along.slope, lr, direction, batches, self.batches_per_step or batches)
            notes.append(doubt)
        predicted = lr * along.slope + lr * lr * along.curvature / 2
        change = loss_after - along.loss
        numbers = (along.loss, along.slope, along.curvature, along.alpha_max, along.alpha_max / lr, predicted, change)
        row = MonitorRow(
            step,
            lr,
            *numbers,
            method=NOT_DEFINED if is_flat else along.method,
            rel_error=along.rel_error,
            error_bar=along.error_bar,
            note="; ".join(note for note in notes if note) or None,
        )
        return row, doubt

    def _prepare(self, step: int, current: StepUnderWay | Exception) -> Any:
        """Return the step, lr, θ⁺, u, pieces and first notes; or a row without numbers."""
        if isinstance(current, Exception):
            raise current
        if not current.lrs:
            return MonitorRow(
                step,
                NAN,
                note="no step: optimizer.step() was not called (a gradient scaler skipped it, or gradients accumulate)",
            )
        lr, start, own = current.lrs[0], current.start, dict(self.model.named_parameters())
        after = {name: own[name].detach() for name in start}
        if all(torch.equal(after[name], tensor) for name, tensor in start.items()):  # NaN equals nothing
            note = f"{NO_STEP}: no parameter changed" + (", the learning rate is 0" if lr == 0 else "")
            return MonitorRow(step, lr, method=NOT_DEFINED, note=note)
        if not (math.isfinite(lr) and lr > 0):
            return MonitorRow(step, lr, note=f"the learning rate is {lr}, by which no step can be divided")
        direction = {
            name: exact_difference(after[name], tensor).div_(lr).to(tensor.dtype) for name, tensor in start.items()
        }
        items = [replace(item, autocast=current.autocast) for item in current.items]
        pieces = [piece for item in items for piece in pieces_of(item, self.rows)]
        notes = [
            f"optimizer.step() was called {len(current.lrs)} times; u is their sum" if len(current.lrs) > 1 else None,
            f"the first parameter group's learning rate is 0; u is divided by the largest, {lr:g}"
            if current.first_is_zero
            else None,
            rounding_note(start, direction, lr),
            self._rows_note(start, items[0]),
        ]
        return current, lr, after, direction, pieces, notes

    def _rows_note(self, start: Tensors, item: Item) -> str | None:
        """Compare a loss of joined rows with that of their halves, once."""
        if self.rows is None:
            return None
        if self._adds_up_rows is None:
            with item.random.replay(), self._loss.restore_model():
                self._adds_up_rows = adds_up_rows(self._loss, start, item, self.rows)
        if not self._adds_up_rows:
            return None
        return (
            "loss_fn adds up the rows of its batch: with rows= loss, slope and curvature are a piece's; return the "
            "mean, or (sum, count)"
        )

    def _run_on_all(self, local: Callable[[], Any]) -> Any:
        return local() if self.group is None else run_together(local, self.group)

    def _measure_along(self, params: Tensors, direction: Tensors, pieces: list[Item]) -> Directional:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        if self.group is None:
            return directional(self._loss.evaluate, leaves, direction, self.method, batches=pieces)
        return parallel_directional(
            self._loss.evaluate, leaves, direction, self.method, batches=pieces, group=self.group
        )


def _line(error: Exception) -> str:
    """Return an error's first line, with its type if needed for clarity."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, (ValueError, NoSecondDerivative)) and text else f"{type(error).__name__}: {text}"
