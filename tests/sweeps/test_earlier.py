"""Runs of earlier commands under a study's name: kept and told, reported where they are runs of the study still."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stability import status, sweep
from stability.config.identity import drop_excluded
from stability.config.run import RunSpec
from stability.runs.cleaning import list_run_ids, unlisted_runs
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from sweeps.earlier import describe_changes, describe_refusal, find_difference
from sweeps.record import StudyRecord
from sweeps.view.study_view import StudyView
from tests.sweeps import fakes
from tests.sweeps.real import make_sweep

PARTS = {"mechanism": {"name": "sa"}, "lr_peak": 1e-3}


def trials_of(pool, *given):
    """Trials with their specs on disk, one of each dict of changes."""
    found = []
    for changes in given:
        trial = fakes.make_trial(pool, int(changes.pop("id")), **changes)
        trial.directory.path.mkdir(parents=True, exist_ok=True)
        trial.directory.spec_file.write_text(json.dumps(trial.spec))
        found.append(trial)
    return found


@pytest.fixture
def pool(tmp_path):
    return make_sweep(tmp_path)[0]


def launched(sweep_spec, trials, command, found=None, **origin):
    """What a launch of a command prints of earlier runs, and the record that it leaves."""
    study = StudyFolder.of(sweep_spec.runs_dir, sweep_spec.name)
    before = study.read() if study.file.exists() else {}
    said = list(describe_changes(study, before, trials, replace=sweep_spec.replace))
    StudyRecord(study, sweep_spec, before, {"command": command, "provenance": {}, **origin}, 0.0).write(trials, found)
    return said, study.read()


def test_another_mechanism_under_the_name_joins_the_study_and_a_line_says_so(pool):
    first = trials_of(pool.runs_dir, *({"id": index, "lr_peak": 10.0**-index} for index in (1, 2, 3)))
    second = trials_of(pool.runs_dir, {"id": 4, "mechanism": {"name": "sw"}})
    assert launched(pool, first, "sweep one") == ([], StudyFolder.of(pool.runs_dir, pool.name).read())
    said, record = launched(pool, second, "sweep two")
    assert record["run_ids"] == [trial.run_id for trial in (*second, *first)]
    assert record["earlier"] == [
        {"command": "sweep one", "run_ids": [trial.run_id for trial in first], "reported": True}
    ]
    assert said == [
        f"{pool.name}: keeps 3 earlier runs that this command does not ask for (sa lr=0.1 seed=1, sa lr=0.01 seed=2, "
        "…), in its report, too; name=OTHER makes a study of its own"
    ]
    assert launched(pool, second, "sweep two") == ([], record), "again the same: nothing new to say"


def test_a_line_on_newly_kept_runs_counts_all_that_are_kept(pool):
    first = trials_of(pool.runs_dir, *({"id": index, "lr_peak": 10.0**-index} for index in (1, 2, 3)))
    second, third = trials_of(pool.runs_dir, {"id": 4, "mechanism": {"name": "sw"}}, {"id": 5, "lr_peak": 1.0})
    launched(pool, first, "one")
    launched(pool, [second], "two")
    said, record = launched(pool, [third], "three")
    assert [len(each["run_ids"]) for each in record["earlier"]] == [3, 1]
    assert said == [
        f"{pool.name}: keeps 4 earlier runs that this command does not ask for (1 more than before: sw lr=0.01 seed=4), "
        "in its report, too; name=OTHER makes a study of its own"
    ]


def test_a_study_that_is_extended_has_no_earlier_runs(pool):
    trials = trials_of(pool.runs_dir, *({"id": index} for index in range(3)))
    launched(pool, trials[:2], "one")
    said, record = launched(pool, trials, "two")
    assert not said and "earlier" not in record and len(record["run_ids"]) == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": 8}, "steps: 4, now 8"),
        ({"mechanism": {"name": "sa", "window": 3}}, "mechanism.sa.window: not set, now 3"),
        (
            {"mechanism": {"name": "sa", "pattern": ["x" * 50]}},
            'mechanism.sa.pattern: not set, now ["' + "x" * 38 + "…",
        ),
        ({"model": {"name": "nano", "width": 8}}, "model.width: not set, now 8"),
        ({"data_fingerprint": "0123456789abcdef"}, "data_fingerprint: not set, now 0123456789ab"),
    ],
)
def test_runs_that_would_pass_for_other_seeds_are_kept_outside_of_the_report(pool, changes, why):
    first, second = trials_of(pool.runs_dir, {"id": 1}, {"id": 2, **changes})
    launched(pool, [first], "one")
    said, record = launched(pool, [second], "two")
    assert record["run_ids"] == [second.run_id]
    assert record["earlier"] == [{"command": "one", "run_ids": [first.run_id], "reported": False}]
    assert said == [
        f"{pool.name}: keeps 1 earlier run of other settings (sa lr=0.01 seed=1: another {why}) on record, outside of "
        "its report; name=OTHER makes a study of its own"
    ]
    assert list_run_ids(StudyFolder.of(pool.runs_dir, pool.name).pool) == {first.run_id, second.run_id}
    _, record = launched(pool, [first], "one")
    assert record["run_ids"] == [first.run_id] and record["earlier"][0]["run_ids"] == [second.run_id]


def test_runs_of_other_settings_are_a_reason_to_ask_and_runs_of_other_axes_are_none(pool):
    first, second, third = trials_of(pool.runs_dir, {"id": 1}, {"id": 2, "steps": 8}, {"id": 3, "lr_peak": 1.0})
    _, record = launched(pool, [first], "one")
    study = StudyFolder.of(pool.runs_dir, pool.name)
    assert describe_refusal(study, record, [second]) == (
        f"name={pool.name}: 1 run has other settings there (sa lr=0.01 seed=1: another steps: 4, now 8) and would leave "
        "its report; name=OTHER makes a study of its own, replace=true reports this command's runs alone (the others stay "
        "on record)"
    )
    assert describe_refusal(study, record, [third]) == describe_refusal(study, record, [first]) == ""
    _, record = launched(pool, [second], "two")
    assert describe_refusal(study, record, [second]) == "", "asked once"


def test_a_sweep_under_the_name_of_another_asks_and_leaves_everything_as_it_was(lab, capsys):
    words = f"""
        data=text data.path={lab.text} runs_dir={lab.pool} report=false launcher=serial device=cpu objective=mlm
        model.layers=1 model.width=16 model.heads=2 model.positions=16 batch=2 evaluation.every_steps=2
        evaluation.sequences=4 seeds=1 hessian=false name=a lr=1e-3 mechanism=sa
    """.split()
    assert sweep.main([*words, "steps=2"]) == 0
    before = {path: path.read_bytes() for path in lab.pool.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"^name=a: 1 run has other settings .* another steps: 2, now 4\)"):
        sweep.main([*words, "steps=4"])
    assert {path: path.read_bytes() for path in lab.pool.rglob("*") if path.is_file()} == before
    capsys.readouterr()
    assert sweep.main([*words, "steps=4", "dry_run=true"]) == 0
    assert "replace=true reports this command's runs alone (the others stay on record)" in capsys.readouterr().out
    assert sweep.main([*words, "steps=4", "replace=true"]) == 0
    record = StudyFolder.of(lab.pool, "a").read()
    assert len(record["run_ids"]) == 1 and [each["reported"] for each in record["earlier"]] == [False]
    out = "".join(capsys.readouterr())
    nothing = "replace=true: nothing is replaced, a has no other runs in its report"
    assert nothing not in out
    assert "a: replace=true takes 1 earlier run (sa lr=0.001 seed=0) out of its report; on record it stays" in out
    assert sweep.main([*words, "steps=4", "replace=true"]) == 0
    assert nothing in "".join(capsys.readouterr()).splitlines()
    assert sweep.main([*words, "steps=4"]) == 0, "the question is answered"


def test_replace_takes_queued_runs_of_other_axes_out_of_the_report_too(pool):
    """A preset's mechanism that was queued and never trained stood in every later report of the name."""
    trained, queued, old = trials_of(
        pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}}, {"id": 3, "steps": 9}
    )
    launched(pool, [old], "zero")
    launched(pool, [trained, queued], "one")
    replacing = pool.model_copy(update={"replace": True})
    said, record = launched(replacing, [trained], "two")
    assert record["run_ids"] == [trained.run_id]
    assert {run_id: each["reported"] for each in record["earlier"] for run_id in each["run_ids"]} == {
        old.run_id: False,
        queued.run_id: False,
    }
    assert said == [
        f"{pool.name}: replace=true takes 1 earlier run (sw lr=0.01 seed=2) out of its report; on record it stays"
    ]
    said, record = launched(replacing, [trained], "two")
    assert said == [f"replace=true: nothing is replaced, {pool.name} has no other runs in its report"]
    assert record["run_ids"] == [trained.run_id] and len(record["earlier"]) == 2
    said, record = launched(pool, [trained], "two")
    assert said == [] and record["run_ids"] == [trained.run_id], "out of the report until asked for again"
    assert launched(pool, [queued], "three")[1]["run_ids"] == [queued.run_id, trained.run_id]


def test_replace_leaves_runs_that_another_launch_added_meanwhile(pool):
    first, second, third = trials_of(
        pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}}, {"id": 3, "mechanism": {"name": "mix"}}
    )
    _, before = launched(pool, [third], "zero")
    study = StudyFolder.of(pool.runs_dir, pool.name)
    replacing = pool.model_copy(update={"replace": True})
    record = StudyRecord(study, replacing, before, {"command": "one", "provenance": {}}, 0.0)
    record.write([first])
    launched(pool, [second], "two")
    record.close([first], None, has_worked=True)
    assert study.read()["run_ids"] == [first.run_id, second.run_id]


def test_both_values_of_a_setting_that_the_id_leaves_out_at_its_neutral_value_are_named(pool):
    """A whole spec: mechanism.sa.temperature is a younger setting, and fixed does not enter the id."""
    _, (real, *_) = make_sweep(Path(pool.runs_dir).parent)
    assert real.spec["mechanism"]["temperature"] == "fixed"
    assert "temperature" not in drop_excluded(real.spec, RunSpec)["mechanism"]
    changes = {key: value for key, value in real.spec.items() if key not in ("seed", "lr_peak")}
    first, second, third = trials_of(
        pool.runs_dir,
        {"id": 1, **changes},
        {"id": 2, **changes, "mechanism": {**changes["mechanism"], "temperature": "learned"}},
        {"id": 3, **changes, "steps": 40},
    )
    assert find_difference(first.directory, [second]) == "mechanism.sa.temperature: fixed, now learned"
    assert find_difference(second.directory, [first]) == "mechanism.sa.temperature: learned, now fixed"
    assert find_difference(first.directory, [third]) == f"steps: {changes['steps']}, now 40"


def test_what_is_said_of_an_earlier_run_stays_with_it(pool):
    first, second = trials_of(pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}})
    launched(pool, [first], "one", {"stopped": {first.run_id: "at rung 1"}}, variants={first.run_id: "window=4"})
    _, record = launched(pool, [second], "two", {"stopped": {second.run_id: "at rung 2"}})
    assert record["stopped"] == {first.run_id: "at rung 1", second.run_id: "at rung 2"}
    assert record["variants"] == {first.run_id: "window=4"}


def test_a_run_that_is_gone_is_named_once_and_goes_from_the_record(pool):
    *first, kept = trials_of(pool.runs_dir, *({"id": index} for index in range(1, 5)))
    second, third = trials_of(pool.runs_dir, {"id": 5, "mechanism": {"name": "sw"}}, {"id": 6, "steps": 9})
    launched(pool, [third], "zero")
    launched(pool, [*first, kept], "one")
    for trial in first:
        shutil.rmtree(trial.directory.path)
    said, record = launched(pool, [second], "two")
    gone = f"{first[0].run_id}, {first[1].run_id}, …"
    assert said[1:] == [f"{pool.name}: 3 earlier runs are no longer in the pool and go from the record ({gone})"]
    assert record["run_ids"] == [second.run_id, kept.run_id]
    assert launched(pool, [second], "two") == ([], record)
    third.directory.spec_file.unlink()  # of those outside of the report
    assert launched(pool, [second], "two") == ([], record), "its checkpoints are still there"
    shutil.rmtree(third.directory.path)
    said, _ = launched(pool, [second], "two")
    assert said == [f"{pool.name}: 1 earlier run is no longer in the pool and goes from the record ({third.run_id})"]


def test_a_run_that_is_gone_and_asked_for_again_is_trained_without_a_word(pool):
    (only,) = trials_of(pool.runs_dir, {"id": 1})
    launched(pool, [only], "one")
    shutil.rmtree(only.directory.path)
    assert launched(pool, [only], "one")[0] == []


def test_another_launch_that_wrote_meanwhile_loses_nothing(pool):
    first, second = trials_of(pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}})
    study = StudyFolder.of(pool.runs_dir, pool.name)
    one, two = (StudyRecord(study, pool, {}, {"command": name, "provenance": {}}, 0.0) for name in ("one", "two"))
    one.write([first])
    two.write([second])
    one.close([first], None, has_worked=True)
    assert study.read()["run_ids"] == [first.run_id, second.run_id]


def test_the_time_of_a_command_adds_up_beside_earlier_runs(pool):
    first, second = trials_of(pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}})
    launched(pool, [first], "one")
    launched(pool, [second], "two")
    study = StudyFolder.of(pool.runs_dir, pool.name)
    for _ in range(2):
        StudyRecord(study, pool, study.read(), {"command": "two", "provenance": {}}, 0.0).close(
            [second], None, has_worked=True
        )
    assert study.read()["provenance"]["wall_s"] > 2e9, "two launches since 1970"


@pytest.mark.parametrize("damage", ["{", '{"mechanism": {}, "lr_peak": 1, "seed": 0}'])
def test_an_earlier_run_whose_spec_is_damaged_stays_in_the_study(pool, damage):
    (first,) = trials_of(pool.runs_dir, {"id": 1})
    second = trials_of(pool.runs_dir, {"id": 2, "mechanism": {"name": "sw"}})
    launched(pool, [first], "one")
    first.directory.spec_file.write_text(damage)
    _, record = launched(pool, second, "two")
    assert record["earlier"] == [{"command": "one", "run_ids": [first.run_id], "reported": True}]
    assert first.run_id in record["run_ids"]


@pytest.mark.parametrize("value", [{}, [3], [{"command": "x", "run_ids": [1], "reported": True}], [{"run_ids": []}]])
def test_a_damaged_list_of_earlier_runs_is_named(pool, value):
    study = StudyFolder.of(pool.runs_dir, pool.name)
    study.write([], earlier=value)
    with pytest.raises(ValueError, match=r"study\.json .*earlier"):
        study.read()


def test_status_asks_nothing_of_earlier_runs_and_names_the_command_of_each(pool):
    first, second, third = trials_of(
        pool.runs_dir, {"id": 1}, {"id": 2, "mechanism": {"name": "sw"}}, {"id": 3, "steps": 9}
    )
    asks = {"hessian": True, "curvature": {"measure": ["alpha_max"], "phase": "terminal"}}
    launched(pool, [third], "zero")
    launched(pool, [first], "one")
    launched(pool, [second], "two", spec=asks)
    view = StudyView.of(StudyFolder.of(pool.runs_dir, pool.name))
    asked = {row.trial.run_id: row.trial.curvature for row in view.progress.rows}
    assert asked[first.run_id] is None and asked[second.run_id] is not None and third.run_id not in asked
    assert view.details()[-2:] == ["goes on with: two", "goes on with: one"]
    assert view.heading()[-1] == "on record outside of its report: 1 run of earlier commands"


def test_a_damaged_record_is_written_again_by_the_commands_of_its_study_without_training(lab, capsys):
    words = f"""
        data=text data.path={lab.text} runs_dir={lab.pool} report=false launcher=serial device=cpu
        model.layers=1 model.width=16 model.heads=2 model.positions=16 steps=2 batch=2 evaluation.every_steps=2
        evaluation.sequences=4 seeds=1 hessian=false name=a lr=1e-3
    """.split()
    commands = [[*words, "mechanism=sa"], [*words, "mechanism=sw"]]
    for command in commands:
        assert sweep.main(command) == 0
    study = StudyFolder.of(lab.pool, "a")
    before = study.run_ids_on_record()
    study.file.write_bytes(study.file.read_bytes()[:-30])
    with pytest.raises(
        ValueError, match=r"study\.json is damaged \(.*\); move it away and repeat the study's commands, "
    ):
        sweep.main(commands[1])
    with pytest.raises(
        ValueError, match="train none of them anew.\nNothing is removed before that: runs that no study"
    ):
        unlisted_runs(lab.pool)
    study.file.rename(lab.pool / "away.json")
    capsys.readouterr()
    for command in commands:
        assert sweep.main(command) == 0
        assert "skips 1 finished run, trains none" in capsys.readouterr().out
    assert study.run_ids_on_record() == before and unlisted_runs(lab.pool) == []


def test_two_questions_under_one_name_are_one_study(lab, capsys):
    """The newcomer's case: the second command replaced the first's runs, which clean=unlisted then offered."""
    words = f"""
        data=text data.path={lab.text} runs_dir={lab.pool} report=false launcher=serial device=cpu
        model.layers=1 model.width=16 model.heads=2 model.positions=16 steps=2 batch=2 evaluation.every_steps=2
        evaluation.sequences=4 seeds=1 hessian=false name=a
    """.split()
    assert sweep.main([*words, "mechanism=sa", "lr=[1e-3,1e-2]"]) == 0
    assert "earlier" not in capsys.readouterr().out
    assert sweep.main([*words, "mechanism=sw", "lr=1e-3", "dry_run=true"]) == 0
    assert "a: keeps 2 earlier runs" in capsys.readouterr().out
    assert sweep.main([*words, "mechanism=sw", "lr=1e-3"]) == 0
    assert "a: keeps 2 earlier runs that this command does not ask for (sa lr=0.001 seed=0, " in capsys.readouterr().out
    runs = collect(lab.pool / "studies" / "a").runs
    assert sorted(runs["mechanism"]) == ["sa", "sa", "sw"]
    assert unlisted_runs(lab.pool) == []
    assert status.main(["a", f"runs_dir={lab.pool}"]) == 0
    assert "a: 3 runs" in capsys.readouterr().out
    assert sweep.main([*words, "mechanism=sw", "lr=1e-3"]) == 0
    out = capsys.readouterr().out
    assert "skips 1 finished run" in out and "earlier run" not in out
