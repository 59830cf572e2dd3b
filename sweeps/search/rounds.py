"""Run sweeps in rounds if the next runs depend on earlier results.

Rounds use the same run folders and launchers as every other sweep.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from rich.console import Console

from stability.config.search import AshaSpec, PbtSpec
from stability.config.sweep import SweepSpec
from sweeps import launch
from sweeps.launch import Outcome
from sweeps.record import StudyRecord
from sweeps.requirements import require, slots
from sweeps.shared import put_back_unless_begun
from sweeps.trial import Points, RunTrial, Trial, is_done, make_trials, run_trial
from sweeps.view.board import SweepConsole


class Search(Protocol):
    """A rule that chooses runs.

    A search stores nothing on disk: after a restart with the same results, it requests the same runs.
    """

    @property
    def most_runs(self) -> int:
        """The maximum number of requested runs."""
        ...

    @property
    def stop_at(self) -> int | None:
        """A step at which the last requested runs stop; None: they run to their end and are measured."""
        ...

    @property
    def stopped_by(self) -> str:
        """The search's name in the status of runs stopped by it (`Trial.stopped_by`); "" if it stops none.

        Stopped runs count as ended.
        """
        ...

    def ask(self) -> Points:
        """Return the next round's runs; () at the end. They may be concurrent."""
        ...

    def tell(self, statuses: Mapping[str, dict[str, Any]]) -> None:
        """Record the last round's results: each run's ``status.json`` by id, including failed runs."""
        ...

    def record(self) -> dict[str, Any]:
        """Return the search's record for ``study.json``, as plain JSON."""
        ...

    def plan(self) -> str:
        """Return a sentence for a dry run on the search after `SweepSpec.points`."""
        ...


def make_search(spec: SweepSpec, fingerprint: str, before: Mapping[str, Any]) -> Search | None:
    """Return a sweep's search, or None for a grid.

    Args:
        spec: the sweep.
        fingerprint: the corpus's fingerprint.
        before: the content of ``study.json`` before the command.

    Raises:
        ValueError: a field of the search space cannot be varied.
    """
    if spec.lr.edge is not None:
        from sweeps.search.edge_search import EdgeSearch

        return EdgeSearch(spec, fingerprint)
    if isinstance(spec.search, AshaSpec):
        from sweeps.search.asha import AsynchronousAsha, SynchronousAsha

        return (
            SynchronousAsha(spec, fingerprint, before)
            if spec.search.waits(spec.launcher)
            else AsynchronousAsha(spec, fingerprint)
        )
    if isinstance(spec.search, PbtSpec):
        from sweeps.search.pbt import PbtSearch

        return PbtSearch(spec, fingerprint)
    if spec.search is not None:
        from sweeps.search.optuna import OptunaSearch

        return OptunaSearch(spec, fingerprint, slots(spec), before.get("search_history", {}))
    return None


def run_rounds(
    spec: SweepSpec,
    search: Search,
    record: StudyRecord,
    *,
    console: Console | None = None,
    run: RunTrial = run_trial,
) -> tuple[Outcome, list[Trial]]:
    """Run a search to its end, round by round.

    A repeated command continues after an interruption, because the record is written before each round. One Ray cluster
    serves all rounds. The sinks are prepared once.

    Args:
        spec: the sweep.
        search: its search.
        record: the study's record.
        console: the console for messages.
        run: runs one trial; replaced in tests.

    Returns:
        The total outcome, and every requested trial.
    """
    console = console or SweepConsole()
    known: dict[str, Trial] = {}
    outcomes: list[Outcome] = []
    cluster = sinks = None
    with ExitStack() as stack:
        for number in itertools.count(1):
            if not (trials := make_trials(spec, search.ask())):
                break
            if search.stopped_by:
                trials = [replace(trial, stopped_by=search.stopped_by) for trial in trials]
            if search.stop_at is not None:
                trials = [replace(trial, stop_at=search.stop_at, curvature=None, generate=None) for trial in trials]
            fresh = {trial.run_id: trial for trial in trials if known.get(trial.run_id) != trial}
            earlier = [trial for run_id, trial in known.items() if run_id not in fresh]
            known |= fresh
            pending = [trial for trial in fresh.values() if not is_done(trial)]
            if pending:
                require(spec, pending)
                cluster = cluster or stack.enter_context(_cluster(spec))
                sinks = launch.prepare_sinks(spec, console) if sinks is None else sinks
                console.print(f"round {number}", markup=False, highlight=False)
                with put_back_unless_begun(record.study, pending, launch.folder_of(spec)):
                    for trial in fresh.values():
                        trial.directory.write_spec(trial.spec)
                    record.write(list(known.values()), search.record())
                    given = {"earlier": earlier, "sinks": sinks, "console": console, "run": run}
                    outcomes.append(launch.run(spec, list(fresh.values()), **given))
            else:
                outcomes.append(Outcome(len(fresh), 0, (), False))
            if outcomes[-1].interrupted:
                break
            search.tell({trial.run_id: trial.directory.status() for trial in trials})
    total = _sum(outcomes)
    if not total.num_trained and not total.failures and not total.interrupted:
        skipped = f"skips {total.num_skipped} finished run{'s' if total.num_skipped != 1 else ''}"
        console.print(
            f"{skipped} of {len(outcomes)} round{'s' if len(outcomes) != 1 else ''}, trains none",
            markup=False,
            highlight=False,
        )
    return total, list(known.values())


def _cluster(spec: SweepSpec) -> AbstractContextManager[Any]:
    if spec.launcher != "ray":
        return nullcontext(True)
    from sweeps.launchers.ray.cluster import cluster

    return cluster(threads=spec.threads, address=spec.ray.address)


def _sum(outcomes: Sequence[Outcome]) -> Outcome:
    failures = tuple(failure for outcome in outcomes for failure in outcome.failures)
    return Outcome(
        sum(outcome.num_skipped for outcome in outcomes),
        sum(outcome.num_trained for outcome in outcomes),
        failures,
        any(outcome.interrupted for outcome in outcomes),
    )
