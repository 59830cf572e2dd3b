"""Run a sweep's missing trials under a live table, and report failures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from stability.config.search import AshaSpec
from stability.config.sweep import SweepSpec
from stability.printable import shell_text
from stability.runs.leftovers import remove_abandoned
from stability.runs.log import SINKS, load_sink
from stability.runs.sink import failure_file
from stability.runs.study import StudyFolder
from sweeps.launchers import Interrupt
from sweeps.record import StudyRecord, words_of
from sweeps.requirements import cpus_per_trial, require, resolve_launcher
from sweeps.shared import hand_out, put_back_unless_begun
from sweeps.trial import IsMeasured, RunTrial, Trial, is_done, run_trial, set_failed, tidy
from sweeps.view.board import SweepConsole, print_line
from sweeps.view.live import LiveView

if TYPE_CHECKING:
    from sweeps.launchers.ray.asha import Asha

STOPPING = "stopping: the steps under way end and are saved; Ctrl-C again stops at once"
Sinks = dict[str, dict[str, Any]]  # a sweep's sinks: settings by name
MOST_REASONS = 3  # of failed runs that a sweep prints at its end; `stability.status` has a line for each run
HINT = "interrupted: run the same command again, it goes on where this one stopped"


@dataclass(frozen=True)
class Failure:
    """A failed run; ``place`` is the line of the error, or "" if unknown."""

    run_id: str
    label: str
    reason: str
    traceback_file: str
    place: str = ""

    @classmethod
    def of(cls, trial: Trial) -> Failure:
        reason = trial.directory.status().get("reason", "")
        file, place = trial.directory.traceback_file, trial.directory.find_raising_line()
        return cls(trial.run_id, trial.label, reason, str(file), place)


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep.

    Attributes:
        num_skipped: number of trials already done.
        num_trained: trials completed by this launch, including those with only α_max or samples missing.
        failures: the failed runs.
        interrupted: whether Ctrl-C ended the launch.
    """

    num_skipped: int
    num_trained: int
    failures: tuple[Failure, ...]
    interrupted: bool

    @property
    def num_failed(self) -> int:
        return len(self.failures)


def run(
    spec: SweepSpec,
    trials: Sequence[Trial],
    *,
    earlier: Sequence[Trial] = (),
    sinks: Sinks | None = None,
    record: StudyRecord | None = None,
    is_measured: IsMeasured | None = None,
    console: Console | None = None,
    run: RunTrial = run_trial,
    expected: Mapping[str, tuple[float, float]] | None = None,
) -> Outcome:
    """Train and measure the trials that are not done.

    Failed trials are retried unless ``retry=none``. Runs of another sweep are awaited, not trained again. After Ctrl-C,
    the runs can resume.

    Args:
        spec: the sweep.
        trials: its trials.
        earlier: runs of the sweep's previous rounds.
        sinks: the result of `prepare_sinks`, if it was already called.
        record: the study's record, written once the launcher can run the trials; None if they are already on record.
        is_measured: replaces the probe's own check in tests.
        console: the console for the live table and messages.
        run: runs one trial; replaced in tests.
        expected: expected times by run id, for the time left (`sweeps.costs.expected_times`).

    Raises:
        RuntimeError: the launcher cannot run the trials (`require`), with nothing written, or refuses them later, with
            the study's files put back.
        ValueError: likewise.
    """
    console, spec = console or SweepConsole(), resolve_launcher(spec, trials)
    done, say = partial(is_done, is_measured=is_measured), partial(print_line, console)
    unique = _prepare_trials(spec, trials)
    missing = [trial for trial in unique if not done(trial)]
    left = [trial for trial in missing if spec.retry == "none" and trial.directory.status()["state"] == "failed"]
    pending = [trial for trial in missing if trial not in left]
    num_skipped = len(unique) - len(missing)
    if pending:
        require(spec, pending)
    _tidy(unique)
    refused: list[Trial] = []
    with ExitStack() as stack:
        if record is not None:
            stack.enter_context(put_back_unless_begun(record.study, pending, folder_of(spec)))
            refused = [trial for trial in unique if not _write_spec(trial)]
            pending = [trial for trial in pending if trial not in refused]
            record.write(trials)
        say(describe_launch(num_skipped, pending, left))
        interrupted = False
        if pending:
            ids = {trial.run_id for trial in missing}
            ended = [*earlier, *(trial for trial in unique if trial.run_id not in ids)]
            opening = "starting Ray's workers" if spec.launcher == "ray" else ""
            view = LiveView(
                pending,
                num_skipped=num_skipped,
                earlier=ended,
                opening=opening,
                is_done=done,
                console=console,
                words=words_of(spec),
                expected=expected,
            )
            with _note_interrupts(view) as interrupt:
                pending = _add_sinks(spec, pending, prepare_sinks(spec, console) if sinks is None else sinks)
                with view:
                    launch = _launcher(spec, view.tick, say, unique)
                    for ready in hand_out(pending, is_done=done, on_tick=view.tick, interrupt=interrupt, say=say):
                        launch(ready, interrupt=interrupt, run=run)
                    if interrupt.requested and spec.launcher == "slurm":
                        # jobs of an earlier driver are awaited, not launched: their launcher does not stop them
                        from sweeps.launchers.slurm import launcher as slurm_launcher

                        slurm_launcher.stop(
                            pending, slurm=spec.slurm, folder=folder_of(spec), on_tick=view.tick, say=say
                        )
            interrupted = interrupt.requested
            say(view.summary())
    failed = [*refused, *left, *(trial for trial in pending if trial.directory.status()["state"] == "failed")]
    outcome = Outcome(num_skipped, sum(map(done, pending)), tuple(map(Failure.of, failed)), interrupted)
    _report(console, outcome, spec)
    _report_sinks(console, [trial for trial in pending if trial.sinks])
    return outcome


def _prepare_trials(spec: SweepSpec, trials: Sequence[Trial]) -> list[Trial]:
    """Return each distinct trial, with this launch's settings."""
    how = {"launch": secrets.token_hex(8), "devices": spec.devices_per_trial, "shard": spec.shard_parameters}
    unique = {trial.run_id: trial for trial in trials}.values()
    return [replace(trial, **how, failed_at=trial.last_failure()) for trial in unique]


def _write_spec(trial: Trial) -> bool:
    """Write a trial's spec, and return True on success; a conflicting spec fails this trial alone."""
    try:
        trial.directory.write_spec(trial.spec)
    except ValueError as error:
        set_failed(trial, str(error))
        return False
    return True


def _tidy(trials: Sequence[Trial]) -> None:
    """Remove dead processes' files from the pools and trials."""
    for pool in {trial.pool for trial in trials}:
        remove_abandoned(Path(pool))
    for trial in trials:
        tidy(trial)


@contextmanager
def _note_interrupts(view: LiveView) -> Iterator[Interrupt]:
    """Show the first Ctrl-C in the live table; the second ends the ``with`` block."""
    with Interrupt(lambda: setattr(view, "note", STOPPING)) as interrupt:
        try:
            yield interrupt
        except KeyboardInterrupt:  # the second Ctrl-C
            interrupt.requested = True


def describe_launch(skipped: int, pending: Sequence[Trial] = (), left: Sequence[Trial] = ()) -> str:
    """Describe a launch: ``"skips 12 finished runs, trains 36"``.

    Args:
        skipped: number of finished runs.
        pending: runs to train, or to measure if only α_max, samples, or both are missing.
        left: failed runs without a retry.
    """
    to_measure = sum(trial.directory.finished for trial in pending)
    to_train = len(pending) - to_measure
    parts = [f"skips {skipped} finished run{'s' if skipped != 1 else ''}"] if skipped else []
    parts += [f"leaves {len(left)} failed run{'s' if len(left) != 1 else ''} (retry=none)"] if left else []
    parts += [f"trains {to_train or 'none'}"] if to_train or not to_measure else []
    asked = {
        "α_max": any(trial.curvature is not None for trial in pending),
        "samples": any(trial.generate is not None for trial in pending),
    }
    lacking = " or ".join(word for word, is_asked in asked.items() if is_asked)
    parts += [f"measures {lacking} of {to_measure}"] if to_measure else []
    return ", ".join(parts)


def _launcher(
    spec: SweepSpec, on_tick: Callable[[], None], say: Callable[[str], None], everything: Sequence[Trial]
) -> Callable[..., None]:
    """Return the sweep's launcher. ``on_tick`` is called while it waits, ``say`` prints a line for the user."""
    if spec.launcher == "serial":
        from sweeps.launchers.serial import launch

        return launch
    if spec.launcher == "slurm":
        from sweeps.launchers.slurm import launcher as slurm_launcher

        return partial(slurm_launcher.launch, slurm=spec.slurm, folder=folder_of(spec), on_tick=on_tick, say=say)
    from sweeps.launchers.ray import launcher as ray_launcher

    is_asynchronous = isinstance(spec.search, AshaSpec) and not spec.search.waits(spec.launcher)
    return partial(
        ray_launcher.launch,
        folder=folder_of(spec),
        cpus_per_trial=cpus_per_trial(spec),
        gpus_per_trial=spec.gpus_per_trial,
        address=spec.ray.address,
        node_retries=spec.ray.node_retries,
        hang_s=spec.ray.hang_s,
        scheduler=partial(_asha, spec, everything) if is_asynchronous else None,
        on_tick=on_tick,
        say=say,
    )


def _asha(spec: SweepSpec, everything: Sequence[Trial]) -> Asha:
    """Return the scheduler of an asynchronous `search=asha`, initialised from the runs' folders."""
    from sweeps.launchers.ray.asha import Asha

    assert isinstance(spec.search, AshaSpec)
    return Asha(everything, spec.search.rungs(spec.steps, spec.evaluation.every_steps), spec.search.reduction)


def folder_of(spec: SweepSpec) -> Path:
    """Return the folder of the launcher's own files, within the study's folder."""
    return StudyFolder.of(Path(spec.runs_dir).resolve(), spec.name).path / spec.launcher


def prepare_sinks(spec: SweepSpec, console: Console) -> Sinks:
    """Return the settings of each sink in ``logger``, and print the sinks' messages.

    Call it once per command.
    """
    found: Sinks = {}
    for name in spec.sinks:
        settings, message = load_sink(name).prepare(spec.runs_dir, spec.name)
        if message:
            print_line(console, message)
        if settings is not None:
            found[name] = settings | (spec.wandb.model_dump() if name == "wandb" else {})
    return found


def _add_sinks(spec: SweepSpec, trials: Sequence[Trial], sinks: Sinks) -> list[Trial]:
    """Return the trials with their sinks' settings, if there are sinks."""
    if not sinks:
        return list(trials)
    return [
        replace(trial, sinks={"to": sinks, "group": spec.name, "config": trial.spec, "name": trial.label})
        for trial in trials
    ]


def _report(console: Console, outcome: Outcome, spec: SweepSpec) -> None:
    """Print each reason of failed runs with a traceback file, and the commands to continue."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in outcome.failures:
        groups.setdefault((failure.reason, failure.place), []).append(failure)
    for (reason, place), (first, *others) in [*groups.items()][:MOST_REASONS]:
        more = f" and {len(others)} more" if others else ""
        lines = [f"failed {first.label} ({first.run_id}){more}: {reason}", *([f"  at {place}"] if place else [])]
        print_line(console, "\n".join([*lines, f"  traceback: {first.traceback_file}"]))
    if len(groups) > MOST_REASONS:
        words = shell_text(f"name={spec.name}", f"runs_dir={spec.runs_dir}")
        print_line(console, f"{len(groups) - MOST_REASONS} other reasons: python -m stability.status {words}")
    if groups:
        same = "the same command" if spec.retry == "failed" else "retry=failed"
        print_line(console, f"{same} tries the failed runs again")
    if outcome.interrupted:
        print_line(console, HINT)


def _report_sinks(console: Console, trials: Sequence[Trial]) -> None:
    """Print each sink's first error from the workers, once, with the number of runs."""
    for name in SINKS:
        having = [trial for trial in trials if name in (trial.sinks or {"to": ()})["to"]]
        failed = [path for path in (failure_file(trial.directory, name) for trial in having) if path.exists()]
        if failed:
            print_line(
                console,
                f"{load_sink(name).title} failed in {len(failed)} of {len(having)} runs, "
                f"their numbers are in metrics.jsonl: {failed[0].read_text().strip()}",
            )
