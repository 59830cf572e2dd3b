"""`search=asha`: a grid in which only the best learning rates of each kind train beyond a rung.

Asynchronous, Ray Tune decides as results arrive (`sweeps.launchers.ray.asha`). A stopped run's status names the search,
and the run counts as ended for this search only: any other sweep continues it. Synchronous, each rung waits for all
runs: the survivors then depend only on the runs, and a repeated command finds the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.search import AshaSpec
from stability.config.sweep import SweepSpec
from stability.runs.directory import FINISHED, STOPPED, RunDirectory, readable_rows


class AsynchronousAsha:
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
        # only an equal search accepts its stops
        self.stopped_by = f"asha {spec.search.reduction} at {' '.join(map(str, self._rungs))}"
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


class SynchronousAsha:
    """The rates of `SweepSpec.points`, each with all its seeds.

    A rate with a failed run does not continue; a repeated command retries the failed run.
    """

    stopped_by = ""

    def __init__(self, spec: SweepSpec, fingerprint: str, before: Mapping[str, Any]):
        assert isinstance(spec.search, AshaSpec)
        self._settings, self._pool, self._last = spec.search, Path(spec.runs_dir), spec.steps
        self._rungs = _rungs(spec, before)
        self._round = 0
        self._left: dict[str, str] = {}
        self._alive: list[list[_Rate]] = []  # each curve's surviving rates
        points = spec.points(fingerprint)
        by_rate = iter([points[start : start + spec.seeds] for start in range(0, len(points), spec.seeds)])
        for own in spec.rates():
            self._alive.append([_Rate(lr, next(by_rate)) for lr in own])
        self.most_runs = len(points)

    @property
    def stop_at(self) -> int | None:
        """The step at which the last requested runs stop; None: they run to their end."""
        return self._rungs[self._round - 1] if 0 < self._round <= len(self._rungs) else None

    def plan(self) -> str:
        rungs = ", ".join(map(str, self._rungs))
        return (
            f"search=asha: at step{'s' * (len(self._rungs) > 1)} {rungs} of {self._last} one in "
            f"{self._settings.reduction} learning rates of each kind goes on, once all have reached it"
        )

    def ask(self) -> list[tuple[str, RunSpec]]:
        self._round += 1
        if self._round > len(self._rungs) + 1:
            return []
        return [point for curve in self._alive for rate in curve for point in rate.points]

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        """Rank each curve's rates at the last rung, and retain one in ``reduction``.

        Rates with infinite scores never continue. The other rates' stops are recorded.
        """
        if self._round > len(self._rungs):
            return
        step = self._rungs[self._round - 1]
        for index, curve in enumerate(self._alive):
            scores = {rate.lr: self._score(rate, statuses, step) for rate in curve}
            ranked = sorted(curve, key=lambda rate: (scores[rate.lr], rate.lr))
            kept = [
                rate
                for rate in ranked[: math.ceil(len(curve) / self._settings.reduction)]
                if math.isfinite(scores[rate.lr])
            ]
            for place, rate in enumerate(ranked, 1):
                if rate not in kept:
                    self._left |= {
                        each: f"stopped at rung {self._round} of {len(self._rungs)}: place {place} of {len(ranked)}"
                        for each in rate.ids
                    }
            self._alive[index] = sorted(kept, key=lambda rate: rate.lr)

    def _score(self, rate: _Rate, statuses: Mapping[str, dict[str, Any]], step: int) -> float:
        """Return the mean validation NLL of a rate's runs at a rung.

        It is infinite if a seed diverged or failed before the rung. It is read from the logs, because a run may have
        trained beyond the rung.
        """
        nlls = []
        for each in rate.ids:
            rows = readable_rows(RunDirectory(self._pool, each).metrics_file)
            found = next((row.get("val_nll") for row in rows if row["step"] == step), None)
            failed = statuses[each]["state"] == "failed" and statuses[each]["step"] < step
            nlls.append(math.inf if found is None or failed else found)
        return math.fsum(nlls) / len(nlls)

    def record(self) -> dict[str, Any]:
        """Return the reason for each run stopped at a rung, for the tables; and the rungs."""
        return {
            "rungs": list(self._rungs),
            "stopped": {
                each: why
                for each, why in self._left.items()
                if RunDirectory(self._pool, each).status()["state"] not in (*FINISHED, "failed")
            },
        }


def _rungs(spec: SweepSpec, before: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the rungs on record if the settings behind them are unchanged, else those of the settings."""
    # the rungs of a study older than the rule of `AshaSpec.rungs` are other ones; its runs were stopped there
    if "rungs" in before and _select_rung_settings(before["spec"]) == _select_rung_settings(
        spec.model_dump(mode="json")
    ):
        return tuple(before["rungs"])
    assert isinstance(spec.search, AshaSpec)
    return spec.search.rungs(spec.steps, spec.evaluation.every_steps)


def _select_rung_settings(spec: Mapping[str, Any]) -> tuple[Any, ...]:
    return spec["search"], spec["steps"], spec["evaluation"]["every_steps"]


class _Rate:
    """One learning rate of one kind of run: its runs by seed, with their variant's label."""

    def __init__(self, lr: float, points):
        self.lr, self.points = lr, tuple(points)
        self.ids = [run_id(run) for _, run in self.points]
