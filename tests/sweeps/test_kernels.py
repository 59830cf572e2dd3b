"""``impl=fla`` where it cannot be: a sweep is refused before anything is on record, a run that has it is still read, and
its α_max is not measured by something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels import recurrences
from stability.config.parse import parse_run
from stability.runs.directory import RunDirectory
from stability.training import checkpoint
from tests.reading import replaced

SMALL = """
    seeds=1 steps=2 batch=2 evaluation.every_steps=2 evaluation.sequences=4 report=false lr=1e-3 launcher=serial
    objective=ar model.layers=2 model.width=16 model.heads=2 model.positions=16 device=cpu name=small data=text
"""
FLA = ["mechanism=gla", "mechanism.gla.impl=fla"]


@pytest.fixture
def words(lab):
    return [*SMALL.split(), f"runs_dir={lab.pool}", f"data.path={lab.text}"]


@pytest.fixture
def refused(entered, words):
    """What a sweep with these words is refused with, in one line."""

    def refuse(*more: str) -> str:
        ended = entered("stability.sweep", *replaced(words, *more))
        assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
        return ended.stderr

    return refuse


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        (FLA, "gla.impl=fla"),
        (["mechanism=gla", "ablate.gla.impl=[fla]"], "gla.impl=fla"),
        (["mechanism=mix", "mechanism.mix.pattern=[sa,kda]", "mechanism.mix.kda.impl=fla"], "mix.kda.impl=fla"),
    ],
)
def test_alpha_max_is_not_promised_of_kernels(refused, lab, more, setting):
    told = refused(*more, "hessian=true")
    assert "hessian=true measures α_max, which takes second derivatives" in told
    assert f"mechanism.{setting} has none; use hessian=false, or impl=reference" in told
    assert not lab.pool.exists()


def test_a_machine_without_cuda_says_so_before_anything_is_on_record(refused, lab, monkeypatch):
    monkeypatch.setattr(recurrences, "find_lacking", lambda device=None: "a CUDA device")
    assert "mechanism.gla.impl=fla needs a CUDA device; impl=reference computes" in refused(*FLA, "hessian=false")
    monkeypatch.setattr(
        recurrences, "find_lacking", lambda device=None: "device=cuda" if device.type == "cpu" else None
    )
    assert "mechanism.gla.impl=fla needs device=cuda; impl=reference" in refused(*FLA, "hessian=false")
    assert not list(lab.pool.glob("*/spec.json"))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["optimizer=sophia"], "optimizer=sophia takes second derivatives, and mechanism.gla.impl=fla has none"),
        (["compile=true"], "compile=true takes torch's own operations, and mechanism.gla.impl=fla has kernels"),
    ],
)
def test_a_run_asks_no_more_of_kernels_than_they_can(refused, more, what):
    assert what in refused(*FLA, "hessian=false", *more)


def test_a_run_on_kernels_is_read_anywhere_and_measured_nowhere(entered, words, lab, monkeypatch):
    assert entered("stability.sweep", *words, "mechanism=gla", "hessian=false").returncode == 0
    (spec_file,) = lab.pool.glob("*/spec.json")
    run, (folder,) = RunDirectory.at(spec_file.parent), spec_file.parent.glob("checkpoints/step_*")
    for file in (spec_file, folder / checkpoint.MANIFEST):
        put_on_kernels(file)
    monkeypatch.setattr(recurrences, "find_lacking", lambda device=None: "a CUDA device")
    spec = parse_run(json.loads(spec_file.read_text()))
    assert spec.mechanism.settings.impl == "fla" and run.finished
    assert entered("stability.status", f"runs_dir={lab.pool}").returncode == 0
    for what in (folder, run.path):
        for method in ("auto", "finite_difference"):
            ended = entered("stability.hessian", f"ckpt={what}", f"method={method}", "device=cpu")
            assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
            assert (
                "is asked for α_max, which takes second derivatives, and mechanism.gla.impl=fla has none; train a run"
                in ended.stderr
            )
    assert not list(run.path.glob("curvature/*"))
    with pytest.raises(ValueError, match=r"^mechanism\.gla\.impl=fla needs a CUDA device; impl=reference"):
        checkpoint.load(folder)
    monkeypatch.setattr(recurrences, "find_lacking", lambda device=None: None)
    assert checkpoint.load(folder)[0].mechanism == spec.mechanism


def put_on_kernels(file: Path) -> None:
    """Write into a stored spec, or a manifest that holds one, that its gla was computed by kernels."""
    stored = json.loads(file.read_text())
    mechanism = stored.get("spec", stored)["mechanism"]
    assert mechanism["impl"] == "reference"
    mechanism["impl"] = "fla"
    file.write_text(json.dumps(stored))
