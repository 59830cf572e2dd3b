"""The serial launcher and what Ctrl-C means."""

import json
import os
import signal

import pytest

from sweeps.launchers import Interrupt
from sweeps.launchers import serial as serial_launcher
from tests.sweeps import fakes


def launch(trials, on_tick=lambda: None, run=fakes.run_fake):
    with Interrupt() as interrupt:
        serial_launcher.launch(trials, on_tick=on_tick, interrupt=interrupt, run=run)
    return interrupt


def signal_at(tick, number=signal.SIGINT):
    """An ``on_tick`` that sends this process a signal at the given tick."""
    ticks = iter(range(1, 10_000))
    return lambda: os.kill(os.getpid(), number) if next(ticks) == tick else None


def states(trials):
    return [trial.directory.status()["state"] for trial in trials]


def test_trials_run_in_order_with_a_tick_after_every_step(tmp_path):
    trials, ticks = [fakes.make_trial(tmp_path, index) for index in range(3)], []
    launch(trials, on_tick=lambda: ticks.append([state == "stable" for state in states(trials)].count(True)))
    assert states(trials) == ["stable"] * 3
    assert ticks == [0] * 4 + [1] * 4 + [2] * 4


def test_a_failed_trial_does_not_stop_the_others(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    launch(trials, run=fakes.run_and_fail)
    assert states(trials) == ["stable", "failed", "stable"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_the_step_and_the_trial_resumes(tmp_path, number):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    before = signal.getsignal(number)
    interrupt = launch(trials, on_tick=signal_at(6, number))
    assert interrupt.requested
    assert signal.getsignal(number) is before
    assert states(trials) == ["stable", "interrupted", "queued"]
    assert json.loads((trials[1].directory.path / "saved.json").read_text()) == 2
    assert not launch(trials[1:]).requested
    assert states(trials) == ["stable"] * 3
    assert len(trials[1].directory.metrics_file.read_text().splitlines()) == 4


def test_an_interrupt_at_the_last_step_of_a_trial_starts_no_other(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]
    launch(trials, on_tick=signal_at(4))
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
