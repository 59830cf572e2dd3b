"""``python -m stability.status``: what it says of a study, of a pool, and what it removes."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stability import status
from stability.runs import cleaning
from stability.runs.leftovers import name_temporary
from stability.runs.lock import RunLock
from stability.runs.parquet import write_parquet
from stability.runs.study import StudyFolder
from sweeps.progress import STALLED
from sweeps.view.study_view import StudyView
from tests.sweeps import fakes

ROOT = Path(__file__).resolve().parents[1]
ASKED = {"hessian": True, "curvature": {"phase": "terminal", "measure": ["alpha_max"]}, "generate": None}
LABEL = {"data": {"name": "text"}, "model": {"name": "nano"}, "objective": {"name": "mlm"}, "data_fingerprint": "f"}
TEMPORARY_OF_THE_DEAD = re.sub(r"-\d+\.tmp$", "-99999999.tmp", name_temporary(Path("status.json")).name)


def make_study(pool, name="mine", count=6, first=0, **more):
    """A study of queued runs, two mechanisms in turn."""
    trials = [
        fakes.make_trial(pool, first + index, steps=8, mechanism={"name": ("sa", "sc")[index % 2]}, curvature={})
        for index in range(count)
    ]
    for trial in trials:
        trial.directory.write_spec(trial.spec | LABEL)
    StudyFolder.of(pool, name).write(
        [trial.run_id for trial in trials], spec=ASKED, command="python -m stability.sweep name=mine", **more
    )
    return trials


def measured(trial):
    """A measured run whose α_max took no time, on a machine of any speed."""
    fakes.finish(trial.directory, "stable", step=8, val_nll=2.5 - 0.1 * trial.spec["seed"])
    table = trial.directory.curvature_file("terminal")
    write_parquet(fakes_frame(), table, {})
    os.utime(table.parent, (trial.directory.status()["changed_at"],) * 2)


def fakes_frame():
    import pandas as pd

    return pd.DataFrame({"alpha_max": [0.1]})


def started(trial, steps=12):
    trial.directory.set_status("running", step=0, num_steps=16, phase="training")
    for step in range(1, steps + 1):
        fakes.log_step(trial.directory, step, wall_s=0.5 * step)


@pytest.fixture
def pool(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def said(pool, capsys):
    """What the entry prints for some words, as lines."""

    def say(*words):
        assert status.main([*words, f"runs_dir={pool}"]) == 0
        return capsys.readouterr().out.splitlines()

    return say


def test_one_study_is_not_cleaned_by_its_name_and_the_message_says_how_to_remove_it(entered, pool):
    out = entered("stability.status", "clean=b", f"runs_dir={pool}")
    assert (out.returncode, out.stderr) == (2, "error: clean=b: must be unlisted; delete=b removes the study b\n")


def test_a_study_is_told_by_verdict_with_what_runs_stalled_and_failed(pool, said):
    trials = make_study(pool)
    measured(trials[0])
    fakes.finish(trials[1].directory, "diverged", step=3, val_nll=None)
    started(trials[2])
    started(trials[3])
    trials[4].directory.set_status("failed", step=2, reason="ValueError: planted")
    trials[4].directory.traceback_file.write_text("Traceback")
    lock = RunLock(trials[2].directory.path)
    assert lock.acquire()
    lines = said("mine")
    assert lines[0] == "mine: 6 runs: 2 done (1 stable, 1 diverged), 1 running, 1 stalled, 1 failed, 1 queued"
    assert re.fullmatch(r"(about )?\d+ s( to \d+ s)? left", lines[1])
    assert lines[2:4] == [
        "best val NLL so far: sa 2.500 at lr=0.01",
        "α_max measured: 1 of 2 runs with a verdict (1 diverged: nothing to measure)",
    ]
    row = next(line for line in lines if line.startswith("sa "))
    assert row.split() == ["sa", "0.01", "2", "12/16", "0.417", "512", "2", "s", "training", "on", str(lock.owner())]
    text = "\n".join(lines)
    assert "stalled: their status says running, but no process works on them" in text
    assert f"  sc lr=0.01 seed=3 ({trials[3].run_id}) at 12/16" in lines
    assert (
        f"  sa lr=0.01 seed=4 ({trials[4].run_id}): ValueError: planted\n    traceback: "
        f"{trials[4].directory.traceback_file}" in text
    )
    assert "goes on with" not in text
    lock.release()
    lines = said("name=mine")
    assert "2 stalled" in lines[0] and lines[1] == "nobody works on it"
    assert lines[-1] == "goes on with: python -m stability.sweep name=mine"


def test_a_run_whose_owner_was_killed_is_stalled_and_nothing_of_it_counts_as_running(pool):
    (trial,) = make_study(pool, count=1)
    started(trial)
    code = (
        "import sys; from stability.runs.lock import RunLock; assert RunLock(sys.argv[1]).acquire(); print('held', "
        "flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, trial.directory.path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    view = StudyView.of(StudyFolder.of(pool, "mine"))
    view.progress.poll()
    (row,) = view.progress.rows
    assert row.running and row.owner.endswith(f":{owner.pid}") and view.is_worked_on
    owner.kill()
    owner.wait()
    view.progress.poll()
    assert (row.state, row.owner, view.is_worked_on, view.is_over) == (STALLED, "", False, False)


def test_a_run_that_ctrl_c_left_is_interrupted_at_its_saved_step_and_no_longer_once_somebody_takes_it_up(pool, said):
    trials = make_study(pool, count=2)
    trials[0].directory.set_status("interrupted", step=5, num_steps=8)
    lines = said("mine")
    assert (
        lines[0] == "mine: 2 runs: 0 done, 0 running, 1 interrupted, 0 failed, 1 queued"
        and lines[1] == "nobody works on it"
    )
    where = lines.index("interrupted: saved; the same command goes on from there")
    assert lines[where + 1] == f"  sa lr=0.01 seed=0 ({trials[0].run_id}) at 5/8"
    assert lines[-1] == "goes on with: python -m stability.sweep name=mine"
    lock = RunLock(trials[0].directory.path)
    assert lock.acquire()
    assert said("mine")[0] == "mine: 2 runs: 0 done, 1 running, 0 failed, 1 queued"
    lock.release()


def test_a_trained_run_is_running_while_its_curvature_is_measured_and_has_its_verdict_when_nobody_does(pool):
    (trial,) = make_study(pool, count=1)
    fakes.finish(trial.directory, "stable", step=8, val_nll=2.5)
    view = StudyView.of(StudyFolder.of(pool, "mine"))
    lock = RunLock(trial.directory.path)
    assert lock.acquire()
    view.progress.poll()
    (row,) = view.progress.rows
    assert (row.state, row.phase) == ("running", "curvature")
    lock.release()
    view.progress.poll()
    assert (row.state, row.val_nll) == ("stable", 2.5)


def test_the_empty_tables_of_runs_that_diverged_are_no_measurements(pool, said):
    """Of three that diverged one left an earliest checkpoint, which was asked for and is measured; its terminal table
    is empty like the others'."""
    trials = make_study(pool, count=4)
    StudyFolder.of(pool, "mine").write(
        [trial.run_id for trial in trials], spec=ASKED | {"curvature": ASKED["curvature"] | {"phase": "all"}}
    )
    for trial in trials:
        measured(trial)
        write_parquet(fakes_frame(), trial.directory.curvature_file("earliest"), {})
    for trial in trials[1:]:
        trial.directory.set_status("diverged", step=3, num_steps=8)
    (trials[1].directory.path / "checkpoints" / "step_000002").mkdir(parents=True)
    assert "α_max measured: 2 of 4 runs with a verdict (2 diverged: nothing to measure)" in said("mine")


def test_a_run_that_diverged_before_its_end_is_not_waited_for_to_be_sampled(pool):
    """Seen while somebody still holds the run: one that came to its end is at its samples."""
    trials = make_study(pool, count=2)
    StudyFolder.of(pool, "mine").write(
        [trial.run_id for trial in trials], spec={"hessian": False, "generate": {"oracle": "hf:x"}}
    )
    for trial, verdict, step in zip(trials, ("diverged", "stable"), (3, 8), strict=True):
        fakes.finish(trial.directory, verdict, step=step, val_nll=2.5)
        (trial.directory.path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    locks = [RunLock(trial.directory.path) for trial in trials]
    assert all(lock.acquire() for lock in locks)
    view = StudyView.of(StudyFolder.of(pool, "mine"))
    view.progress.poll()
    assert [(row.state, row.phase) for row in view.progress.rows] == [("diverged", ""), ("running", "samples")]
    for lock in locks:
        lock.release()


def test_a_failed_run_that_is_tried_again_is_running(pool):
    (trial,) = make_study(pool, count=1)
    trial.directory.set_status("failed", step=2, reason="planted")
    lock = RunLock(trial.directory.path)
    assert lock.acquire()
    view = StudyView.of(StudyFolder.of(pool, "mine"))
    view.progress.poll()
    assert (view.progress.rows[0].state, view.progress.rows[0].phase) == ("running", "starting")
    lock.release()


def test_the_best_is_the_lowest_median_over_seeds_and_a_diverged_seed_counts(pool):
    trials = make_study(pool, count=8)
    for trial, nll in zip(trials[::2], (3.0, 2.0, 2.4, 2.5), strict=True):  # sa; its third and fourth at another rate
        if trial.spec["seed"] >= 4:
            trial.spec["lr_peak"] = 0.1
        fakes.finish(trial.directory, "stable", step=8, val_nll=nll)
    fakes.finish(trials[1].directory, "diverged", step=8, val_nll=None)
    trial_progress = StudyView.of(StudyFolder.of(pool, "mine")).progress
    for row, trial in zip(trial_progress.rows, trials, strict=True):
        row.trial = replace(row.trial, spec=trial.spec)
    trial_progress.poll()
    assert trial_progress.best() == {"sa": (2.45, 0.1, 2)}


def test_all_studies_have_a_line_each_and_a_damaged_one_hides_none(pool, said):
    make_study(pool, "first", count=2)
    make_study(pool, "second", count=1, first=5)
    shutil.copytree(pool / "studies" / "first", pool / "studies" / "broken")
    (pool / "studies" / "broken" / "study.json").write_text("{")
    lines = said()
    assert [line.partition(":")[0] for line in lines] == ["broken", "first", "second"]
    assert "study.json is damaged" in lines[0]
    assert lines[1] == "first: 2 runs: 0 done, 0 running, 0 failed, 2 queued; nobody works on it"


def test_runs_whose_spec_is_gone_are_named(pool, said):
    trials = make_study(pool, count=2)
    shutil.rmtree(trials[0].directory.path)
    assert said("mine")[:2] == [
        "mine: 1 run: 0 done, 0 running, 0 failed, 1 queued",
        f"nobody works on it; 1 run without a readable spec.json ({trials[0].run_id})",
    ]


def test_a_watch_in_a_file_tells_what_happens_and_ends_with_the_sweep(pool, said, monkeypatch):
    trials = make_study(pool, count=3)
    measured(trials[0])
    moves = iter([lambda: started(trials[1]), lambda: measured(trials[1]), lambda: measured(trials[2])])
    locks = [RunLock(trial.directory.path) for trial in trials[1:]]
    assert all(lock.acquire() for lock in locks)
    monkeypatch.setattr(time, "sleep", lambda _: next(moves)())
    lines = said("mine", "watch=true")
    for lock in locks:
        lock.release()
    told = [re.sub(r" in [\d.]+ s", "", line) for line in lines if line.startswith(("start", "stable"))]
    assert told == [
        f"stable sc lr=0.01 seed=1 ({trials[1].run_id}) val NLL 2.400 [2/3]",
        f"stable sa lr=0.01 seed=2 ({trials[2].run_id}) val NLL 2.300 [3/3]",
    ]
    assert "mine: 3 runs: 3 done (3 stable), 0 running, 0 failed, 0 queued" in lines


def test_a_watch_ends_when_nobody_works_on_the_study(pool, said, monkeypatch):
    make_study(pool, count=1)
    monkeypatch.setattr(status, "IDLE_S", 0.02)
    assert said("mine", "watch=0.01")[-3] == "nobody works on it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mien"], "no study 'mien' in"),
        (["mien"], "did you mean 'mine'?"),
        (["watch=true"], "watch needs a study; add name=…"),
        (["mine", "watch=-1"], "watch=-1"),
        (["clean=unlisted", "name=mine"], "leave name out"),
        (["yes=true"], "yes=true needs clean=unlisted or delete=…"),
        (["clean=all"], "clean=all: must be unlisted"),
        (["delete=mien"], "no study or run of that name in"),
        (["delete=mien"], "did you mean 'mine'?"),
        (["delete=../studies/mine"], "no study or run of that name"),
        (["delete=ffffffffffff"], "no run of that id in"),
        (["delete=mine", "clean=unlisted"], "does not go together with name or clean"),
        (["delete=mine"], "there is no terminal to ask on; delete=mine yes=true removes this without asking"),
        (["mine", "nam=x"], "nam: unknown key; did you mean 'name'?"),
    ],
)
def test_what_it_cannot_do_is_said_in_two_lines_at_most(pool, words, message):
    make_study(pool, count=1)
    with pytest.raises(ValueError) as error:
        status.main([*words, f"runs_dir={pool}"])
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


def test_clean_removes_unlisted_runs_and_leftovers_and_nothing_else(pool, said, tmp_path):
    listed = make_study(pool, count=2)
    unlisted = [fakes.make_trial(pool, index) for index in (10, 11, 12, 13)]
    for trial in unlisted:
        trial.directory.write_spec(trial.spec | LABEL)
        trial.directory.set_status("stable", step=3)
    held = RunLock(unlisted[1].directory.path)
    assert held.acquire()
    unlisted[2].directory.spec_file.unlink()  # 12 hex digits, but no run
    (pool / "cache").mkdir()
    (pool / "0123456789abcdef").mkdir()
    outside = tmp_path / "outside"
    shutil.move(unlisted[3].directory.path, outside)
    unlisted[3].directory.path.symlink_to(outside)
    dead, alive = (
        listed[0].directory.path / TEMPORARY_OF_THE_DEAD,
        name_temporary(pool / "studies" / "mine" / "study.json"),
    )
    for path in (dead, alive):
        path.write_text("half")
    before = {path.name for path in pool.iterdir()}
    lines = said("clean=unlisted", "yes=true")
    assert [line.split()[0] for line in lines[:-2]] == [unlisted[0].run_id, unlisted[1].run_id]
    assert re.fullmatch(rf"{unlisted[0].run_id}  stable +0\.0 MB  sa lr=0\.01 seed=10", lines[0])
    assert lines[1].endswith(f"stays: {held.owner()} works on it")
    assert lines[-2:] == [f"{listed[0].run_id}/{TEMPORARY_OF_THE_DEAD}  left half-written", "removed 1 run, 1 leftover"]
    held.release()
    assert {path.name for path in pool.iterdir()} == before - {unlisted[0].run_id}
    assert not dead.exists() and alive.exists() and (outside / "status.json").exists()


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_clean_of_a_pool_that_is_not_there_names_runs_dir(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^runs_dir: there is no folder {tmp_path / name}, so nothing to clean"):
        status.main(["clean=unlisted", f"runs_dir={tmp_path / name}"])


def test_clean_refuses_where_a_study_cannot_be_read(pool):
    make_study(pool, count=1)
    (trial,) = make_study(pool, "other", count=1, first=7)
    record = StudyFolder.of(pool, "other").file
    for damage in ("{", "{}", '{"run_ids": "x"}'):
        record.write_text(damage)
        with pytest.raises(ValueError, match=re.escape(str(record))):
            status.main(["clean=unlisted", "yes=true", f"runs_dir={pool}"])
    record.unlink()
    with pytest.raises(ValueError, match="has no study.json"):
        status.main(["clean=unlisted", "yes=true", f"runs_dir={pool}"])
    assert trial.directory.spec_file.exists()


def test_a_run_that_a_study_lists_by_the_time_of_the_answer_stays(pool):
    make_study(pool, count=1)
    trial = fakes.make_trial(pool, 9)
    trial.directory.write_spec(trial.spec | LABEL)
    (found,) = cleaning.unlisted_runs(pool)
    StudyFolder.of(pool, "late").write([trial.run_id])
    assert not cleaning.remove_run(found.directory)
    assert trial.directory.spec_file.exists()


def test_delete_removes_a_study_and_the_runs_that_no_other_lists(pool, said):
    mine = make_study(pool, count=3)
    other = make_study(pool, "other", count=2, first=2)
    lines = said("delete=mine", "yes=true")
    assert [line.split()[0] for line in lines[:3]] == [mine[0].run_id, mine[1].run_id, other[0].run_id]
    assert lines[2:] == [f"{other[0].run_id}  stays: other lists it, too", "removed the study mine, 2 runs"]
    assert {path.name for path in pool.iterdir()} == {"studies", *(trial.run_id for trial in other)}
    assert [path.name for path in (pool / "studies").iterdir()] == ["other"]


def test_delete_of_a_run_takes_it_off_its_study_and_is_refused_where_several_list_it(pool, said):
    first, second, shared = make_study(
        pool, count=3, earlier=[{"command": "x", "run_ids": ["0" * 11 + "1"], "reported": True}]
    )
    make_study(pool, "other", count=1, first=2)
    with pytest.raises(
        ValueError, match=f"^{shared.run_id} stays: the studies mine, other list it; delete the studies"
    ):
        status.main([f"delete={shared.run_id}", "yes=true", f"runs_dir={pool}"])
    for gone in (first, second):
        assert said(f"delete={gone.run_id}", "yes=true")[1:] == ["removed 1 run"]
    record = StudyFolder.of(pool, "mine").read()
    assert record["run_ids"] == [shared.run_id] and "earlier" not in record and record["spec"] == ASKED
    assert not first.directory.path.exists() and shared.directory.spec_file.exists()


@pytest.mark.parametrize("run_id", ["9e3951321204", "123456789012"])
def test_a_run_id_that_reads_as_a_number_is_a_run_id(pool, run_id):
    make_study(pool, count=1)
    with pytest.raises(ValueError, match=f"^delete={run_id}: no run of that id in "):
        status.main([f"delete={run_id}", f"runs_dir={pool}"])


def test_nothing_is_deleted_that_a_process_works_on_or_while_another_study_is_damaged(pool):
    trials = make_study(pool, count=2)
    held = RunLock(trials[1].directory.path)
    assert held.acquire()
    for name in ("mine", trials[1].run_id):
        with pytest.raises(ValueError, match=f"^{held.owner()} works on {trials[1].run_id} .* stop that sweep first"):
            status.main([f"delete={name}", "yes=true", f"runs_dir={pool}"])
    held.release()
    make_study(pool, "other", count=1, first=7)
    StudyFolder.of(pool, "other").file.write_text("{")
    with pytest.raises(ValueError, match=r"other/study\.json"):
        status.main(["delete=mine", "yes=true", f"runs_dir={pool}"])
    assert all(trial.directory.spec_file.exists() for trial in trials) and StudyFolder.of(pool, "mine").file.exists()


def test_a_study_that_was_half_removed_is_no_study_and_is_cleaned(pool, said):
    make_study(pool, count=1)
    (trial,) = make_study(pool, "other", count=1, first=7)
    half = pool / "studies" / re.sub(r"-\d+\.tmp$", "-99999999.tmp", name_temporary(pool / "studies" / "other").name)
    (pool / "studies" / "other").rename(half)
    assert [study.path.name for study in StudyFolder.list_studies(pool)] == ["mine"]
    assert said("clean=unlisted", "yes=true")[-1] == "removed 1 run, 1 leftover"
    assert not half.exists() and not trial.directory.path.exists()


def test_without_a_terminal_clean_asks_nobody_and_removes_nothing(pool):
    make_study(pool, count=1)
    trial = fakes.make_trial(pool, 9)
    trial.directory.write_spec(trial.spec | LABEL)
    words = [sys.executable, "-m", "stability.status", "clean=unlisted", f"runs_dir={pool}"]
    out = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (out.returncode, len(out.stderr.splitlines())) == (2, 1)
    assert "clean=unlisted yes=true removes these" in out.stderr
    assert trial.directory.spec_file.exists()
    for answer, stays in (("n\n", True), ("\n", True), ("y\n", False)):
        ours, theirs = pty.openpty()
        os.write(ours, answer.encode())
        asked = subprocess.run(words, cwd=ROOT, stdin=theirs, capture_output=True, text=True)
        os.close(ours)
        os.close(theirs)
        assert asked.returncode == 0 and "remove 1 run that no study lists" in asked.stdout, asked
        assert trial.directory.spec_file.exists() == stays
