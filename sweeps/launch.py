"""Run what is missing of a sweep: choose the trials, hand them to a launcher under the live table, report what failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from stability.config import CurvatureSpec, SweepSpec
from stability.runs.directory import RunDirectory
from sweeps.interrupt import Interrupt
from sweeps.live import LiveView
from sweeps.progress import Row
from sweeps.serial_launcher import RunTrial
from sweeps.trial import Trial, run_trial

IsMeasured = Callable[[RunDirectory, CurvatureSpec], bool]
GPU_SHARE = 0.25
STOPPING = "stopping: the steps under way end and are saved; Ctrl-C again stops at once"
HINT = "interrupted: run the same command again, it goes on where this one stopped"


@dataclass(frozen=True)
class Failure:
    run_id: str
    label: str
    reason: str
    traceback_file: str


@dataclass(frozen=True)
class Outcome:
    """What became of a sweep. ``num_trained``: trials that ended with a verdict in this launch, those that only lacked α_max or samples among them."""

    num_skipped: int
    num_trained: int
    failures: tuple[Failure, ...]
    interrupted: bool

    @property
    def num_failed(self) -> int:
        return len(self.failures)


def run(
    spec: SweepSpec, trials: Sequence[Trial], *, is_measured: IsMeasured | None = None, console: Console | None = None, run: RunTrial = run_trial
) -> Outcome:
    """Train and measure the trials that are not done yet, failed ones among them; says what it skips. Ctrl-C leaves runs that resume."""
    console = console or Console()
    is_done = _is_done(spec, is_measured)
    unique = list({trial.run_id: trial for trial in trials}.values())
    pending = [trial for trial in unique if not is_done(trial)]
    _say(console, _plan(unique, pending))
    if not pending:
        return Outcome(len(unique), 0, (), False)
    opening = "starting Ray's workers" if spec.launcher == "ray" else ""
    view = LiveView(pending, num_skipped=len(unique) - len(pending), opening=opening, is_done=is_done, console=console)
    with Interrupt(lambda: setattr(view, "note", STOPPING)) as interrupt:
        pending = _with_wandb(spec, pending, console)
        try:
            with view:
                _launcher(spec)(pending, on_tick=view.tick, interrupt=interrupt, run=run)
        except KeyboardInterrupt:  # the second Ctrl-C
            interrupt.requested = True
    outcome = _outcome(len(unique) - len(pending), view.progress.rows, interrupt.requested)
    _say(console, view.summary())
    _report(console, outcome)
    _report_wandb(console, [trial for trial in pending if trial.wandb])
    return outcome


def _is_done(spec: SweepSpec, is_measured: IsMeasured | None) -> Callable[[Trial], bool]:
    if is_measured is None and spec.hessian:
        from stability.probes.alpha_max import is_measured

    def is_done(trial: Trial) -> bool:
        if not trial.directory.finished or not (trial.curvature is None or is_measured is None or is_measured(trial.directory, spec.curvature)):
            return False
        return trial.generate is None or _is_generated(trial)

    return is_done


def _is_generated(trial: Trial) -> bool:
    from stability.config import checked
    from stability.probes.generation import is_generated
    from stability.sampling import GenerationSpec

    return is_generated(trial.directory, checked(GenerationSpec, trial.generate or {}))


def _plan(trials: Sequence[Trial], pending: Sequence[Trial]) -> str:
    """``"skips 12 finished runs, trains 36"``; what runs that are trained may lack is α_max, samples, or both."""
    to_measure = sum(trial.directory.finished for trial in pending)
    to_train = len(pending) - to_measure
    skipped = len(trials) - len(pending)
    parts = [f"skips {skipped} finished run{'s' if skipped != 1 else ''}"] if skipped else []
    parts += [f"trains {to_train or 'none'}"] if to_train or not to_measure else []
    asked = {"α_max": any(trial.curvature is not None for trial in pending), "samples": any(trial.generate is not None for trial in pending)}
    lacking = " or ".join(word for word, is_asked in asked.items() if is_asked)
    parts += [f"measures {lacking} of {to_measure}"] if to_measure else []
    return ", ".join(parts)


def _launcher(spec: SweepSpec) -> Callable[..., None]:
    if spec.launcher == "serial":
        from sweeps.serial_launcher import launch

        return launch
    from functools import partial

    from sweeps import ray_launcher

    return partial(ray_launcher.launch, cpus_per_trial=cpus_per_trial(spec), gpus_per_trial=gpus_per_trial(spec))


def cpus_per_trial(spec: SweepSpec) -> float:
    """What a trial holds of the cores: what the spec says, else one for each of its threads."""
    return spec.cpus_per_trial if spec.cpus_per_trial is not None else float(spec.threads)


def gpus_per_trial(spec: SweepSpec) -> float:
    """The share of a GPU that a trial holds: what the spec says, else a quarter where there is one."""
    if spec.gpus_per_trial is not None:
        return spec.gpus_per_trial
    return GPU_SHARE if spec.device != "cpu" and _num_gpus() else 0.0


def slots(spec: SweepSpec) -> int:
    """How many trials run at a time on this machine."""
    if spec.launcher == "serial":
        return 1
    limits = [(os.cpu_count() or 1) / cpus_per_trial(spec)]
    if share := gpus_per_trial(spec):
        limits.append(_num_gpus() / share)
    return max(1, int(min(limits) + 1e-6))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _with_wandb(spec: SweepSpec, trials: Sequence[Trial], console: Console) -> list[Trial]:
    """With ``logger=wandb`` each trial carries the arguments of its W&B run; whether there is a server is asked once, here."""
    if spec.logger != "wandb":
        return list(trials)
    from stability.runs.log import probe_wandb

    mode, message = probe_wandb()
    _say(console, message.replace("RUNS_DIR", spec.runs_dir))
    return [replace(trial, wandb={"group": spec.name, "mode": mode, "config": trial.spec, "name": trial.label}) for trial in trials]


def _outcome(num_skipped: int, rows: Sequence[Row], interrupted: bool) -> Outcome:
    failed = [row.trial for row in rows if row.state == "failed"]
    failures = [Failure(trial.run_id, trial.label, trial.directory.status().get("reason", ""), str(trial.directory.traceback_file)) for trial in failed]
    return Outcome(num_skipped, sum(row.ended for row in rows) - len(failed), tuple(failures), interrupted)


def _report(console: Console, outcome: Outcome) -> None:
    for failure in outcome.failures:
        _say(console, f"failed {failure.label} ({failure.run_id}): {failure.reason}\n  traceback: {failure.traceback_file}")
    if outcome.failures:
        _say(console, "the same command tries the failed runs again")
    if outcome.interrupted:
        _say(console, HINT)


def _report_wandb(console: Console, trials: Sequence[Trial]) -> None:
    """What W&B raised in the workers, which have no terminal: once, with the number of runs."""
    from stability.runs.log import wandb_failure_file

    failed = [path for path in (wandb_failure_file(trial.directory) for trial in trials) if path.exists()]
    if failed:
        _say(console, f"W&B failed in {len(failed)} of {len(trials)} runs, their numbers are in metrics.jsonl: {failed[0].read_text().strip()}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
