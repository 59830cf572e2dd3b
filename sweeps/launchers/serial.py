"""Trials one after another in this process: no Ray, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from sweeps.interrupt import Interrupt
from sweeps.trial import Trial, run_trial

RunTrial = Callable[[Trial], Iterator[None]]


def launch(
    trials: Sequence[Trial], *, on_tick: Callable[[], None], interrupt: Interrupt, run: RunTrial = run_trial
) -> None:
    """Run every trial, or return after the current step once an interrupt is requested; the trial is then closed, which
    saves it.

    ``on_tick`` is called after every step.
    """
    for trial in trials:
        with closing(steps_of(trial, run)) as steps:
            for _ in steps:
                on_tick()
                if interrupt.requested:
                    return
        if interrupt.requested:
            return


def steps_of(trial: Trial, run: RunTrial) -> Generator[None, None, None]:
    """Return the trial's steps, not begun yet; closing them closes the trial."""
    yield from run(trial)
