"""The monitor as a callback of Hugging Face's Trainer and of Lightning.

Each library is imported only when its callback is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from stability.curvature.monitor import AlphaMaxMonitor, MonitorRow

Loss = Callable[[nn.Module, Any], Any]
Log = Callable[[dict[str, Any]], Any]


def hf_callback(
    every: int = 1,
    rows: int | None = None,
    loss_fn: Loss | None = None,
    *,
    method: str = "auto",
    log: Log | None = None,
) -> Any:
    """Return a callback that measures the optimizer steps of a Hugging Face Trainer.

    Usage: ``Trainer(…, callbacks=[hf_callback(every=10)])``. ``history`` contains the `MonitorRow`s; each is also
    appended to ``trainer.state.log_history`` as ``alpha_max/…``.

    A batch consists of the Trainer's keyword arguments to the model, so gradient accumulation is supported. The unit is
    the Trainer's: nats per label other than -100. The Trainer also counts the first token of each row, although a
    causal model does not predict it.

    Args:
        every: measure each k-th step.
        rows: rows per piece of a batch, as in `AlphaMaxMonitor`.
        loss_fn: ``loss_fn(model, inputs)``; default: the model's own loss, weighed over accumulated batches and ranks
            as by the Trainer. Needed for a Trainer with its own loss (an overridden ``compute_loss``,
            ``compute_loss_func``, label smoothing); without it, a row's note reports the mismatch.
        method: as in `AlphaMaxMonitor`.
        log: called with each row as a dict.

    Returns:
        A `transformers.TrainerCallback`.

    Raises:
        RuntimeError: transformers is not installed.
        ValueError: as in `AlphaMaxMonitor`, at the beginning of training.
    """
    callback_class = _require("transformers").TrainerCallback

    class AlphaMaxCallback(_Monitored, callback_class):
        def __init__(self) -> None:
            self._inputs = _TrainerInputs(loss_fn)

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
        ) -> None:
            self.monitor = AlphaMaxMonitor(
                model, optimizer, self._inputs.loss, every, rows, method=method, log=log, group=_all_ranks()
            )
            self._inputs.smoothing = getattr(args, "label_smoothing_factor", 0.0)
            self._inputs.watch(model, self.monitor, shared=getattr(args, "average_tokens_across_devices", False))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._inputs.open()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._inputs.close()
            if (row := self.end_step()) is not None:
                state.log_history.append({**_name_columns(row), "step": state.global_step})

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._inputs.unwatch()

    return AlphaMaxCallback()


def lightning_callback(
    every: int = 1,
    rows: int | None = None,
    loss_fn: Loss | None = None,
    *,
    method: str = "auto",
    log: Log | None = None,
) -> Any:
    """Return a callback that measures the optimizer steps of a Lightning Trainer.

    Usage: ``Trainer(…, callbacks=[lightning_callback(every=10)])``. ``history`` contains the `MonitorRow`s; each is
    also logged through the module as ``alpha_max/…``. ``accumulate_grad_batches`` is supported, and so is manual
    accumulation from one step to the next.

    Args:
        every: measure each k-th step.
        rows: rows per piece of a batch, as in `AlphaMaxMonitor`.
        loss_fn: ``loss_fn(module, batch)``; default: ``module.training_step(batch, batch_idx)``, a scalar or a dict
            with "loss". Its logging is silenced and its torchmetrics are restored after each replay, which runs in the
            trainer's precision. Needed with manual optimization, because ``training_step`` then steps itself; without
            it, every row is only a note.
        method: as in `AlphaMaxMonitor`.
        log: called with each row as a dict.

    Returns:
        A Lightning `Callback`.

    Raises:
        RuntimeError: lightning is not installed.
        ValueError: more than one optimizer, or as in `AlphaMaxMonitor`, at the beginning of training.
    """
    callback_class = _require("lightning").Callback

    class AlphaMaxCallback(_Monitored, callback_class):
        _manual = False
        _stepped = False  # manual optimization: whether the optimizer stepped since the last row
        _handle: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Make the monitor; with manual optimization, also a hook on each step."""
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"the module has {len(trainer.optimizers)} optimizers; lightning_callback measures one, "
                    "AlphaMaxMonitor any of them"
                )
            self._manual = not pl_module.automatic_optimization
            loss = _pass_inner_batch(loss_fn) if loss_fn else _refuse_replay if self._manual else _training_step
            self.monitor = AlphaMaxMonitor(
                pl_module,
                trainer.optimizers[0],
                _add_autocast(loss, trainer.precision_plugin),
                every,
                rows,
                method=method,
                log=log,
                group=_all_ranks(),
            )
            self.monitor.batches_per_step = None if self._manual else trainer.accumulate_grad_batches
            if self._manual:
                self._stepped = False
                self._handle = self.monitor.optimizer.register_step_post_hook(self._note_step)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self.monitor is not None:
                self.monitor.begin({"batch": batch, "batch_idx": batch_idx})

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self._manual and not self._stepped:
                return
            if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
                return
            self._stepped = False
            if (row := self.end_step()) is not None:
                numbers = {name: value for name, value in _name_columns(row).items() if isinstance(value, float)}
                pl_module.log_dict(numbers, on_step=True, on_epoch=False)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self._handle is not None:
                self._handle.remove()

        def _note_step(self, *_: Any) -> None:
            self._stepped = True

    return AlphaMaxCallback()


class _Monitored:
    """A callback's monitor, made at the beginning of training, and its rows."""

    monitor: AlphaMaxMonitor | None = None

    @property
    def history(self) -> list[MonitorRow]:
        return [] if self.monitor is None else self.monitor.history

    def end_step(self) -> MonitorRow | None:
        return None if self.monitor is None else self.monitor.end()


class _TrainerInputs:
    """The Trainer's arguments to the model within one step, and their loss."""

    def __init__(self, loss_fn: Loss | None):
        self._loss_fn = loss_fn
        self._open = False
        self._rows = 0
        self._ranks = 1
        self._handle: Any = None
        self.smoothing = 0.0

    def watch(self, model: nn.Module, monitor: AlphaMaxMonitor, shared: bool) -> None:
        """Record the model's training inputs in the monitor from now on."""
        self.unwatch()
        self._ranks = dist.get_world_size() if shared and monitor.group is not None else 1

        def record_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._open and module.training:
                self._rows += _first_rows(kwargs)
                monitor.begin(dict(kwargs))

        self._handle = model.register_forward_pre_hook(record_inputs, with_kwargs=True)

    def open(self) -> None:
        self._open, self._rows = True, 0

    def close(self) -> None:
        self._open = False

    def unwatch(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Return the loss, as (sum, count) if the Trainer gives ``num_items_in_batch``."""
        if self._loss_fn is not None:
            return self._loss_fn(model, inputs)
        if self.smoothing:
            raise ValueError(
                f"label_smoothing_factor={self.smoothing:g} is a loss of the Trainer's, not the model's; give "
                "hf_callback(loss_fn=…)"
            )
        loss = getattr(model(**inputs), "loss", None)
        if loss is None:
            raise ValueError(
                "the model's output has no loss, because the Trainer computes one of its own from it; give "
                "hf_callback(loss_fn=…)"
            )
        if inputs.get("num_items_in_batch") is None:
            return loss
        # with num_items_in_batch the model returns its share of the whole step's mean; counts add up to 1 per step
        return loss, _first_rows(inputs) / (self._rows * self._ranks)


def _first_rows(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of the first tensor, usually input_ids."""
    # position_ids or pixels may have another number of rows
    return next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim)


def _pass_inner_batch(loss_fn: Loss) -> Loss:
    """Wrap loss_fn to get Lightning's own batch, without the batch's index."""
    return lambda module, item: loss_fn(module, item["batch"])


def _training_step(module: nn.Module, item: dict[str, Any]) -> Any:
    with _silence(module):
        output = module.training_step(item["batch"], item["batch_idx"])  # type: ignore[operator]
    return output["loss"] if isinstance(output, Mapping) else output


def _refuse_replay(module: nn.Module, item: dict[str, Any]) -> Any:
    raise ValueError(
        "automatic_optimization=False: training_step makes the optimizer's step itself and cannot be replayed; give "
        "lightning_callback(loss_fn=…)"
    )


def _add_autocast(loss: Loss, plugin: Any) -> Loss:
    """Wrap a loss in the trainer's autocast around `training_step`."""

    def evaluate(module: nn.Module, item: dict[str, Any]) -> Any:
        with plugin.train_step_context():
            return loss(module, item)

    return evaluate


@contextmanager
def _silence(module: nn.Module):
    """Silence `self.log` and `self.log_dict`, and restore torchmetrics afterwards."""
    # a replay is not a training step
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        with restore_metrics(module):
            yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)


def _name_columns(row: MonitorRow) -> dict[str, Any]:
    return {f"alpha_max/{name}": value for name, value in asdict(row).items() if name not in ("step", "lr")}


def _all_ranks() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def _require(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{library} is not installed; pip install {library}") from error


_OF_MODULES = {"_parameters", "_buffers", "_modules"}  # nn.Module's own; a metric's update does not write into them


@contextmanager
def restore_metrics(module: nn.Module) -> Iterator[None]:
    """Put the state of the module's torchmetrics back after the block, also after an error.

    Otherwise a replay would count its batch again.
    """
    metrics = [(metric, _copy_state(vars(metric))) for metric in _metrics(module)]
    try:
        yield
    finally:
        for metric, state in metrics:
            vars(metric).clear()
            vars(metric).update(state)


def _metrics(module: nn.Module) -> list[nn.Module]:
    """Find the module's metrics, also in attributes, lists and dicts; none without torchmetrics."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return []
    held = [value for each in module.modules() for value in vars(each).values()]
    held += [item for value in held if isinstance(value, (list, tuple)) for item in value]
    held += [item for value in held if isinstance(value, dict) for item in value.values()]
    roots = [module, *(item for item in held if isinstance(item, library.Metric))]
    found = {id(each): each for root in roots for each in root.modules() if isinstance(each, library.Metric)}
    return list(found.values())


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a metric's attributes: tensors, lists and dicts."""
    return {name: value if name in _OF_MODULES else _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is list:
        return [_copy(item) for item in value]
    return _copy_state(value) if type(value) is dict else value
