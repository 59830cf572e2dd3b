"""A sweep with all loggers at once: each trial's numbers, its α_max and its verdict reach every one of them, and no run
is another one for it."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis import export
from stability.cli import study_on_wandb
from stability.runs.directory import RunDirectory, read_jsonl
from stability.runs.log import SINKS
from stability.runs.sink import failure_file
from stability.runs.study import StudyFolder
from tests.reading import replaced
from tests.runs.reading_sinks import READERS

SMALL = """
    mechanism=sa seeds=1 steps=2 batch=2 evaluation.every_steps=2 evaluation.sequences=4 report=false lr=1e-3
    model.layers=1 model.width=8 model.heads=2 model.positions=8 device=cpu data=text launcher=serial
    curvature.warmup_batches=1 curvature.warmup_steps=0 curvature.recorded_steps=2 curvature.parity_steps=0
    curvature.state=[checkpoint]
"""


@pytest.fixture
def words(lab, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(lab.pool))  # nobody's credentials and caches
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return [*SMALL.split(), f"runs_dir={lab.pool}", f"data.path={lab.text}"]


def test_all_loggers_at_once_hold_what_the_runs_own_files_hold(entered, lab, words, monkeypatch):
    monkeypatch.setattr(export, "FIGURES", ("png",))  # of the run about the study: other formats are only copies
    for package in ("tensorboard", "mlflow"):
        pytest.importorskip(package, reason=f"{package}, of the extra of that name, is not installed")
    ended = entered("stability.sweep", *replaced(words, "name=my-study", "logger=[files,wandb,tensorboard,mlflow]"))
    assert ended.returncode == 0, ended.stderr
    assert f"W&B: the run about the study: {lab.pool}/studies/my-study/wandb/offline-run-" in ended.stdout
    (run,) = StudyFolder.of(lab.pool, "my-study").runs()
    directory = RunDirectory(lab.pool, run.path.name)
    table = pd.read_parquet(directory.curvature_file("terminal"))
    expected = {("alpha_max/terminal/checkpoint", 2): table["alpha_max"].median()}
    expected[("stable_percent/terminal/checkpoint", 2)] = 100 * (table["alpha_max"] > table["lr"]).mean()
    for row in read_jsonl(directory.metrics_file):
        expected |= {(name, row["step"]): value for name, value in row.items() if name != "step" and value is not None}
    for name in SINKS:
        assert not failure_file(directory, name).exists(), failure_file(directory, name).read_text()
        rows, verdict = READERS[name](directory)
        found = {(tag.replace(".", "/") if name == "mlflow" else tag, step): value for tag, step, value in rows}
        assert {where: found.get(where) for where in expected} == pytest.approx(expected, rel=1e-6), name
        assert verdict == directory.status()["state"]


def test_a_study_that_cannot_be_sent_is_complete_without(capsys, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError("planted\nand more")

    monkeypatch.setattr(study_on_wandb, "send_study", fail)
    study_on_wandb.send_after_sweep(StudyFolder(tmp_path), None, {})
    assert capsys.readouterr().out == "W&B: the run about the study was not sent (OSError: planted)\n"


def test_a_run_is_the_same_one_whatever_it_is_logged_to(entered, lab, words):
    pytest.importorskip("tensorboard", reason="tensorboard, of the extra of that name, is not installed")
    printed = []
    for name in ("files", "tensorboard"):
        ended = entered("stability.sweep", *replaced(words, f"logger={name}", f"name={name}", "hessian=false"))
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout)
    assert "trains 1" in printed[0] and "skips 1 finished run, trains none" in printed[1]


@pytest.mark.parametrize(
    ("logger", "told"),
    [
        ("wandd", "logger='wandd': input should be 'files', 'wandb', 'tensorboard' or 'mlflow'"),
        ("[files,files]", "logger=[files,files] names one twice; give each once"),
        ("[]", "logger=[]: must list at least 1"),
    ],
)
def test_a_logger_that_there_is_not_is_refused_in_a_line(entered, lab, words, logger, told):
    ended = entered("stability.sweep", *replaced(words, f"logger={logger}"))
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert told in ended.stderr
    assert not (lab.pool / "studies").exists()
