"""The live table, and the plain lines in its place."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from analysis import words
from stability.registry import Registry
from sweeps.view.board import duration
from sweeps.view.live import LiveView
from tests.sweeps import fakes


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def terminal(height, width=100):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height)


def drawn(view):
    """What the table shows now, as lines without colours."""
    view.progress.poll()
    with view.console.capture() as capture:
        view.console.print(view.render())
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capture.get().splitlines()]


def running(trial, steps=2):
    trial.directory.set_status("running", step=0, num_steps=trial.spec["steps"], phase="training")
    for step in range(1, steps + 1):
        fakes.log_step(trial.directory, step, wall_s=0.25 * step)


def test_without_a_terminal_a_trial_gives_a_line_at_its_start_and_one_at_its_end(tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=6) for index in range(2)]
    console = plain_console()
    with LiveView(trials, console=console) as view:
        running(trials[0])
        view._refresh()
        view._refresh()
        fakes.finish(trials[0].directory, "diverged", step=6, val_nll=2.5)
        list(fakes.run_fake(trials[1]))
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "start  sa lr=0.01 seed=0 (000000000000)"
    assert re.fullmatch(r"diverged sa lr=0.01 seed=0 \(000000000000\) val NLL 2.500 in \d+\.\d s \[1/2\]", lines[1])
    assert lines[2] == "start  sa lr=0.01 seed=1 (000000000001)"
    assert re.fullmatch(r"stable sa lr=0.01 seed=1 \(000000000001\) val NLL 2.500 in \d+\.\d s \[2/2\]", lines[3])
    assert len(lines) == 4


def test_the_line_of_a_classifier_gives_its_accuracy(tmp_path):
    trial, console = fakes.make_trial(tmp_path), plain_console()
    with LiveView([trial], console=console, words=Registry("objectives").load("classify").words) as view:
        running(trial)
        view._refresh()
        trial.directory.set_status(
            "stable", step=4, num_steps=4, result={"val_nll": 1.25, "val_accuracy": 0.475, "wall_s": 1.0}
        )
    assert " val NLL 1.250 accuracy 47.5% in " in console.file.getvalue().splitlines()[-1]


def test_the_table_shows_running_trials_then_the_last_that_ended_and_a_line_counts_those_that_wait(tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=6) for index in range(5)]
    view = LiveView(trials, num_skipped=7, console=terminal(20))
    for trial in trials[:2]:
        list(fakes.run_fake(trial))
    trials[2].directory.set_status("failed", step=3, reason="planted")
    running(trials[3])
    bar, counts, best, head, *rows, last = drawn(view)
    assert re.fullmatch(r"━+╺━+ 67% \d+ s elapsed, 2 s left", bar), "3 runs of 5 and a third of one, as fast as they"
    assert counts == "5 runs: 2 done (2 stable), 1 running, 1 failed, 1 queued, 7 skipped"
    assert best == "best val NLL so far: sa 2.500 at lr=0.01 (2 seeds)"
    assert head.split() == ["mechanism", "LR", "seed", "step", "loss", "val", "NLL", "tokens/s", "ETA", "state"]
    assert [line.split()[2] for line in rows] == ["3", "2", "1", "0"]
    assert [line.split()[-1] for line in rows] == ["training", "failed", "stable", "stable"]
    assert rows[0].split()[3:] == ["2/6", "2.500", "512", "1", "s", "training"]
    assert rows[2].split()[4] == "2.500" and last == "… not shown: 1 queued"


def grid_of(tmp_path, names=("sa", "sc"), rates=(1e-3, 1e-2, 1e-1), seeds=2):
    kinds = [(name, lr, seed) for name in names for lr in rates for seed in range(seeds)]
    return {
        kind: fakes.make_trial(tmp_path, index, mechanism={"name": kind[0]}, lr_peak=kind[1])
        for index, kind in enumerate(kinds)
    }


def test_a_grid_of_mechanisms_and_rates_fills_as_runs_end(tmp_path):
    trials = grid_of(tmp_path)
    view = LiveView(list(trials.values()), console=terminal(30))
    for kind, nll in {("sa", 1e-3, 0): 2.5, ("sa", 1e-3, 1): 2.75, ("sa", 1e-2, 0): 2.25}.items():
        fakes.finish(trials[kind].directory, "stable", step=4, val_nll=nll)
    for seed in range(2):
        trials["sa", 1e-1, seed].directory.set_status("diverged", step=2, num_steps=4)
    running(trials["sa", 1e-2, 1])
    running(trials["sc", 1e-3, 0])
    trials["sc", 1e-2, 1].directory.set_status("failed", step=1, reason="planted")
    _, _, head, sa, sc, *rows = drawn(view)
    assert head.split() == ["val", "NLL,", "LR", "0.001", "0.01", "0.1"]
    assert sa.split() == ["sa", "2.625", "2.250", "diverged"] and sc.split() == ["sc", "25%", "·", "·"]
    assert not [line for line in rows if "best" in line or line.endswith(" queued") and "not shown" not in line]
    with view.console.capture() as capture:
        view.console.print(view.render())
    assert re.findall(r"\x1b\[1m *(2\.\d+)", capture.get()) == ["2.250"], "the best of its line"


@pytest.mark.parametrize(("height", "width"), [(30, 40), (9, 100)])
def test_a_grid_that_does_not_fit_gives_way_to_the_best(tmp_path, height, width):
    trials = grid_of(tmp_path, names=("sa", "sc", "mix", "sw"))
    view = LiveView(list(trials.values()), console=terminal(height, width))
    fakes.finish(trials["sa", 1e-3, 0].directory, "stable", step=4, val_nll=2.5)
    lines = drawn(view)
    assert len(lines) < height and any(line.startswith("best val NLL so far: sa") for line in lines)
    assert not any(line.startswith("val NLL") for line in lines)


@pytest.mark.parametrize(("height", "note"), [(6, "stopping"), (12, ""), (24, ""), (140, "")])
def test_the_table_of_a_hundred_runs_fits_the_terminal(tmp_path, height, note):
    trials = [fakes.make_trial(tmp_path, index) for index in range(100)]
    view = LiveView(trials, console=terminal(height))
    view.note = note
    for trial in trials[:60]:
        fakes.finish(trial.directory, "stable", step=4, val_nll=2.5)
    for trial in trials[60:64]:
        running(trial)
    lines = drawn(view)
    assert len(lines) < height
    assert lines[1] == "100 runs: 60 done (60 stable), 4 running, 0 failed, 36 queued"
    assert (note in lines) == bool(note)
    shown = [line.split()[-1] for line in lines if line.startswith("sa ")]
    if height == 140:
        assert shown == ["training"] * 4 + ["stable"] * 60 and lines[-1] == "… not shown: 36 queued"
    else:
        counts = [("ended", 60 - shown.count("stable")), ("queued", 36), ("running", 4 - shown.count("training"))]
        assert sorted(lines[-1].removeprefix("… not shown: ").split(", ")) == sorted(
            f"{count} {state}" for state, count in counts if count
        )
    if height == 24:
        assert shown == ["training"] * 4 + ["stable"] * 6


def test_running_trials_that_do_not_fit_are_counted(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(40)]
    view = LiveView(trials, console=terminal(24))
    for trial in trials:
        running(trial)
    lines = drawn(view)
    assert len(lines) == 23
    assert lines[-1] == f"… not shown: {40 - 19} running"


def test_a_log_hears_of_the_whole_when_another_twentieth_has_ended(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(100)]
    console = plain_console()
    with LiveView(trials, console=console) as view:
        for trial in trials[:11]:
            fakes.finish(trial.directory, "stable", step=4, val_nll=2.5)
            view._refresh()
        running(trials[11])
        view._refresh()
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("so far")]
    assert [line.partition(";")[0] for line in told] == [
        f"so far 100 runs: {count} done ({count} stable), 0 running, 0 failed, {100 - count} queued"
        for count in (5, 10)
    ]


def test_a_log_hears_of_the_whole_when_a_minute_has_passed(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.view.board.PROGRESS_S", 0.0)
    trial, console = fakes.make_trial(tmp_path, steps=9), plain_console()
    with LiveView([trial], console=console) as view:
        running(trial)
        view._refresh()
    assert re.search(
        r"^so far 1 run: 0 done, 1 running, 0 failed, 0 queued; time left unknown yet; sa lr=0.01 seed=0 at 2/9$",
        console.file.getvalue(),
        re.MULTILINE,
    )


def test_a_log_says_of_a_trained_run_that_its_curvature_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.view.board.PROGRESS_S", 0.0)
    trial, console = fakes.make_trial(tmp_path, curvature={}), plain_console()
    with LiveView([trial], console=console, is_done=lambda trial: False) as view:
        running(trial)
        view._refresh()
        fakes.finish(trial.directory, "stable", step=4, val_nll=2.5)
        view._refresh()
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("so far")]
    assert any(line.endswith("; sa lr=0.01 seed=0 at 2/4") for line in told)
    assert told[-1].endswith("; sa lr=0.01 seed=0 at 4/4, curvature")


def test_a_narrow_terminal_cuts_lines_and_does_not_wrap_them(tmp_path):
    view = LiveView([fakes.make_trial(tmp_path)], console=terminal(20, width=30))
    assert len(drawn(view)) == 3
    assert max(map(len, drawn(view))) <= 30


@pytest.mark.parametrize(("name", "steps", "has_speed"), [("sa", 2000, True), ("gated_deltanet", 20000, False)])
def test_80_columns_have_room_for_counts_and_states(tmp_path, name, steps, has_speed):
    changes = {"mechanism": {"name": name}, "lr_peak": 0.000316, "steps": steps}
    trials = [fakes.make_trial(tmp_path, index, **changes) for index in range(8)]
    view = LiveView(trials, num_skipped=12, console=terminal(24, width=80))
    for trial, nll in zip(trials, (2.5, 5.5, 7.0), strict=False):
        result = {"val_nll": nll, "init_nll": 5.8, "wall_s": 1.0}
        trial.directory.set_status("stable" if nll < 3 else "plateaued", step=steps, num_steps=steps, result=result)
    trials[3].directory.set_status("diverged", step=40, num_steps=steps)
    running(trials[4])
    _, counts, more, head, *rows, _ = drawn(view)
    assert (counts, more) == (
        "8 runs: 4 done (1 stable, 1 learned nothing, 1 exploded, 1 diverged), 1 running,",
        "0 failed, 3 queued, 12 skipped",
    )
    columns = ["mechanism", "LR", "seed", "step", "loss", "val", "NLL", "tokens/s", "ETA", "state"]
    assert head.split() == [each for each in columns if has_speed or each != "tokens/s"]
    ends = ("training", "diverged", "exploded", "learned nothing", "stable")
    assert len(rows) == len(ends) and all(row.endswith(f" {end}") for row, end in zip(rows, ends, strict=True))
    assert max(map(len, drawn(view))) <= 80


def test_what_opens_the_table_goes_when_a_trial_runs(tmp_path):
    trial = fakes.make_trial(tmp_path)
    view = LiveView([trial], opening="starting", console=terminal(20))
    assert "starting" in drawn(view)
    running(trial)
    assert "starting" not in drawn(view)


def test_a_log_says_what_is_waited_for_before_the_first_trial_runs(tmp_path):
    console = plain_console()
    with LiveView([fakes.make_trial(tmp_path)], opening="starting", console=console):
        assert console.file.getvalue() == "starting\n"


def test_the_table_refreshes_by_itself_while_the_launcher_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.view.live.POLL_S", 0.01)
    trial, console = fakes.make_trial(tmp_path), terminal(20)
    with LiveView([trial], console=console) as view:
        running(trial)
        for _ in range(500):
            if view._closing.wait(0.01) or "2/4" in console.file.getvalue():
                break
    assert "2/4" in console.file.getvalue()


def test_ticks_look_at_the_runs_at_most_once_a_second(tmp_path, monkeypatch):
    with LiveView([fakes.make_trial(tmp_path)], console=plain_console()) as view:
        polls = []
        monkeypatch.setattr(view.progress, "poll", lambda: polls.append(1))
        for _ in range(1000):
            view.tick()
        assert len(polls) <= 1


def test_the_summary_counts_verdicts(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(4)]
    with LiveView(trials, num_skipped=2, console=plain_console()) as view:
        list(fakes.run_fake(trials[0], verdict="diverged"))
        list(fakes.run_fake(trials[1]))
        list(fakes.run_fake(trials[2]))
    assert re.fullmatch(r"ended 3 runs in \d+ s: 2 stable, 1 diverged; skipped 2; 1 left", view.summary())


def test_the_terminal_is_given_back_after_an_error(tmp_path):
    console = terminal(20)
    with pytest.raises(RuntimeError, match="planted"), LiveView([fakes.make_trial(tmp_path)], console=console):
        raise RuntimeError("planted")
    assert console.file.getvalue().count("\x1b[?25h") == console.file.getvalue().count("\x1b[?25l") == 1


def test_a_report_tells_durations_in_the_same_words():
    """Of `analysis`, which imports nothing of ours."""
    assert all(duration(seconds) == words.duration(seconds) for seconds in np.geomspace(0.1, 1e6, 400))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (252, "4 min 12 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
