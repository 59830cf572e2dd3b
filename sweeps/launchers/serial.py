"""Run trials one after another in this process, without Ray, with the same results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from sweeps.launchers import Interrupt
from sweeps.trial import RunTrial, Trial, run_trial


def launch(trials: Sequence[Trial], *, interrupt: Interrupt, run: RunTrial = run_trial) -> None:
    """Run every trial in turn; the live table has a thread of its own.

    Once an interrupt is requested, the current step ends, the trial is closed and so saved, and this returns.

    Args:
        trials: the trials.
        interrupt: ends the launch once requested.
        run: runs one trial; replaced in tests.
    """
    for trial in trials:
        with closing(run(trial)) as steps:
            for _ in steps:
                if interrupt.requested:
                    return
        if interrupt.requested:
            return
