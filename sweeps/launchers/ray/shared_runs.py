"""Trials until each has ended, whoever ends it: two sweeps that share runs at the same time train each of them once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from sweeps.interrupt import Interrupt
from sweeps.trial import Trial, mark_failed

POLL_S = 0.5
MOST_LAUNCHES = 2  # the first may have met another sweep's worker that gave the run back unfinished
SILENT = "its worker ended without a word"


def work_through(
    trials: Sequence[Trial],
    launch: Callable[[Sequence[Trial]], None],
    *,
    is_done: Callable[[Trial], bool],
    on_tick: Callable[[], None],
    say: Callable[[str], None],
    interrupt: Interrupt,
) -> None:
    """Hand the trials to ``launch``; what other sweeps work on is left to them, waited for, and handed out once they
    let go of it unfinished.

    A run that failed, here or there, has ended. One that nobody works on and that has not ended after two launches is
    set ``failed``. ``say`` takes a line for the user.
    """
    pending, launches = list(trials), Counter()
    while pending and not interrupt.requested:
        free = [trial for trial in pending if trial.held_by_another() is None]
        silent = [trial for trial in free if launches[trial.run_id] >= MOST_LAUNCHES]
        for trial in silent:
            mark_failed(trial, SILENT, f"{SILENT}\n")
        if ready := [trial for trial in free if trial not in silent]:
            launches.update(trial.run_id for trial in ready)
            launch(ready)
        pending = _left(pending, is_done)
        holders = [str(owner) for trial in pending if (owner := trial.held_by_another())]
        if holders and not interrupt.requested:
            say(
                f"waits for {len(holders)} run{'s' if len(holders) > 1 else ''} that another sweep works on "
                f"({', '.join(sorted(set(holders)))})"
            )
        while pending and not interrupt.requested and all(trial.held_by_another() for trial in pending):
            on_tick()
            time.sleep(POLL_S)
            pending = _left(pending, is_done)


def _left(trials: Sequence[Trial], is_done: Callable[[Trial], bool]) -> list[Trial]:
    """Return the trials that have not ended. Who holds a run is asked first: a status is written before the lock is
    released."""
    return [
        trial
        for trial in trials
        if trial.held_by_another() or not (trial.directory.status()["state"] == "failed" or is_done(trial))
    ]
