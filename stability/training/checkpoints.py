"""Schedule of a training's checkpoints: when to write, keep and read them."""

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
    """The checkpoints of one training, in a folder with no other writer.

    An old checkpoint is removed only after its successor is written.
    """

    def __init__(self, spec: Settings, directory: RunDirectory, data_format: Any):
        self._spec, self._directory, self._format = spec, directory, data_format
        # steps of checkpoints written or read by this process: intact, so not to be written again
        self._standing: set[int] = set()

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint at this step, after its validation."""

    @abstractmethod
    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of all checkpoints to keep once training is at this step."""

    @abstractmethod
    def read(self, folder: Path) -> Held:
        """Return the parameters and the trainer's state of a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another training.
        """

    @property
    def newest(self) -> int:
        """Step of the newest intact checkpoint, the point to resume from; 0 if none."""
        return max(self._standing, default=0)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest readable checkpoint, or None.

        Args:
            until: step of the log's last intact row; later checkpoints are ignored.
            damage: description of the log's damage after that step, for the message; "" if the log just ends.
        """
        found = self._directory.checkpoints()
        whole = [folder for folder in found if step_of(folder) <= until]
        if len(whole) < len(found):
            why = damage or f"{self._directory.metrics_file} ends at step {max(until, 0)}"
            print_text(f"{self._directory.run_id}: {why}; goes on from before that step", flush=True)
        return self._first(reversed(whole))

    def first_of(self, steps: Sequence[int]) -> Held | None:
        """Return the first readable checkpoint of these steps, or None."""
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
        """Return whether a step above 0 is unsaved."""
        return step > 0 and step not in self._standing

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Write a checkpoint of the current step, then remove those not kept.

        Args:
            step: current step of the training.
            model: model to save.
            state: the trainer's state.
        """
        stays = {*self.choose_kept(step), step}
        checkpoint.save(self._folder(step), model, state, self._spec, step=step, data_format=self._format)
        self._standing.add(step)
        self._remove_but(stays)

    def remove_unplanned(self, step: int) -> None:
        """Remove the checkpoints outside the plan at the end of training.

        They are the rolling ones and those written at an interruption. So a resumed run leaves the same folder as an
        undisturbed one.
        """
        self._remove_but(self.choose_kept(step))

    def _remove_but(self, stays: set[int]) -> None:
        for folder in self._directory.checkpoints():
            if step_of(folder) not in stays:
                checkpoint.remove(folder)

    def _folder(self, step: int) -> Path:
        return self._directory.path / "checkpoints" / checkpoint_name(step)


class Keeper:
    """The plan of a run's checkpoints: when to write one and how long to keep it.

    Always kept: the checkpoints of the first evaluation and of the last step (α_max needs both). Of the extra cadence
    all are kept, or the newest ``keep_last``. The ``keep_best`` best by validation NLL are kept, too; the first two may
    be among them. With ``keep_last`` the first evaluation removes all earlier checkpoints, so it is the run's earliest.

    The plan depends only on the step and the validations so far, never on files that an interruption left.
    """

    def __init__(self, spec: RunSpec):
        self._plan, self._cadence, self._last = spec.checkpoint, spec.evaluation.every_steps, spec.steps
        self._first = min(self._cadence, spec.steps)
        self._best: list[tuple[float, int]] = []

    @property
    def best_steps(self) -> list[int]:
        """Steps of the best validations, best first."""
        return [step for _, step in self._best]

    def validates(self, step: int) -> bool:
        """Return whether the run is validated at this step."""
        return step % self._cadence == 0 or step == self._last

    def record_validation(self, step: int, nll: float) -> None:
        """Record a validation; of two equal ones the earlier ranks higher.

        Args:
            step: step of the validation.
            nll: validation NLL in nats.
        """
        self._best = sorted([*self._best, (nll, step)])[: self._plan.keep_best]

    def is_due(self, step: int) -> bool:
        """Return whether to write a checkpoint at this step, after its validation."""
        return step in (self._first, self._last) or self._is_extra(step) or step in self.best_steps

    def may_be_due(self, step: int) -> bool:
        """Return whether a checkpoint is due whatever this step's validation gives.

        Such a step must be checked for non-finite values first.
        """
        return step in (self._first, self._last) or self._is_extra(step)

    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of the checkpoints to keep after this step."""
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
    """The checkpoints of a run, planned by its ``keeper``."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, data_format: Any, keeper: Keeper):
        super().__init__(spec, directory, data_format)
        self._keeper, self._init = keeper, spec.init

    def is_due(self, step: int) -> bool:
        return self._keeper.is_due(step)

    def choose_kept(self, step: int) -> set[int]:
        return self._keeper.choose_kept(step)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest readable checkpoint, else the one named by ``init``, else None.

        The latter belongs to another run of the same pool, so it does not count as this run's own.
        """
        return super().latest(until, damage) or self._read_inherited()

    def _read_inherited(self) -> Held | None:
        init = self._init
        if init is None:
            return None
        folder = self._directory.path.parent / init.run / "checkpoints" / checkpoint_name(init.step)
        return _read_held(folder, init.run)

    def read(self, folder: Path) -> Held:
        return _read_held(folder, self._directory.run_id)


def _read_held(folder: Path, run: str) -> Held:
    """Return the trained parameters and the trainer's state of a run's checkpoint."""
    spec, model, state = checkpoint.read(folder)
    if run_id(spec) != run:
        raise ValueError(f"{folder} belongs to run {run_id(spec)}")
    return state.pop(checkpoint.MOVING, None) or model.state_dict(), state
