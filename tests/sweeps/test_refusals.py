"""A sweep that its launcher cannot run leaves the runs' folder and the study's record byte for byte as they were."""

from __future__ import annotations

import sys

import pytest

from stability import sweep
from stability.runs.study import StudyFolder
from stability.training import machine
from sweeps.launchers.slurm import launcher as slurm_launcher
from sweeps.trial import run_trial

SMALL = """
    mechanism=sa seeds=1 steps=2 batch=2 evaluation.every_steps=2 evaluation.sequences=4 hessian=false report=false
    model.layers=2 model.width=16 model.heads=2 model.positions=16 device=cpu name=small data=text
"""
NO_RAY = "launcher=ray needs Ray .*: pip install 'ray\\[tune\\]', or choose launcher=serial"
NO_SUBMITIT = "launcher=slurm needs submitit .*: pip install submitit, or choose launcher=ray or serial"
NO_SLURM = "launcher=slurm needs Slurm's commands, and there is no {} here; slurm.executor=local runs the jobs here"
NO_WANDB = "logger=wandb needs Weights & Biases: pip install wandb, or choose logger=files"
NO_TENSORBOARD = "logger=tensorboard needs TensorBoard: pip install tensorboard, or choose logger=files"
NO_MLFLOW = "logger=mlflow needs MLflow: pip install mlflow-skinny, or choose logger=files"
TF32 = "precision=tf32 is a mode of CUDA devices, and this one is a CPU; use precision=float32 or bf16"
GRAPHS = "cuda_graphs=true needs device=cuda, and this device is a CPU; use cuda_graphs=false"
NO_COMPILER = "compile=true needs a C\\+\\+ compiler, g\\+\\+ or clang\\+\\+, and there is none; use compile=false"


def without(*modules):
    """A machine on which these modules are not installed."""

    def make(monkeypatch, folder):
        for module in modules:
            monkeypatch.setitem(sys.modules, module, None)

    return make


def with_commands(*names):
    """A machine on which of Slurm's commands there are these."""

    def make(monkeypatch, folder):
        for name in names:
            (folder / name).touch(mode=0o755)
        monkeypatch.setenv("PATH", f"{folder}")

    return make


def without_compiler(monkeypatch, folder):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)


CASES = {
    "ray is missing": (["launcher=ray"], without("ray", "ray.tune"), NO_RAY),
    "nobody at ray.address": (
        ["launcher=ray", "ray.address=127.0.0.1:9"],
        without(),
        "ray.address=127.0.0.1:9: no Ray cluster that can be joined: nothing answers at .*",
    ),
    "too small for ray": (["launcher=ray", "cpus_per_trial=999"], without(), "cpus_per_trial=999, but there .*"),
    "submitit is missing": (["launcher=slurm"], without("submitit"), NO_SUBMITIT),
    "submitit is missing here": (["launcher=slurm", "slurm.executor=local"], without("submitit"), NO_SUBMITIT),
    "no srun": (["launcher=slurm", "slurm.partition=gpu", "slurm.gpus=1"], with_commands(), NO_SLURM.format("srun")),
    "srun alone": (["launcher=slurm"], with_commands("srun"), NO_SLURM.format("sbatch")),
    "no squeue": (["launcher=slurm"], with_commands("srun", "sbatch"), NO_SLURM.format("squeue")),
    "tf32 one by one": (["launcher=serial", "precision=tf32", "replace=true"], without(), TF32),
    "tf32 by ray": (["launcher=ray", "precision=tf32", "replace=true"], without(), TF32),
    "tf32 by jobs here": (
        ["launcher=slurm", "slurm.executor=local", "precision=tf32", "replace=true"],
        without(),
        TF32,
    ),
    "graphs on a CPU": (["launcher=serial", "cuda_graphs=true", "replace=true"], without(), GRAPHS),
    "no compiler": (["launcher=serial", "compile=true", "replace=true"], without_compiler, NO_COMPILER),
    "wandb is missing": (["launcher=serial", "logger=wandb"], without("wandb"), NO_WANDB),
    "of two loggers one is missing": (["launcher=serial", "logger=[files,wandb]"], without("wandb"), NO_WANDB),
    "tensorboard is missing": (["launcher=serial", "logger=tensorboard"], without("tensorboard"), NO_TENSORBOARD),
    "mlflow is missing": (["launcher=serial", "logger=mlflow"], without("mlflow"), NO_MLFLOW),
}


@pytest.fixture
def trained(lab):
    """The words of a study that was trained, of the same name."""
    words = [*SMALL.split(), f"runs_dir={lab.pool}", f"data.path={lab.text}"]
    assert sweep.main([*words, "lr=1e-3", "launcher=serial"]) == 0
    return words


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("words", "make", "told"), CASES.values(), ids=CASES)
def test_a_refusal_leaves_runs_and_record_as_they_were(trained, lab, tmp_path, monkeypatch, capsys, words, make, told):
    before = content(lab.pool)
    tools = tmp_path / "tools"
    tools.mkdir()
    make(monkeypatch, tools)
    capsys.readouterr()
    with pytest.raises((RuntimeError, ValueError), match=f"^{told}$"):
        sweep.main([*trained, "lr=[1e-2,1e-1]", *words])
    assert "trains" not in capsys.readouterr().out
    assert content(lab.pool) == before
    assert len(StudyFolder.of(lab.pool, "small").runs()) == 1


def test_what_a_dead_process_left_is_not_cleared_away_by_a_sweep_that_is_refused(trained, lab, monkeypatch):
    (run,) = StudyFolder.of(lab.pool, "small").runs()
    (run.path / f".half.{machine_word()}-1.tmp").touch()
    before = content(lab.pool)
    with pytest.raises(ValueError, match="precision=tf32"):
        sweep.main([*trained, "lr=[1e-3,1e-2]", "launcher=serial", "precision=tf32", "replace=true"])
    assert content(lab.pool) == before


def with_slurm_that_refuses(monkeypatch, folder):
    """A machine with a Slurm that knows no partition."""
    for name in ("srun", "squeue", "scancel", "sbatch"):
        refuses = "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1"
        (folder / name).write_text(f"#!/bin/sh\n{refuses if name == 'sbatch' else 'exit 0'}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}")


@pytest.mark.parametrize("rates", ["lr=[1e-2,1e-1]", "lr=edge"])
@pytest.mark.parametrize("name", ["small", "other"])
def test_what_slurm_refuses_is_put_back(trained, lab, tmp_path, monkeypatch, rates, name):
    before = content(lab.pool)
    tools = tmp_path / "tools"
    tools.mkdir()
    with_slurm_that_refuses(monkeypatch, tools)
    with pytest.raises(RuntimeError, match="^Slurm refuses the jobs: .*invalid partition specified: gpu$"):
        sweep.main([*trained, rates, f"name={name}", "launcher=slurm", "slurm.partition=gpu"])
    assert content(lab.pool) == before


def test_what_was_begun_stays_on_record(trained, lab, monkeypatch):
    def break_down(trials, **_):
        list(run_trial(trials[0]))
        raise RuntimeError("planted")

    monkeypatch.setattr(slurm_launcher, "launch", break_down)
    with pytest.raises(RuntimeError, match="^planted$"):
        sweep.main([*trained, "lr=[1e-2,1e-1]", "launcher=slurm", "slurm.executor=local"])
    runs = StudyFolder.of(lab.pool, "small").runs()
    assert [run.finished for run in runs] == [True, False, True], "the last is of the command before"
    assert all(run.spec_file.exists() for run in runs)


def machine_word():
    from stability.runs.processes import machine

    return machine()


def test_a_finished_study_asks_nothing_of_its_launcher(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setattr(slurm_launcher.shutil, "which", lambda name: None)
    assert sweep.main([*trained, "lr=1e-3", "launcher=slurm"]) == 0
    assert "skips 1 finished run, trains none" in capsys.readouterr().out
