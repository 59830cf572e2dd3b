"""The resumable training loop of runs and structure tokenizers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stability.config.run import RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.runs.directory import INTERRUPTED, STOPPED, RunDirectory, readable_rows, write_json
from stability.runs.log import RunLog, Sinks, find_last_logged_step
from stability.runs.provenance import provenance
from stability.training.checkpoint import Checkpoints


class Training(ABC):
    """A model in training: one step, its state, its verdict. `train` drives it.

    Attributes:
        step: last step taken, of ``num_steps``.
        diverged: reason of an early end, else None.
        saves: whether a checkpoint is due after this step.
        signals: rows of the last step by log of `RunDirectory.signal_files`.
        running: further values of the status "running".
    """

    spec: RunSpec | TokenizerRunSpec
    device: torch.device
    checkpoints: Checkpoints
    num_steps: int
    step: int = 0
    diverged: str | None = None
    saves: bool = False
    signals: Mapping[str, list[dict[str, Any]]] = MappingProxyType({})
    running: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def first_row(self) -> dict[str, Any]:
        """Return the log row of the untrained model, step 0."""

    @abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Take one optimizer step unless a value is not finite; return its log row."""

    @abstractmethod
    def record_step(self, row: dict[str, Any]) -> None:
        """Set ``step`` or ``diverged``, and ``saves``, from the row; add a due validation to the row."""

    def timing(self, seconds: float) -> dict[str, Any]:
        """Return further values of a step's timing.jsonl row.

        Args:
            seconds: duration of the step.
        """
        return {}

    @abstractmethod
    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return a checkpoint's content: the model and all other state of the next step."""

    @abstractmethod
    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Load the state that `state` returned."""

    def is_sound(self) -> bool:
        """Return whether the current state may be saved, if it has not diverged."""
        return True

    @abstractmethod
    def judge(self, wall_s: float) -> tuple[str, str, dict[str, Any]]:
        """Return verdict, reason and result (plain values).

        Args:
            wall_s: training time in seconds.
        """

    def provenance(self) -> dict[str, Any]:
        """Return further values for provenance.json."""
        return {}


def train(
    directory: RunDirectory,
    prepared: AbstractContextManager[Training],
    *,
    command: str = "",
    sinks: Sinks | None = None,
    stop_at: int | None = None,
) -> Generator[None, None, None]:
    """Train to the verdict, yielding after every optimizer step.

    A finished training is left alone. Closed at a yield, the loop writes a checkpoint and sets the status
    ``interrupted``. A new call resumes from the last readable checkpoint, bit for bit as if undisturbed (same
    hardware). Divergence is a verdict, not an error.

    Args:
        directory: folder of the run or tokenizer, with its spec.
        prepared: context of the training; it ends the training's processes on exit.
        command: command line of the launch, for provenance.json.
        sinks: receive each row of metrics.jsonl; they are not closed.
        stop_at: step after which the run is left as ``stopped``, if it is not the last.
    """
    if directory.finished:
        return
    with prepared as training:
        checkpoints = training.checkpoints
        of_this = {"device": str(training.device), "threads": training.spec.threads}
        write_json(directory.provenance_file, {**provenance(command), **training.provenance(), **of_this})

        # Resume from a checkpoint with a complete log up to its step; later rows of the log are dropped.
        newest = checkpoints.latest(*find_last_logged_step(directory))
        if newest is not None:
            training.restore(*newest)
        log = RunLog(directory, resume_after=training.step or -1, sinks=sinks)
        timings = readable_rows(directory.timing_file, ("step", "wall_s"))
        started = time.perf_counter() - (timings[-1]["wall_s"] if timings else 0.0)
        directory.set_status("running", step=training.step, num_steps=training.num_steps, **training.running)
        if training.step == 0:
            log.write_metrics(training.first_row())

        def save() -> None:
            if checkpoints.lacks(training.step):
                log.sync()
                checkpoints.write(training.step, *training.state())

        def leave(state: str) -> None:
            # Not saved if diverged: the parameters may be non-finite. The step is repeated after resuming.
            if training.diverged is None and training.is_sound():
                save()
            step = checkpoints.newest
            reason = f"{state} at step {step} of {training.num_steps}"
            directory.set_status(state, step=step, reason=reason, num_steps=training.num_steps)

        try:
            last = min(training.num_steps, stop_at or training.num_steps)
            while training.step < last and training.diverged is None:
                step, began = training.step + 1, time.perf_counter()
                row = training.train_step(step)
                training.record_step(row)
                log.write_metrics(row)
                for name, rows in training.signals.items():
                    log.write_signals(name, rows)
                now = time.perf_counter()
                log.write_timing({"step": step, "wall_s": now - started, **training.timing(now - began)})
                if training.saves and training.diverged is None:
                    save()
                yield
            if training.diverged is None and training.step < training.num_steps:
                leave(STOPPED)
            else:
                verdict, reason, result = training.judge(time.perf_counter() - started)
                checkpoints.remove_unplanned(training.step)
                ended = {"step": training.step, "num_steps": training.num_steps}
                directory.set_status(verdict, **ended, reason=reason, result=result)
        except GeneratorExit:
            leave(INTERRUPTED)
            raise
        finally:
            log.close()
