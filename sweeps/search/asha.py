"""`search=asha`: a grid whose runs Ray Tune may stop early.

`sweeps.launchers.ray.asha` decides as results arrive. A stopped run's status names the search, and the run counts as
ended for this search only. Any other sweep continues it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.search import AshaSpec
from stability.config.sweep import SweepSpec
from stability.runs.directory import STOPPED, RunDirectory


class AshaSearch:
    """All runs of `SweepSpec.points` in one round, in an order independent of their rates.

    With ascending rates, each run could be better than all runs before it, or each worse.
    """

    stop_at = None

    def __init__(self, spec: SweepSpec, fingerprint: str):
        assert isinstance(spec.search, AshaSpec)
        self._pool, self._settings, self._steps = Path(spec.runs_dir), spec.search, spec.steps
        self._rungs = spec.search.rungs(spec.steps, spec.evaluation.every_steps)
        self._points = sorted(spec.points(fingerprint), key=lambda point: run_id(point[1]))
        self._is_asked = False
        self.stopped_by = name_of(spec.search, self._rungs)
        self.most_runs = len(self._points)

    def plan(self) -> str:
        rungs = ", ".join(map(str, self._rungs))
        return (
            f"search=asha: at step{'s' * (len(self._rungs) > 1)} {rungs} of {self._steps} a run goes on if it is among "
            f"the best 1 in {self._settings.reduction} of its kind so far"
        )

    def ask(self) -> list[tuple[str, RunSpec]]:
        points, self._is_asked = ([] if self._is_asked else self._points), True
        return points

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        pass

    def record(self) -> dict[str, Any]:
        """Return ``stopped``: the reason for each stopped run, for the tables."""
        statuses = {each: RunDirectory(self._pool, each).status() for each in (run_id(run) for _, run in self._points)}
        return {"stopped": {each: status["reason"] for each, status in statuses.items() if status["state"] == STOPPED}}


def name_of(settings: AshaSpec, rungs: tuple[int, ...]) -> str:
    """Return the search's name for stopped runs; only an equal search accepts their stop."""
    return f"asha {settings.reduction} at {' '.join(map(str, rungs))}"
