"""When a finished command's text is repeated without reading anything else."""

from __future__ import annotations

import os
import shutil

import pytest

from stability.runs import answers
from stability.runs.answers import Answer, AnswerFile, pool_of
from stability.runs.study import StudyFolder
from tests.sweeps import fakes

WORDS = ("study=mine", "runs_dir=runs")


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two runs with a table each, its code, its text and its PDF, in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    trials = [fakes.make_trial(tmp_path / "runs", index) for index in range(2)]
    for trial in trials:
        trial.directory.write_spec(trial.spec | {"data": {}, "model": {}})
        list(fakes.run_fake(trial))
        (trial.directory.path / "curvature").mkdir()
        trial.directory.curvature_file("terminal").write_bytes(b"one")
        (trial.directory.path / "checkpoints" / "step_000001").mkdir(parents=True)
    folder = StudyFolder.of(tmp_path / "runs", "mine")
    folder.write([trial.run_id for trial in trials])
    folder.results.mkdir()
    (folder.results / "runs.parquet").write_bytes(b"table")
    for name in (
        "mine.pdf",
        "texts/one.txt",
        "corpus/train.npy",
        "stability/code.py",
        "conf/study/mine.yaml",
        "analysis/nll.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(name.encode())
    return folder


def answer_of(study):
    top = study.pool.parent
    inputs = (top / "mine.pdf", top / "texts", top / "texts" / "one.txt", top / "not yet there")
    return Answer(str(study.path), (str(top / "corpus"),), tuple(map(str, inputs)), ("a note",), ("tables", "report"))


@pytest.fixture
def file(study):
    file, answer = AnswerFile(pool_of(WORDS), WORDS), answer_of(study)
    file.write(answer, answer.state())
    return file


def rewrite_with_old_time(path):
    """Replace a file's content by another of the same size, and set its time of modification back."""
    found = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


CHANGES = {
    "a run is missing": lambda study: shutil.rmtree(study.runs()[0].path),
    "a run has another spec": lambda study: append(study.runs()[1].spec_file),
    "a run's status is damaged": lambda study: rewrite_with_old_time(study.runs()[1].status_file),
    "a run's log is cut": lambda study: study.runs()[0].metrics_file.write_bytes(b""),
    "a table is damaged": lambda study: rewrite_with_old_time(study.runs()[0].curvature_file("terminal")),
    "a table is missing": lambda study: study.runs()[0].curvature_file("terminal").unlink(),
    "a table is new": lambda study: append(study.runs()[0].curvature_file("earliest")),
    "a run is at work": lambda study: append(study.runs()[0].path / ".lock-1.json"),
    "a checkpoint is gone": lambda study: (study.runs()[0].path / "checkpoints" / "step_000001").rmdir(),
    "the study lists another run": lambda study: study.write([*study.read()["run_ids"], "f" * 12]),
    "the study lists an earlier run": lambda study: study.write(
        study.read()["run_ids"], earlier=[{"command": "", "run_ids": ["f" * 12], "reported": False}]
    ),
    "the study is gone": lambda study: study.file.unlink(),
    "results are another": lambda study: append(study.results / "runs.parquet"),
    "the PDF is gone": lambda study: (study.pool.parent / "mine.pdf").unlink(),
    "the text is another": lambda study: rewrite_with_old_time(study.pool.parent / "texts" / "one.txt"),
    "the data have another file": lambda study: append(study.pool.parent / "texts" / "two.txt"),
    "data appear": lambda study: append(study.pool.parent / "not yet there"),
    "the prepared data are damaged": lambda study: rewrite_with_old_time(study.pool.parent / "corpus" / "train.npy"),
    "the code is another": lambda study: append(study.pool.parent / "stability" / "code.py"),
    "a published number is another": lambda study: append(study.pool.parent / "analysis" / "nll.csv"),
    "a preset is another": lambda study: append(study.pool.parent / "conf" / "study" / "mine.yaml"),
}


def test_an_answer_is_read_as_it_was_written_while_nothing_changes(study, file):
    assert file.read() == answer_of(study)
    study.write(study.read()["run_ids"])
    assert file.read() == answer_of(study), "the record is the same, written anew"


@pytest.mark.parametrize("what", CHANGES)
def test_no_answer_is_left_after_a_change(study, file, what):
    CHANGES[what](study)
    assert file.read() is None


def test_other_words_another_folder_and_other_devices_have_no_answer(study, file, tmp_path, monkeypatch):
    assert AnswerFile(study.pool, (*WORDS, "seeds=2")).read() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert file.read() is not None, "set by the command itself, as packages do"
    with monkeypatch.context() as patch:
        patch.setitem(answers.ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "7")
        assert file.read() is None
    monkeypatch.chdir(study.path)
    assert AnswerFile(study.pool, WORDS).read() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"answer": {"study": 1}}', b"\xff\xfe"])
def test_a_damaged_answer_is_none(file, content):
    file.file.write_bytes(content)
    assert file.read() is None


def test_the_pool_of_a_command_is_the_last_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pool_of(["study=mine"]) == tmp_path / "runs"
    assert pool_of(["runs_dir=one", "runs_dir='two'"]) == tmp_path / "two"
