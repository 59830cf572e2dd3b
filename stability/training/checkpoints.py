"""The checkpoints of a training: which are written, which stay, and from which it resumes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stability.config.base import Settings
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.printable import print_text
from stability.runs.directory import RunDirectory, checkpoint_name, step_of
from stability.training import checkpoint

Held = tuple[dict[str, Tensor], dict[str, Any]]  # parameters, and the trainer's state


class Checkpoints(ABC):
    """The checkpoints of one training, whose folder nobody else writes to. One is removed only after the one that takes
    its place stands."""

    def __init__(self, spec: Settings, directory: RunDirectory, data_format: Any):
        self._spec, self._directory, self._format = spec, directory, data_format
        # steps whose checkpoints this process wrote or read: whole, not to be written again
        self._standing: set[int] = set()

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is written at this step, once its validation has been taken in."""

    @abstractmethod
    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of those checkpoints that stay, of all that stand, when a training is at this step."""

    @abstractmethod
    def read(self, folder: Path) -> Held:
        """Return what a checkpoint holds. Errors: ``ValueError`` for one that is damaged, or of another training."""

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that is known to be whole, where a training that is left goes on; 0: none,
        from its beginning."""
        return max(self._standing, default=0)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest readable checkpoint, or None.

        Args:
            until: the step after which rows of the log are missing; no later checkpoint is taken.
            damage: of the log after that step, for the line that says so; "" if it just ends.
        """
        found = self._directory.checkpoints()
        whole = [folder for folder in found if step_of(folder) <= until]
        if len(whole) < len(found):
            why = damage or f"{self._directory.metrics_file} ends at step {max(until, 0)}"
            print_text(f"{self._directory.run_id}: {why}; goes on from before that step", flush=True)
        return self._first(reversed(whole))

    def first_of(self, steps: Sequence[int]) -> Held | None:
        """Return the first of these steps' checkpoints that can be read."""
        return self._first(folder for step in steps if (folder := self._folder(step)).exists())

    def _first(self, folders: Iterable[Path]) -> Held | None:
        for folder in folders:
            try:
                parameters, state = self.read(folder)
            except ValueError as error:
                print_text(f"{self._directory.run_id}: skips a damaged checkpoint ({error})", flush=True)
                continue
            self._standing.add(state["step"])
            return parameters, state
        return None

    def lacks(self, step: int) -> bool:
        """Return whether there is something to write at the step a training stands at."""
        return step > 0 and step not in self._standing

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Write a checkpoint of the step a training stands at; what does not stay beside it goes once it stands."""
        stays = {*self.choose_kept(step), step}
        checkpoint.save(self._folder(step), model, state, self._spec, step=step, data_format=self._format)
        self._standing.add(step)
        self._remove_but(stays)

    def remove_unplanned(self, step: int) -> None:
        """Remove what rolls on, and what only an interruption wrote, once it has served: the folder of a training that
        was resumed is that of an undisturbed one."""
        self._remove_but(self.choose_kept(step))

    def _remove_but(self, stays: set[int]) -> None:
        for folder in self._directory.checkpoints():
            if step_of(folder) not in stays:
                checkpoint.remove(folder)

    def _folder(self, step: int) -> Path:
        return self._directory.path / "checkpoints" / checkpoint_name(step)


class Keeper:
    """The first evaluation's and the last step's checkpoints, which the protocol of α_max needs, always; the extra
    cadence's, all or the newest; the best by validation NLL, those two among them. With ``keep_last`` none that is
    older than the first evaluation's outlives it: that is the run's earliest.

    What stays is a function of the step and of the validations so far, never of what an interruption left on disk.
    """

    def __init__(self, spec: RunSpec):
        self._plan, self._cadence, self._last = spec.checkpoint, spec.evaluation.every_steps, spec.steps
        self._first = min(self._cadence, spec.steps)
        self._best: list[tuple[float, int]] = []

    @property
    def best_steps(self) -> list[int]:
        """Steps of the best validations, the best first."""
        return [step for _, step in self._best]

    def validates(self, step: int) -> bool:
        """Return whether the run is validated at this step."""
        return step % self._cadence == 0 or step == self._last

    def validated(self, step: int, nll: float) -> None:
        """Take a validation in; of two equal ones the earlier is the better."""
        self._best = sorted([*self._best, (nll, step)])[: self._plan.keep_best]

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is written at this step, once its validation has been taken in."""
        return step in (self._first, self._last) or self._is_extra(step) or step in self.best_steps

    def may_be_due(self, step: int) -> bool:
        """Return whether a checkpoint may be written at this step, before it is known what its validation gives:
        whether the step must be sound."""
        return step in (self._first, self._last) or self._is_extra(step)

    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of the checkpoints that stand once this step's is written."""
        return {each for each in (self._first, self._last, *self._extra(step), *self.best_steps) if each <= step}

    def state(self) -> list[tuple[float, int]]:
        return list(self._best)

    def resume(self, state: list[tuple[float, int]]) -> None:
        self._best = [(nll, step) for nll, step in state]

    def _is_extra(self, step: int) -> bool:
        return bool(self._plan.every_steps) and step % self._plan.every_steps == 0

    def _extra(self, step: int) -> list[int]:
        if not self._plan.every_steps:
            return []
        extra = list(range(self._plan.every_steps, step + 1, self._plan.every_steps))
        if self._plan.keep_last is None:
            return extra
        return [each for each in extra[-self._plan.keep_last :] if each >= self._first or step < self._first]


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run: its ``keeper`` says which are written and stay."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, data_format: Any, keeper: Keeper):
        super().__init__(spec, directory, data_format)
        self._keeper, self._init = keeper, spec.init

    def is_due(self, step: int) -> bool:
        return self._keeper.is_due(step)

    def choose_kept(self, step: int) -> set[int]:
        return self._keeper.choose_kept(step)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest checkpoint that can be read; of a run that has none yet the one that its ``init`` names, of
        another run in the same pool. That one does not stand in this run's folder."""
        return super().latest(until, damage) or self._inherited()

    def _inherited(self) -> Held | None:
        init = self._init
        if init is None:
            return None
        folder = self._directory.path.parent / init.run / "checkpoints" / checkpoint_name(init.step)
        return _held(folder, init.run)

    def read(self, folder: Path) -> Held:
        return _held(folder, self._directory.run_id)


def _held(folder: Path, run: str) -> Held:
    """Return the parameters that training goes on with, and the trainer's state. Errors: as `Checkpoints.read`."""
    spec, model, state = checkpoint.read(folder)
    if run_id(spec) != run:
        raise ValueError(f"{folder} belongs to run {run_id(spec)}")
    return state.pop(checkpoint.MOVING, None) or model.state_dict(), state
