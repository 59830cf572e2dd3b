"""Wait for runs that another sweep works on: two sweeps that share runs at the same time train each of them once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from sweeps.interrupt import Interrupt
from sweeps.trial import Trial, mark_failed

POLL_S = 0.5
MOST_LAUNCHES = 2  # the first may have met another sweep's worker that gave the run back unfinished
SILENT = "its worker ended without a word"


def hand_out(
    trials: Sequence[Trial],
    *,
    is_done: Callable[[Trial], bool],
    on_tick: Callable[[], None],
    say: Callable[[str], None],
    interrupt: Interrupt,
) -> Iterator[list[Trial]]:
    """Yield trials to launch, again and again until every trial has ended, whoever ends it.

    A run of another sweep is waited for, and yielded once that sweep leaves it unfinished. A failed run has ended. A
    free run that has not ended after two launches is set ``failed``.

    Args:
        trials: all trials of this launch.
        is_done: whether a trial has its verdict and its measurements.
        on_tick: called while it waits.
        say: takes a line for the user.
        interrupt: ends the wait, and the trials, once it is requested.
    """
    pending, launches = list(trials), Counter()
    free = [trial for trial in pending if trial.held_by_another() is None]
    while pending and not interrupt.requested:
        silent = [trial for trial in free if launches[trial.run_id] >= MOST_LAUNCHES]
        for trial in silent:
            mark_failed(trial, SILENT, f"{SILENT}\n")
        if ready := [trial for trial in free if trial not in silent]:
            launches.update(trial.run_id for trial in ready)
            yield ready
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
