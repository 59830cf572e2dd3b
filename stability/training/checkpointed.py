"""A training that can be left after any step and gone on with: what runs and structure tokenizers have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stability.config.run import RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.runs.directory import INTERRUPTED, STOPPED, RunDirectory, readable_rows, write_json
from stability.runs.log import RunLog, logged_until
from stability.runs.provenance import provenance
from stability.runs.sinks import Sinks
from stability.training.store import Store


class Checkpointed(ABC):
    """The step that a training stands at, its log, its checkpoints and its status; what a step does is a subclass's.

    ``num_steps``: how many there are to take. ``diverged``: why it ends before them; None while it does not.
    ``running``: what the status says beside that it is running.
    """

    spec: RunSpec | TokenizerRunSpec
    device: torch.device
    running: ClassVar[dict[str, str]] = {}

    def __init__(self, directory: RunDirectory, store: Store, num_steps: int):
        self.directory, self.store, self.num_steps = directory, store, num_steps
        self.step = 0
        self.diverged: str | None = None

    @abstractmethod
    def advance(self) -> None:
        """Take the next step, write its log rows, and save a checkpoint where one is due."""

    @abstractmethod
    def first_row(self) -> dict[str, Any]:
        """Return the row that is logged before any step."""

    @abstractmethod
    def state(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return what a checkpoint of the current step holds: the model, and all else that the next step depends on."""

    @abstractmethod
    def restore(self, parameters: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""

    @abstractmethod
    def judged(self) -> tuple[str, str, dict[str, Any]]:
        """Return verdict, its reason, and the result: plain values."""

    def is_sound(self) -> bool:
        """Return whether a checkpoint may be made of what it stands at, where it has not diverged."""
        return True

    def open(self, command: str = "", sinks: Sinks | None = None, **described: Any) -> None:
        """Resume from the last readable checkpoint up to which no row of the log is missing, and say that it is
        running. ``described``: further values for provenance.json."""
        of_this = {"device": str(self.device), "threads": self.spec.threads}
        write_json(self.directory.provenance_file, {**provenance(command), **described, **of_this})
        found = self.store.latest(*logged_until(self.directory))
        if found is not None:
            self.restore(*found)
        self.log = RunLog(self.directory, resume_after=self.step if self.step else -1, sinks=sinks)
        timings = readable_rows(self.directory.timing_file, ("step", "wall_s"))
        self._started = time.perf_counter() - (timings[-1]["wall_s"] if timings else 0.0)
        self.directory.set_status("running", step=self.step, num_steps=self.num_steps, **self.running)
        if self.step == 0:
            self.log.metrics(self.first_row())

    def wall_s(self) -> float:
        """Return the seconds spent so far, those before an interruption among them."""
        return time.perf_counter() - self._started

    def steps(self, until: int | None = None) -> Iterator[None]:
        """Train to the verdict, yielding after every step; with ``until`` no further than that step. Closed anywhere it
        leaves a checkpoint there."""
        try:
            while self.step < min(self.num_steps, until or self.num_steps) and self.diverged is None:
                self.advance()
                yield
            is_over = self.diverged is not None or self.step == self.num_steps
            if is_over:
                self.finish()
            else:
                self.leave()
        except GeneratorExit:
            self.leave(INTERRUPTED)
            raise
        finally:
            self.close()

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        if self.store.lacks(self.step):
            self.log.sync()
            self.store.write(self.step, *self.state())

    def leave(self, state: str = STOPPED) -> None:
        """End before the last step, without a verdict: it can be gone on with from the step that the status names."""
        # else the parameters may hold what diverged; who goes on finds it again
        if self.diverged is None and self.is_sound():
            self.save()
        step = self.store.newest
        reason = f"{state} at step {step} of {self.num_steps}"
        self.directory.set_status(state, step=step, reason=reason, num_steps=self.num_steps)

    def finish(self) -> None:
        """Write verdict and result, the last thing that training writes."""
        verdict, reason, result = self.judged()
        self.store.remove_unplanned(self.step)
        self.directory.set_status(verdict, step=self.step, reason=reason, num_steps=self.num_steps, result=result)

    def close(self) -> None:
        """End the log."""
        self.log.close()
