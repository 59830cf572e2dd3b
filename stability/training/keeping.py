"""Choose which of a run's checkpoints are written and stay. No torch."""

from __future__ import annotations

from stability.config.run import RunSpec


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

    def kept(self, step: int) -> set[int]:
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
