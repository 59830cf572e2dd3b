"""When a study's tables and PDF are drawn again."""

from __future__ import annotations

import os

import pytest

from stability.cli.publish import print_report_command
from stability.runs.study import StudyFolder
from stability.runs.up_to_date import Published
from tests.sweeps import fakes


@pytest.fixture
def study(tmp_path):
    trials = [fakes.make_trial(tmp_path / "runs", index) for index in range(2)]
    for trial in trials:
        trial.directory.write_spec(trial.spec | {"data": {}, "model": {}})
        list(fakes.run_fake(trial))
    trials[0].directory.curvature_file("terminal").parent.mkdir()
    trials[0].directory.curvature_file("terminal").write_bytes(b"one")
    folder = StudyFolder.of(tmp_path / "runs", "mine")
    folder.write([trial.run_id for trial in trials])
    folder.results.mkdir()
    (folder.results / "runs.parquet").write_bytes(b"table")
    (tmp_path / "mine.pdf").write_bytes(b"pdf")
    (tmp_path / "code.py").write_text("one = 1\n")
    return folder


def published(study, pdf="mine.pdf", phases=("terminal",)):
    folder = study.pool.parent
    return Published(study, None if pdf is None else folder / pdf, phases, [folder / "code.py"])


def test_what_was_printed_is_said_again_as_long_as_nothing_changes(study):
    assert published(study).summary() is None
    published(study).record("tables\n")
    assert published(study).summary() == "tables\n"


def append(path, data=b"x"):
    with open(path, "ab") as file:
        file.write(data)


CHANGES = {
    "a status": lambda study: study.runs()[1].set_status("failed", step=1),
    "a log": lambda study: append(study.runs()[0].metrics_file),
    "a new log": lambda study: append(study.runs()[0].gradients_file),
    "a table of the same size": lambda study: os.utime(study.runs()[0].curvature_file("terminal"), ns=(1, 1)),
    "a new table": lambda study: append(study.runs()[0].curvature_file("earliest")),
    "samples' scores": lambda study: (
        (study.runs()[1].path / "generation").mkdir() or append(study.runs()[1].generation_file("terminal"))
    ),
    "a run more": lambda study: study.write([*study.read()["run_ids"], "f" * 12]),
    "the study's record": lambda study: study.write(study.read()["run_ids"], command="another"),
    "our code": lambda study: append(study.pool.parent / "code.py", b"two = 2\n"),
    "the results are gone": lambda study: (study.results / "runs.parquet").unlink(),
    "the PDF is gone": lambda study: (study.pool.parent / "mine.pdf").unlink(),
    "the PDF is another": lambda study: append(study.pool.parent / "mine.pdf"),
    "the record of it is damaged": lambda study: (study.path / "published.json").write_text("{"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_makes_it_new(study, what):
    published(study).record("tables\n")
    CHANGES[what](study)
    assert published(study).summary() is None


def test_another_folder_or_other_phases_are_another_publication(study):
    published(study).record("tables\n")
    assert published(study, pdf="elsewhere.pdf").summary() is None
    assert published(study, pdf=None).summary() is None
    assert published(study, phases=("terminal", "earliest")).summary() is None


def test_what_changes_while_it_is_drawn_is_drawn_next_time(study):
    begun = published(study)
    study.runs()[0].set_status("failed", step=1)
    begun.record("tables\n")
    assert published(study).summary() is None


def test_the_command_that_draws_what_was_measured_is_told_as_the_next_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "next, to draw this into the study's PDF: python -m stability.report name=wide"
    print_report_command(StudyFolder.of("runs", "wide"))
    assert capsys.readouterr().out == f"{words}\n"
    print_report_command(StudyFolder.of("elsewhere", "wide"))
    assert capsys.readouterr().out == f"{words} runs_dir={tmp_path / 'elsewhere'}\n"
    print_report_command(StudyFolder.of("my runs", "wide"))
    assert capsys.readouterr().out == f"{words} 'runs_dir={tmp_path / 'my runs'}'\n"
