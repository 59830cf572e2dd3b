"""Asynchronous successive halving by Ray Tune's scheduler, initialised from the runs' logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from stability.runs.directory import readable_rows
from sweeps.launchers.ray.trainable import RUN
from sweeps.trial import Trial, mark_stopped

WORST = 1e9  # a diverged run's NLL at the rungs that it did not reach


class Asha(FIFOScheduler):
    """One `AsyncHyperBandScheduler` per kind of run and seed; only learning rates differ within it.

    Runs with earlier results at a rung count there, so that a restarted search has all its former results.

    Attributes:
        milestones: the rungs: steps, each ``reduction`` times the previous one.
    """

    def __init__(self, trials: Sequence[Trial], rungs: tuple[int, ...], reduction: int):
        super().__init__()
        self._trials, self.milestones, self._reduction = {trial.run_id: trial for trial in trials}, rungs, reduction
        self._groups: dict[str, AsyncHyperBandScheduler] = {}
        self._leaving: dict[str, int] = {}
        for trial in trials:
            self._group(trial.run_id).on_trial_add(*_make_trial_arguments(trial.run_id))
            for row in readable_rows(trial.directory.metrics_file):
                if row["step"] in rungs and row.get("val_nll") is not None:
                    self._decide(trial.run_id, row["step"], row["val_nll"])
            self._count_divergence(trial.run_id, trial.directory.status())

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        pass  # all runs entered at the start

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: Mapping[str, Any]) -> str:
        """Decide at a rung whether a run goes on.

        Args:
            tune_controller: unused.
            trial: Tune's trial of the run.
            result: the row that it reported.
        """
        run_id, step, nll = trial.config[RUN]["id"], result.get("step"), result.get("val_nll")
        if result.get("done"):
            self._count_divergence(run_id, self._trials[run_id].directory.status())
        elif step in self.milestones and nll is not None and self._decide(run_id, step, nll) == TrialScheduler.STOP:
            self._leaving[run_id] = step
            return TrialScheduler.STOP
        return TrialScheduler.CONTINUE

    def settle(self) -> bool:
        """Mark stopped runs once their workers have left them; return whether all are marked."""
        for run_id, step in list(self._leaving.items()):
            reason = f"stopped at step {step}: not among the best 1 in {self._reduction} of its kind so far"
            if not self._trials[run_id].lock.owner() and mark_stopped(self._trials[run_id], reason):
                del self._leaving[run_id]
        return not self._leaving

    def _decide(self, run_id: str, step: int, nll: float) -> str:
        return self._group(run_id).on_trial_result(*_make_trial_arguments(run_id), {"step": step, "val_nll": nll})

    def _count_divergence(self, run_id: str, status: Mapping[str, Any]) -> None:
        if status["state"] == "diverged":
            for step in self.milestones:
                if step >= status["step"]:
                    self._decide(run_id, step, WORST)

    def _group(self, run_id: str) -> AsyncHyperBandScheduler:
        """Return the scheduler of a run's kind and seed, created at its first run."""
        spec = self._trials[run_id].spec
        key = json.dumps({name: value for name, value in spec.items() if name != "lr_peak"}, sort_keys=True)
        if key not in self._groups:
            self._groups[key] = AsyncHyperBandScheduler(
                time_attr="step",
                metric="val_nll",
                mode="min",
                grace_period=self.milestones[0],
                max_t=self.milestones[-1] * 3 // 2,  # beyond the last rung in spite of rounded logarithms
                reduction_factor=self._reduction,
                stop_last_trials=False,
            )
        return self._groups[key]


def _make_trial_arguments(run_id: str) -> tuple[Any, Any]:
    """Return the arguments in place of a Tune trial, with the run's id.

    The run's id is equal in all launches, unlike Tune's.
    """
    return None, SimpleNamespace(trial_id=run_id)
