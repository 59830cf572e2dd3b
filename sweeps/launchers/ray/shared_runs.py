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
    free = [trial for trial in pending if trial.held_by_another() is None]
    while pending and not interrupt.requested:
        silent = [trial for trial in free if launches[trial.run_id] >= MOST_LAUNCHES]
        for trial in silent:
            mark_failed(trial, SILENT, f"{SILENT}\n")
        if ready := [trial for trial in free if trial not in silent]:
            launches.update(trial.run_id for trial in ready)
            launch(ready)
        pending, free = _left(pending, is_done)
        holders = [str(owner) for trial in pending if (owner := trial.held_by_another())]
        if holders and not interrupt.requested:
            say(
                f"waits for {len(holders)} run{'s' if len(holders) > 1 else ''} that another sweep works on "
                f"({', '.join(sorted(set(holders)))})"
            )
        while pending and not free and not interrupt.requested:
            on_tick()
            time.sleep(POLL_S)
            pending, free = _left(pending, is_done)


def _left(trials: Sequence[Trial], is_done: Callable[[Trial], bool]) -> tuple[list[Trial], list[Trial]]:
    """Return the trials that have not ended, and those of them that nobody else holds.

    Each trial is looked at once, and who holds it is asked before how it stands: a status is written before the lock is
    released. Two looks at the lock would take for free what another sweep ended between them.
    """
    left, free = [], []
    for trial in trials:
        is_held = trial.held_by_another() is not None
        if is_held or not (trial.has_failed() or is_done(trial)):
            left.append(trial)
            if not is_held:
                free.append(trial)
    return left, free
