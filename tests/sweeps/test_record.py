"""What ``study.json`` says of a sweep's launches, one after another."""

import json
import time

import pytest

from stability.corpora.cache import prepare
from stability.runs.directory import RunDirectory
from stability.runs.study import StudyFolder
from sweeps.record import StudyRecord
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep


def record_of(spec, *, ago_s):
    """The record of a launch that began ``ago_s`` seconds ago, on top of what is on disk."""
    study = StudyFolder.of(spec.runs_dir, spec.name)
    before = study.read() if study.file.exists() else {}
    return StudyRecord(study, spec, before, {"launcher": "serial", "provenance": {"by": ago_s}}, time.time() - ago_s)


def seconds(record):
    return record.study.read()["provenance"]["wall_s"]


@pytest.fixture
def closed(tmp_path):
    """The record of a launch of two trials that took 100 s, and the trials."""
    spec, _ = make_sweep(tmp_path)
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    record = record_of(spec, ago_s=100)
    record.close(trials[:2], None, has_worked=True)
    assert 100 <= seconds(record) < 110
    return spec, trials


def test_the_time_of_launches_of_the_same_runs_adds_up(closed):
    spec, trials = closed
    record = record_of(spec, ago_s=20)
    record.close(trials[:2], None, has_worked=True)
    assert 120 <= seconds(record) < 130
    assert record.study.read()["provenance"]["by"] == 20


@pytest.mark.parametrize(("found", "is_longer"), [(None, False), ({"stopped": {}}, True)])
def test_a_search_that_went_on_adds_to_its_time_and_another_grid_does_not(closed, found, is_longer):
    spec, trials = closed
    record = record_of(spec, ago_s=20)
    record.close(trials, found, has_worked=True)
    assert (120 <= seconds(record) < 130) if is_longer else (20 <= seconds(record) < 30)


def test_a_launch_that_found_everything_done_leaves_the_record_of_the_one_that_did_it(closed):
    spec, trials = closed
    record = record_of(spec, ago_s=20)
    record.close(trials[:2], None, has_worked=False)
    assert record.study.read() == record.before | {"name": spec.name}
    assert record.study.read()["provenance"]["by"] == 100


def test_the_runs_asked_for_and_what_a_search_keeps_are_on_record_before_the_end(closed):
    spec, trials = closed
    record = record_of(spec, ago_s=0)
    record.write(trials, {"stopped": {"a": "why"}})
    found = record.study.read()
    assert found["run_ids"] == [trial.run_id for trial in trials]
    assert (found["stopped"], found["launcher"]) == ({"a": "why"}, "serial")
    assert "wall_s" not in found["provenance"]


def test_the_commits_and_processors_of_the_runs_are_on_record_whoever_asks_for_them_later(tmp_path):
    spec, _ = make_sweep(tmp_path)
    trials = [fakes.make_trial(tmp_path, index) for index in range(3)]
    record = record_of(spec, ago_s=100)
    for trial, commit in zip(trials[:2], ("a" * 40, "b" * 40), strict=True):
        directory = RunDirectory(record.study.pool, trial.run_id)
        directory.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"commit": commit, "dirty": None, "hardware": {"cpu": "one"}})
        directory.provenance_file.write_text(text)
    record.close(trials, None, has_worked=True)
    found = record.study.read()["trained_by"]
    assert [(each["commit"], each["cpu"], each["runs"]) for each in found] == [
        ("a" * 40, "one", 1), ("b" * 40, "one", 1), (None, None, 1)
    ]  # fmt: skip


def test_a_primary_claim_is_recorded_with_the_runs_that_had_ended_when_it_was_declared(tmp_path):
    spec, trials = make_sweep(tmp_path, "primary=sc.window")
    corpus = prepare(spec.data, tmp_path / "runs" / "cache")

    def begin(spec=spec, asked=trials[:3]):
        record = StudyRecord.begin(spec, corpus)
        record.write(asked)
        return record.study.read().get("declared")

    assert begin(spec.model_copy(update={"primary": None})) is None, "no claim, no declaration"
    trials[0].directory.set_status("stable", step=12)
    first = begin()
    assert (first["ended"], first["runs"]) == (1, 3), "one run was known before the claim"
    assert first["at"].startswith(time.strftime("%Y-%m-%d"))
    trials[1].directory.set_status("diverged", step=3)
    assert begin() == first, "a resumed sweep declares nothing anew"
    trials[3].directory.set_status("stable", step=12)
    assert begin(asked=trials) == first | {"ended": 2, "runs": 4}, "a run that had ended when it joined was known"
    assert begin(spec.model_copy(update={"primary": "sc.best"}))["ended"] == 3


def test_runs_of_earlier_commands_were_known_when_a_claim_is_declared_after_them(tmp_path):
    spec, trials = make_sweep(tmp_path, "primary=sc.window")
    corpus = prepare(spec.data, tmp_path / "runs" / "cache")
    for trial in trials:
        trial.directory.write_spec(trial.spec)
    StudyRecord.begin(spec.model_copy(update={"primary": None}), corpus).write(trials[:2])
    trials[0].directory.set_status("stable", step=12)
    record = StudyRecord.begin(spec, corpus)
    record.write(trials[2:])
    found = record.study.read()
    assert (found["declared"]["ended"], found["declared"]["runs"], len(found["run_ids"])) == (1, 4, 4)


def test_a_launch_without_work_leaves_the_claim_and_its_declaration(tmp_path):
    spec, trials = make_sweep(tmp_path, "primary=sc.window")
    corpus = prepare(spec.data, tmp_path / "runs" / "cache")
    record = StudyRecord.begin(spec, corpus)
    record.write(trials)
    for trial in trials:
        trial.directory.set_status("stable", step=12)
    record.close(trials, None, has_worked=True)
    first = record.study.read()
    assert (first["declared"]["ended"], first["declared"]["runs"]) == (0, 4)
    again = StudyRecord.begin(spec.model_copy(update={"primary": "sc.best"}), corpus)
    again.write(trials)
    again.close(trials, None, has_worked=False)
    assert record.study.read() == first
