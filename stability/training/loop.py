"""The loop of a training, which can be left after any step and resumed: runs and structure tokenizers go through it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stability.config.run import RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.runs.directory import INTERRUPTED, STOPPED, RunDirectory, readable_rows, write_json
from stability.runs.log import RunLog, logged_until
from stability.runs.provenance import provenance
from stability.runs.sinks import Sinks
from stability.training.checkpoints import Checkpoints


class Training(ABC):
    """A model in training: one step of it, its state, its verdict. `train` drives it.

    ``step``: the last step that was taken, of ``num_steps``. ``diverged``: the reason that ends it early, else None.
    ``gradient_rows``: rows of the last step for gradients.jsonl. ``running``: further values of the status "running".
    """

    spec: RunSpec | TokenizerRunSpec
    device: torch.device
    checkpoints: Checkpoints
    num_steps: int
    step: int = 0
    diverged: str | None = None
    gradient_rows: list[dict[str, Any]] | tuple[()] = ()
    running: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def first_row(self) -> dict[str, Any]:
        """Return the row that is logged before any step."""

    @abstractmethod
    def train_step(self, step: int) -> dict[str, Any]:
        """Take the optimizer's step number ``step``, unless something is not finite; return its log row."""

    @abstractmethod
    def settle(self, row: dict[str, Any]) -> None:
        """Set ``step`` to the row's or ``diverged`` to a reason; validate where it is due, into the row."""

    def timing(self, seconds: float) -> dict[str, Any]:
        """Return further values of a row of timing.jsonl, of a step that took these seconds."""
        return {}

    @abstractmethod
    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return a checkpoint's content: the model, and all else that the next step depends on."""

    @abstractmethod
    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go to the step at which `state` was taken."""

    def is_sound(self) -> bool:
        """Return whether a checkpoint may be written now, if it has not diverged."""
        return True

    @abstractmethod
    def judge(self, wall_s: float) -> tuple[str, str, dict[str, Any]]:
        """Return verdict, reason and result (plain values) of a training of so many seconds."""

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
    """Train to the verdict, yielding after every optimizer step; a finished training is left alone.

    Closed at a yield, it writes a checkpoint there and sets the status ``interrupted``. Called again it resumes from
    the last readable checkpoint, bit for bit as if it had never stopped (same hardware). Divergence is a verdict.

    Args:
        directory: of the run or tokenizer, with its spec.
        prepared: gives the training, and ends its processes afterwards.
        command: the command line that asked for it, for provenance.json.
        sinks: get each row of metrics.jsonl, too, and are left open.
        stop_at: the step after which it is left as ``stopped``, if it is not the last.
    """
    if directory.finished:
        return
    with prepared as training:
        checkpoints = training.checkpoints
        of_this = {"device": str(training.device), "threads": training.spec.threads}
        write_json(directory.provenance_file, {**provenance(command), **training.provenance(), **of_this})

        # Resume: no row of the log may be missing up to the checkpoint, and those after it go.
        newest = checkpoints.latest(*logged_until(directory))
        if newest is not None:
            training.restore(*newest)
        log = RunLog(directory, resume_after=training.step or -1, sinks=sinks)
        timings = readable_rows(directory.timing_file, ("step", "wall_s"))
        started = time.perf_counter() - (timings[-1]["wall_s"] if timings else 0.0)
        directory.set_status("running", step=training.step, num_steps=training.num_steps, **training.running)
        if training.step == 0:
            log.metrics(training.first_row())

        def save() -> None:
            if checkpoints.lacks(training.step):
                log.sync()
                checkpoints.write(training.step, *training.state())

        def leave(state: str) -> None:
            # If it has diverged, the parameters may hold the cause; the step is taken again after resuming.
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
                training.settle(row)
                log.metrics(row)
                if training.gradient_rows:
                    log.gradients([*training.gradient_rows])
                now = time.perf_counter()
                log.timing({"step": step, "wall_s": now - started, **training.timing(now - began)})
                if training.diverged is None and checkpoints.is_due(step):
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
