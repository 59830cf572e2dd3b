"""A run's checkpoints on disk: written, found again, and taken away by what its `Keeper` says stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.runs.directory import RunDirectory, checkpoint_name, step_of
from stability.training import checkpoint
from stability.training.keeping import Keeper


class Store:
    """The checkpoints of one run, whose folder nobody else writes to. One is removed only after the one that takes its
    place stands."""

    def __init__(self, spec: RunSpec, directory: RunDirectory, data_format: Any):
        self._spec, self._directory, self._format = spec, directory, data_format
        # steps whose checkpoints this process wrote or read: whole, not to be written again
        self._standing: set[int] = set()
        self.keeper = Keeper(spec)

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that is known to be whole, where a run that is left goes on; 0: none, from
        its beginning."""
        return max(self._standing, default=0)

    def latest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Parameters and trainer state of the newest checkpoint that can be read, whoever left it; None where there is
        none."""
        return self._newest(reversed(self._directory.checkpoints()))

    def inherited(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The same of the checkpoint of another run that this one goes on from; None where it begins anew. Errors:
        ``ValueError`` where it is not there or not whole."""
        init = self._spec.init
        if init is None:
            return None
        folder = self._directory.path.parent / init.run / "checkpoints" / checkpoint_name(init.step)
        spec, model = checkpoint.load(folder)
        if run_id(spec) != init.run:
            raise ValueError(f"{folder} belongs to run {run_id(spec)}")
        return model.state_dict(), checkpoint.load_trainer(folder)

    def first_of(self, steps: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The same of the first of these steps' checkpoints that can be read."""
        return self._newest(folder for step in steps if (folder := self._folder(step)).exists())

    def _newest(self, folders: Iterable[Path]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        for folder in folders:
            try:
                spec, model = checkpoint.load(folder)
                if run_id(spec) != self._directory.run_id:
                    raise ValueError(f"{folder} belongs to run {run_id(spec)}")
                state = checkpoint.load_trainer(folder)
            except ValueError as error:
                print(f"{self._directory.run_id}: skips a damaged checkpoint ({error})", flush=True)
                continue
            self._standing.add(state["step"])
            return model.state_dict(), state
        return None

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """A checkpoint of the step the run stands at, unless it stands already; what does not stay beside it goes once
        it does."""
        if step == 0 or step in self._standing:
            return
        checkpoint.save(self._folder(step), model, state, self._spec, step=step, data_format=self._format)
        self._standing.add(step)
        self.remove_unplanned(step, but=step)

    def remove_unplanned(self, step: int, but: int | None = None) -> None:
        """What rolls on goes, and what only an interruption wrote, once it has served: a resumed run's folder is that
        of an undisturbed one."""
        stays = self.keeper.kept(step) | {but}
        for folder in self._directory.checkpoints():
            if step_of(folder) not in stays:
                checkpoint.remove(folder)

    def _folder(self, step: int) -> Path:
        return self._directory.path / "checkpoints" / checkpoint_name(step)
