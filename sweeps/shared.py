"""Share runs between concurrent sweeps, to train each run once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from sweeps.interrupt import Interrupt
from sweeps.trial import Trial, mark_failed

POLL_S = 0.5
MOST_LAUNCHES = 2  # during the first, another sweep's worker may have released the run unfinished
SILENT = "its worker ended without a word"


def hand_out(
    trials: Sequence[Trial],
    *,
    is_done: Callable[[Trial], bool],
    on_tick: Callable[[], None],
    say: Callable[[str], None],
    interrupt: Interrupt,
) -> Iterator[list[Trial]]:
    """Yield trials to launch, until every trial has ended in this or another sweep.

    A run of another sweep is awaited, and yielded if left unfinished there. A failed run has ended. A free run is set
    ``failed`` if it has not ended after two launches.

    Args:
        trials: all trials of this launch.
        is_done: whether a trial has its verdict and its measurements.
        on_tick: called while it waits.
        say: prints a line for the user.
        interrupt: ends the wait and the iteration once requested.
    """
    pending, launches = list(trials), Counter()
    free = [trial for trial in pending if trial.find_other_owner() is None]
    while pending and not interrupt.requested:
        silent = [trial for trial in free if launches[trial.run_id] >= MOST_LAUNCHES]
        for trial in silent:
            mark_failed(trial, SILENT, f"{SILENT}\n")
        if ready := [trial for trial in free if trial not in silent]:
            launches.update(trial.run_id for trial in ready)
            yield ready
        pending, free = _list_unfinished(pending, is_done)
        holders = [str(owner) for trial in pending if (owner := trial.find_other_owner())]
        if holders and not interrupt.requested:
            say(
                f"waits for {len(holders)} run{'s' if len(holders) > 1 else ''} that another sweep works on "
                f"({', '.join(sorted(set(holders)))})"
            )
        while pending and not free and not interrupt.requested:
            on_tick()
            time.sleep(POLL_S)
            pending, free = _list_unfinished(pending, is_done)


def _list_unfinished(trials: Sequence[Trial], is_done: Callable[[Trial], bool]) -> tuple[list[Trial], list[Trial]]:
    """Return the unfinished trials, and those of them free of another sweep's lock."""
    # One check of the lock per trial, before the status: a status is written before the lock is released. With a second
    # check of the lock, a run that another sweep ended in between would count as free.
    left, free = [], []
    for trial in trials:
        is_held = trial.find_other_owner() is not None
        if is_held or not (trial.has_failed() or is_done(trial)):
            left.append(trial)
            if not is_held:
                free.append(trial)
    return left, free
