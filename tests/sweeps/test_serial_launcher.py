"""The serial launcher and what Ctrl-C means."""

import json
import os
import signal
from contextlib import closing

import pytest

from sweeps.launchers import Interrupt
from sweeps.launchers import serial as serial_launcher
from tests.sweeps import fakes


def launch(trials, run=fakes.run_fake):
    with Interrupt() as interrupt:
        serial_launcher.launch(trials, interrupt=interrupt, run=run)
    return interrupt


def with_each_step(act):
    """`fakes.run_fake` with a call after every step."""

    def run(trial):
        with closing(fakes.run_fake(trial)) as steps:
            for _ in steps:
                act()
                yield

    return run


def signal_at(step, number=signal.SIGINT):
    """A run that sends this process a signal after the given step, counted over all trials."""
    steps = iter(range(1, 10_000))
    return with_each_step(lambda: os.kill(os.getpid(), number) if next(steps) == step else None)


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def test_trials_run_one_after_another(tmp_path):
    trials, ended = [fakes.make_trial(tmp_path, index) for index in range(3)], []
    launch(trials, with_each_step(lambda: ended.append(states(trials).count("stable"))))
    assert states(trials) == ["stable"] * 3
    assert ended == [0] * 4 + [1] * 4 + [2] * 4


def test_a_failed_trial_does_not_stop_the_others(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    launch(trials, run=fakes.run_and_fail)
    assert states(trials) == ["stable", "failed", "stable"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_the_step_and_the_trial_resumes(tmp_path, number):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    before = signal.getsignal(number)
    interrupt = launch(trials, run=signal_at(6, number))
    assert interrupt.requested
    assert signal.getsignal(number) is before
    assert states(trials) == ["stable", "interrupted", "queued"]
    assert json.loads((trials[1].directory.path / "saved.json").read_text()) == 2
    assert not launch(trials[1:]).requested
    assert states(trials) == ["stable"] * 3
    assert len(trials[1].directory.metrics_file.read_text().splitlines()) == 4


def test_an_interrupt_at_the_last_step_of_a_trial_starts_no_other(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]
    launch(trials, run=signal_at(4))
    assert states(trials)[1] == "queued"


def test_a_second_interrupt_stops_at_once(tmp_path):
    def run(trial):
        for _ in fakes.run_fake(trial):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield

    with pytest.raises(KeyboardInterrupt):
        launch([fakes.make_trial(tmp_path)], run=run)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
