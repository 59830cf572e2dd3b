"""Trials one after another in this process: no Ray, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from sweeps.interrupt import Interrupt
from sweeps.trial import RunTrial, Trial, run_trial


def launch(
    trials: Sequence[Trial], *, on_tick: Callable[[], None], interrupt: Interrupt, run: RunTrial = run_trial
) -> None:
    """Run every trial, or return after the current step once an interrupt is requested; the trial is then closed, which
    saves it.

    ``on_tick`` is called after every step.
    """
    for trial in trials:
        with closing(run(trial)) as steps:
            for _ in steps:
                on_tick()
                if interrupt.requested:
                    return
        if interrupt.requested:
            return
