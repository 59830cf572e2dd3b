"""What is known of trials from the files that they leave."""

import io
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from stability.runs.cleaning import StoredRun
from stability.runs.directory import TAIL_BYTES
from stability.runs.lock import RunLock
from stability.runs.study import StudyFolder
from sweeps import progress as progress_module
from sweeps.progress import Progress, read_tail
from sweeps.trial import list_varied_axes, variants
from sweeps.view.board import Lines, best_line, counts_line, grid_table, left_text, run_table
from sweeps.view.study_view import StudyView
from tests.sweeps import fakes


def started(trial, step=0):
    trial.directory.set_status("running", step=step, num_steps=trial.spec["steps"], phase="training")


def test_the_tail_of_a_log_is_its_last_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_tail(path) == []
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5000)) + '{"step": 50')
    rows = read_tail(path)
    assert rows[-1] == {"step": 4999}
    assert [row["step"] for row in rows] == list(range(rows[0]["step"], 5000))
    assert TAIL_BYTES / 20 < len(rows) < TAIL_BYTES / 10


def test_the_tail_of_one_unfinished_line_is_empty(tmp_path):
    (tmp_path / "log").write_text('{"step"')
    assert read_tail(tmp_path / "log") == []


def test_a_running_trial_is_followed_by_its_last_rows(tmp_path):
    trial = fakes.make_trial(tmp_path, steps=10)
    progress = Progress([trial])
    started(trial)
    for step in range(1, 9):
        fakes.log_step(trial.directory, step, wall_s=0.5 * step, val_nll=3.25 if step == 2 else None)
    progress.poll()
    (row,) = progress.rows
    assert (row.state, row.phase, row.step, row.num_steps) == ("running", "training", 8, 10)
    assert (row.loss, row.val_nll, row.tokens_per_s, row.step_s) == (5.0 / 8, 3.25, 512.0, 0.5)
    assert progress.row_eta_s(row) == 1.0
    fakes.finish(trial.directory, "spiked", step=10, val_nll=2.5)
    progress.poll()
    assert (row.state, row.val_nll, row.step) == ("spiked", 2.5, 10)
    assert row.seconds is not None


def test_a_run_that_a_search_stops_ends_with_its_last_validation(tmp_path):
    trial = fakes.make_trial(tmp_path, steps=10)
    progress = Progress([trial])
    started(trial)
    fakes.log_step(trial.directory, 1, wall_s=0.1, val_nll=5.5)
    progress.poll()
    for step in range(2, 5):  # faster than the next look
        fakes.log_step(trial.directory, step, wall_s=0.5 * step, val_nll=3.25 if step == 4 else None)
    trial.directory.set_status("stopped", step=4, num_steps=10)
    progress.poll()
    (row,) = progress.rows
    assert (row.state, row.val_nll, row.step) == ("stopped", 3.25, 4)


def test_a_status_of_an_earlier_launch_counts_as_queued(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(2)]
    started(trials[0], step=3)
    trials[1].directory.set_status("failed", step=1, reason="before")
    progress = Progress(trials)
    progress.poll()
    assert progress.counts() == {"queued": 2}
    started(trials[0], step=3)
    trials[1].directory.set_status("failed", step=1, reason="again")
    progress.poll()
    assert progress.counts() == {"running": 1, "failed": 1}


def test_a_trained_trial_runs_on_until_its_curvature_is_there(tmp_path):
    trial, measured = fakes.make_trial(tmp_path, curvature={}), []
    progress = Progress([trial], is_done=lambda trial: bool(measured))
    for _ in fakes.run_fake(trial):
        progress.poll()
    progress.poll()
    (row,) = progress.rows
    assert (row.state, row.phase, row.val_nll) == ("running", "curvature", 2.5)
    measured.append(True)
    progress.poll()
    assert row.state == "stable"
    assert row.curvature_s is not None


def test_a_trial_that_only_lacks_its_curvature_ends_when_the_table_appears(tmp_path):
    trial, measured = fakes.make_trial(tmp_path, curvature={}), []
    list(fakes.run_fake(trial))
    progress = Progress([trial], is_done=lambda trial: bool(measured))
    progress.poll()
    assert progress.counts() == {"queued": 1}
    trial.directory.curvature_file("terminal").parent.mkdir()
    measured.append(True)
    progress.poll()
    assert progress.counts() == {"done": 1}
    assert progress.rows[0].seconds is None


def test_the_first_steps_of_a_sweep_are_not_extrapolated(tmp_path):
    """Three slow steps, of a sweep that then takes 0.1 s a step; α_max takes as long as 1,000 steps."""
    kinds = [{"mechanism": {"name": name}} for name in ("sa", "sc")]
    trials = [fakes.make_trial(tmp_path, index, steps=20, curvature={}, **kind) for index, kind in enumerate(kinds)]
    expected = {trial.run_id: (0.1, 100.0) for trial in trials}
    progress = Progress(trials, is_done=lambda trial: False, expected=expected)
    started(trials[0])
    wall_s, said = 0.0, []
    for step in range(1, 10):
        wall_s += 30.0 if step <= 3 else 0.1
        fakes.log_step(trials[0].directory, step, wall_s=wall_s)
        progress.poll()
        said.append((left_text(progress), progress.row_eta_s(progress.rows[0]) is None))
    assert said[:7] == [("time left unknown yet", True)] * 7
    assert said[7] == ("3 min 23 s left", False)
    assert progress.eta_s() == pytest.approx(11 * 0.1 + 20 * 0.1 + 2 * 100.0)


def test_the_time_left_adds_up_over_trials_at_the_speed_of_their_own_kind(tmp_path):
    kinds = [{"mechanism": {"name": name}} for name in ("sa", "sc", "sa", "sc")]
    trials = [fakes.make_trial(tmp_path, index, steps=20, **kind) for index, kind in enumerate(kinds)]
    progress = Progress(trials)
    progress.poll()
    assert progress.eta_s() is None
    for trial, step_s in zip(trials[:2], (1.0, 3.0), strict=True):
        started(trial)
        for step in range(1, 9):
            fakes.log_step(trial.directory, step, wall_s=step * step_s)
    progress.poll()
    assert progress.eta_s() == (12 * 1.0 + 12 * 3.0 + 20 * 1.0 + 20 * 3.0) / 2


@pytest.mark.parametrize(
    ("slow", "text"),
    [(1.1, "19 s left"), (1.4, "about 22 s left"), (3.0, "18 s to 54 s left")],
)
def test_the_time_left_is_a_range_where_the_last_steps_took_unlike_times(slow, text, tmp_path):
    trials = [fakes.make_trial(tmp_path, index, steps=13) for index in range(4)]
    progress = Progress(trials)
    for trial, step_s in zip(trials[:2], (1.0, slow), strict=True):
        started(trial)
        for step in range(1, 9):
            fakes.log_step(trial.directory, step, wall_s=step * step_s)
    progress.poll()
    median = (1.0 + slow) / 2
    assert progress.eta_s() == pytest.approx((5 * 1.0 + 5 * slow + 2 * 13 * median) / 2)
    low, high = progress.swing()
    assert (low, high) == pytest.approx((1.0 / median, slow / median))
    assert left_text(progress) == text


def test_a_minute_in_which_the_machine_did_something_else_is_not_multiplied_by_all_that_is_left(tmp_path):
    (trial,) = [fakes.make_trial(tmp_path, steps=20_000)]
    progress = Progress([trial])
    started(trial)
    step, wall_s = 0, 0.0
    # seconds a step, steps, and the mean of the last ten minutes: nine minutes of 0.1 s with the minute of 3 s, whose
    # steps alone the end of the log does not outweigh; then ten minutes later what was before is forgotten
    for step_s, steps, seen in ((0.1, 5_400, 0.1), (3.0, 20, 600 / 5_420), (0.2, 3_100, 0.2)):
        for _ in range(steps):
            step, wall_s = step + 1, wall_s + step_s
            fakes.log_step(trial.directory, step, wall_s=wall_s)
            if step % 20 == 0:
                progress.poll()
        assert progress.rows[0].step_s == pytest.approx(seen, rel=0.01)
        assert progress.eta_s() == pytest.approx((20_000 - step) * seen, rel=0.01)


def log_slowing(trial):
    """83 steps, from the 44th on of 3 s in place of 1."""
    started(trial)
    wall_s = 0.0
    for step in range(1, 84):
        wall_s += 1.0 if step <= 43 else 3.0
        fakes.log_step(trial.directory, step, wall_s=wall_s)


def test_the_halves_of_a_runs_last_steps_show_a_machine_that_became_slower(tmp_path):
    (trial,) = [fakes.make_trial(tmp_path, steps=202)]
    progress = Progress([trial])
    log_slowing(trial)
    progress.poll()
    assert progress.rows[0].halves_s == (1.0, 3.0) and progress.swing() == (0.5, 1.5)
    assert left_text(progress) == "1 min 59 s to 5 min 57 s left", "119 steps of 1 to 3 s"


@pytest.mark.parametrize(
    ("after_s", "text"),
    [
        (0.0, "2 min 00 s to 6 min 00 s left"),
        (60.0, "3 min 00 s to 7 min 00 s left"),
        (600.0, "about 14 min 00 s left"),
        (6000.0, "1 h 44 min left"),
    ],
)
def test_only_the_trainings_share_of_the_time_left_varies_with_the_steps(after_s, text, tmp_path):
    (trial,) = [fakes.make_trial(tmp_path, steps=203, curvature={})]
    progress = Progress([trial], is_done=lambda trial: False, expected={trial.run_id: (1.0, after_s / 2)})
    log_slowing(trial)
    progress.poll()
    assert progress.eta_s() == 120 * 2.0 + after_s and progress.swing() == (0.5, 1.5)
    assert left_text(progress) == text


def test_the_time_left_is_estimated_from_the_last_runs(tmp_path):
    """Eight runs at 10 s a step while something else ran, then four at 1 s: the next takes 1 s a step."""
    trials = [fakes.make_trial(tmp_path, index, steps=10) for index in range(13)]
    progress = Progress(trials, from_outside=True)
    for number, trial in enumerate(trials[:12]):
        result = {"val_nll": 2.0, "wall_s": 100.0 if number < 8 else 10.0}
        trial.directory.set_status("stable", step=10, num_steps=10, result=result)
    progress.poll()
    for number, row in enumerate(progress.rows[:12]):
        row.ended_at = 1000.0 + number
    progress.poll()
    assert progress.row_eta_s(progress.rows[12]) == 10.0


def test_kinds_that_wait_are_expected_in_their_ratio_to_those_that_are_timed(tmp_path):
    """Here all is twice as slow as expected. sc has three times sa's steps and four times its α_max."""
    kinds = [{"mechanism": {"name": name}} for name in ("sa", "sa", "sc", "sc")]
    trials = [fakes.make_trial(tmp_path, index, steps=13, curvature={}, **kind) for index, kind in enumerate(kinds)]
    times = {"sa": (0.5, 2.0), "sc": (1.5, 8.0)}
    expected = {trial.run_id: times[trial.spec["mechanism"]["name"]] for trial in trials}
    measured = []
    progress = Progress(trials, is_done=lambda trial: trial.run_id in measured, expected=expected)
    started(trials[0])
    progress.poll()
    assert progress.eta_s() is None, "what was expected is of a step or two"
    assert progress.is_timed_whole and progress.share_done() == 0
    for step in range(1, 9):
        fakes.log_step(trials[0].directory, step, wall_s=step * 1.0)
    progress.poll()
    whole = 2 * (13 * 1.0 + 4.0) + 2 * (13 * 3.0 + 16.0)
    assert progress.eta_s() == whole - 8 * 1.0
    assert progress.share_done() == pytest.approx(8 / whole)
    without = Progress(trials, is_done=lambda trial: trial.run_id in measured)
    without._began_at = 0.0
    started(trials[0])
    without.poll()
    assert without.eta_s() == 4 * 13 * 1.0 - 8 * 1.0, "every kind as fast as the first, no α_max"
    fakes.finish(trials[0].directory, "stable", step=13, val_nll=2.5)
    progress.poll()
    trials[0].directory.curvature_file("terminal").parent.mkdir()
    measured.append(trials[0].run_id)
    progress.poll()
    progress.rows[0].curvature_s = 10.0  # five times the 2 s expected
    progress.poll()
    assert progress.eta_s() == pytest.approx(13 * 1.0 + 10.0 + 2 * (13 * 3.0 + 5 * 8.0))


def test_the_time_left_is_of_the_training_alone_until_what_follows_it_has_been_timed(tmp_path):
    trials, measured = [fakes.make_trial(tmp_path, index, steps=10, curvature={}) for index in range(2)], []
    progress = Progress(trials, is_done=lambda trial: trial.run_id in measured)
    steps = fakes.run_fake(trials[0])
    for _ in range(8):
        next(steps)
    progress.poll()
    assert left_text(progress).endswith(" s of training left")
    list(steps)
    progress.poll()
    trials[0].directory.curvature_file("terminal").parent.mkdir()
    measured.append(trials[0].run_id)
    progress.poll()
    assert left_text(progress).endswith(" s left")


def test_runs_that_were_trained_before_have_no_training_left(tmp_path):
    """Three are only measured, none of 1,000 steps at a second each; what that takes is unknown until one was timed,
    and counts alone from then on."""
    trials, measured = (
        [replace(fakes.make_trial(tmp_path, index, steps=1000, curvature={}), launch="now") for index in range(3)],
        [],
    )
    for trial in trials:
        trial.directory.set_status("stable", step=1000, num_steps=1000, result={"val_nll": 2.5, "wall_s": 1000.0})
    progress = Progress(trials, is_done=lambda trial: trial.run_id in measured)
    progress.poll()
    assert left_text(progress) == "time left unknown yet"
    locks = [trial.lock for trial in trials]
    assert locks[0].acquire()
    progress.poll()
    row = progress.rows[0]
    assert (row.state, row.phase, progress.most_at_once) == ("running", "curvature", 1)
    assert left_text(progress) == "time left unknown yet" and progress.row_eta_s(row) is None
    assert row.started_at is not None
    row.started_at -= 40  # as if it had been seen to begin so long ago
    trials[0].directory.curvature_file("terminal").parent.mkdir()
    measured.append(trials[0].run_id)
    locks[0].release()
    progress.poll()
    assert row.state == "stable" and row.curvature_s == pytest.approx(40, abs=5)
    assert progress.eta_s() == pytest.approx(2 * row.curvature_s, rel=1e-6)
    assert locks[1].acquire()
    progress.poll()
    assert progress.row_eta_s(progress.rows[1]) == pytest.approx(row.curvature_s, abs=5) and left_text(
        progress
    ).endswith(" s left")
    locks[1].release()


def test_a_run_that_was_trained_before_and_that_another_sweep_works_on_is_not_running_here(tmp_path):
    trial = replace(fakes.make_trial(tmp_path, curvature={}), launch="now")
    list(fakes.run_fake(trial))
    progress = Progress([trial], is_done=lambda trial: False)
    other = RunLock(trial.directory.path, "another")
    assert other.acquire()
    progress.poll()
    assert progress.counts() == {"queued": 1} and progress.rows[0].held_by
    other.release()


def test_what_is_best_counts_the_runs_that_had_ended_before_and_no_count_does(tmp_path):
    old, new, diverged = (fakes.make_trial(tmp_path, index, lr_peak=lr) for index, lr in enumerate((0.1, 0.01, 0.001)))
    fakes.finish(old.directory, "stable", step=4, val_nll=2.25)
    diverged.directory.set_status("diverged", step=2, num_steps=4)
    progress = Progress([new], earlier=[old, diverged])
    list(fakes.run_fake(new))
    progress.poll()
    assert progress.best() == {"sa": (2.25, 0.1, 1)} and progress.counts() == {"done": 1}
    assert Progress([new]).best() == {}


def test_a_variant_whose_runs_all_exploded_or_diverged_has_no_best_nll(tmp_path):
    lrs = (0.01, 0.1, 1.0)
    trials = [fakes.make_trial(tmp_path, index, lr_peak=lr) for index, lr in enumerate(lrs)]
    for trial, nll in zip(trials, (41.0, 1e9, None), strict=True):
        state = "plateaued" if nll else "diverged"
        trial.directory.set_status(state, step=4, num_steps=4, result={"val_nll": nll, "init_nll": 5.5})
    progress = Progress(trials, from_outside=True)
    progress.poll()
    assert progress.best() == {} and best_line(progress) == ""
    result = {"val_nll": 5.4, "init_nll": 5.5}
    trials[0].directory.set_status("plateaued", step=4, num_steps=4, result=result)
    progress.poll()
    assert best_line(progress) == "best val NLL so far: sa 5.400 at lr=0.01"


def test_a_variant_names_the_axes_that_vary(tmp_path):
    one = [fakes.make_trial(tmp_path, index, mechanism={"name": name}) for index, name in enumerate(("sa", "sc"))]
    assert variants(one) == ["sa", "sc"]
    two = [fakes.make_trial(tmp_path, 0), fakes.make_trial(tmp_path, 1, norm={"name": "rmsnorm"})]
    assert variants(two) == ["sa layernorm", "sa rmsnorm"]


def test_a_label_names_what_tells_runs_of_a_sweep_apart(tmp_path):
    several = list_varied_axes(
        {
            "mechanism": ["sa", "sc"],
            "residual": [{"name": "identity"}, {"name": "hc"}],
            "optimizer": [{"name": "adamw"}],
            "norm": [{"name": "a"}, {"name": "b"}],
        }
    )
    trial = fakes.make_trial(tmp_path, residual={"name": "hc"}, norm={"name": "rmsnorm"})
    assert trial.label == "sa lr=0.01 seed=0"
    assert replace(trial, several=several, variant="window=4").label == "sa hc rmsnorm window=4 lr=0.01 seed=0"


def test_a_poll_reads_no_log_of_a_trial_that_waits_or_has_ended(tmp_path, monkeypatch):
    trials = [fakes.make_trial(tmp_path, index) for index in range(50)]
    for trial in trials[:30]:
        list(fakes.run_fake(trial))
    progress = Progress(trials)
    for trial in trials[30:40]:
        list(fakes.run_fake(trial))
    started(trials[40])
    progress.poll()
    opened = []
    monkeypatch.setattr("sweeps.progress.read_tail", lambda path, **_: opened.append(path) or [])
    progress.poll()
    assert {path.parent.name for path in opened} == {trials[40].run_id}
    assert progress.counts() == {"done": 10, "running": 1, "queued": 39}


@pytest.mark.parametrize(
    ("record", "name", "counted"),
    [
        ({"words": {"counted": "moves"}}, "next_place", "moves"),
        ({}, "mlm", "tokens"),
    ],
)
def test_a_speed_is_in_what_the_study_says_that_it_counts(tmp_path, record, name, counted):
    trial = fakes.make_trial(tmp_path)
    trial.directory.write_spec({**trial.spec, "objective": {"name": name}})
    study = StudyFolder.of(tmp_path, "some")
    study.write([trial.run_id], **record)
    view = StudyView.of(study)
    columns = [str(column.header) for column in run_table(view.progress, view.progress.rows).columns]
    assert f"{counted}/s" in columns and len([each for each in columns if each.endswith("/s")]) == 1


@pytest.fixture
def now(monkeypatch):
    """The time by which a run's idleness is measured, which stands still."""
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(time=lambda: 2e9))
    return 2e9


def stand(trial, seconds, now):
    for file in (trial.directory.metrics_file, trial.directory.status_file):
        if file.exists():
            os.utime(file, (now - seconds, now - seconds))


@pytest.mark.parametrize(
    ("step_s", "rows", "seconds", "stands"),
    [
        (0.5, 4, 50, False),
        (0.5, 4, 250, True),
        (20.0, 4, 250, False),  # 20 steps are 400 s
        (20.0, 4, 500, True),
        (1.0, 1, 250, False),  # no step is timed yet
        (1.0, 0, 400, True),
    ],
)
@pytest.mark.parametrize("from_outside", [False, True])
def test_a_run_without_a_step_for_far_longer_than_a_step_takes_is_told(
    tmp_path, now, step_s, rows, seconds, stands, from_outside
):
    trial = replace(fakes.make_trial(tmp_path, steps=10), launch="own")
    progress = Progress([trial], from_outside=from_outside)
    started(trial)
    for step in range(1, rows + 1):
        fakes.log_step(trial.directory, step, wall_s=step_s * step)
    stand(trial, seconds, now)
    lock, said = trial.lock, []
    assert lock.acquire()
    lines = Lines(said.append)
    try:
        for _ in range(2):
            progress.poll()
            lines.print_changes(progress)
    finally:
        lock.release()
    word = f"no step for {seconds // 60} min {seconds % 60:02d} s"
    table = Console(width=200, file=io.StringIO())
    table.print(run_table(progress, progress.rows))
    assert (word in table.file.getvalue(), f"1 running (1 with {word})" in counts_line(progress)) == (stands, stands)
    assert [line for line in said if "stalled" in line] == [
        f"stalled sa lr=0.01 seed=0 (000000000000): {word}"
    ] * stands
    if rows:
        fakes.log_step(trial.directory, rows + 1, wall_s=step_s * (rows + 1))
        stand(trial, 1, now)
        progress.poll()
        assert "no step" not in counts_line(progress)


def test_a_median_step_is_not_moved_by_a_pause_or_a_clock_that_begins_anew(tmp_path, now):
    trial = fakes.make_trial(tmp_path, steps=10)
    started(trial)
    timing = [{"step": step, "wall_s": wall_s} for step, wall_s in enumerate((0.5, 1.0, 1.5, 900.0, 0.5, 1.0, 1.5), 1)]
    fakes.log_step(trial.directory, 1, wall_s=0.5)
    stand(trial, 70, now)
    assert progress_module.standing_s(trial.directory, timing) == 70
    assert progress_module.standing_s(trial.directory, [{**row, "wall_s": 10 * row["step"]} for row in timing]) is None


def test_a_run_above_its_untrained_model_is_shown_as_exploded_any_other_plateaued_one_as_learned_nothing(tmp_path):
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    progress = Progress(trials)
    for trial, nll in zip(trials, (167.0, 3.4, None), strict=True):
        started(trial)
        result = {"val_nll": nll, "init_nll": 5.8, "wall_s": 1.0}
        trial.directory.set_status("diverged" if nll is None else "plateaued", step=4, num_steps=4, result=result)
    progress.poll()
    assert counts_line(progress) == (
        "3 runs: 3 done (1 learned nothing, 1 exploded, 1 diverged), 0 running, 0 failed, 0 queued"
    )
    said = []
    Lines(said.append).print_changes(progress)
    (ended,) = [line for line in said if "167.000" in line]
    assert ended.startswith("exploded sa lr=0.01 seed=0")
    console = Console(width=120, file=io.StringIO())
    console.print(run_table(progress, progress.rows))
    shown = ["exploded", "learned nothing", "diverged"]
    assert [row.strip().split("  ")[-1].strip() for row in console.file.getvalue().splitlines()[1:]] == shown
    assert [StoredRun.of(trial.directory).state for trial in trials] == shown
    assert [trial.directory.status()["state"] for trial in trials] == ["plateaued", "plateaued", "diverged"]


def test_the_grid_calls_a_median_above_the_untrained_model_exploded(tmp_path):
    trials = [fakes.make_trial(tmp_path, index, lr_peak=lr) for index, lr in enumerate((1e-3, 1e-2, 1e-1))]
    progress = Progress(trials)
    for trial in trials:
        started(trial)
        nll = {1e-3: 2.5, 1e-2: 5.1, 1e-1: 1676059747.9}[trial.spec["lr_peak"]]
        trial.directory.set_status(
            "stable" if nll < 3 else "plateaued", step=4, num_steps=4, result={"val_nll": nll, "init_nll": 5.8}
        )
    progress.poll()
    console = Console(width=120, file=io.StringIO())
    console.print(grid_table(progress, 120, 20))
    assert console.file.getvalue().splitlines()[1].split() == ["sa", "2.500", "5.100", "exploded"]
