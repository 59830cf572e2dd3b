"""``impl=triton`` and ``impl=auto`` of a part: what is refused in one line, what auto comes to, what is written and read
again, and α_max through kernels that carry it."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from kernels import availability
from stability.cli.compose import compose_values
from stability.cli.words import Invocation
from stability.config.identity import run_id
from stability.config.parse import parse, parse_run
from stability.config.sweep import SweepSpec
from stability.mechanisms import build
from stability.registry import add_plugin
from tests.kernels.plugins import fused
from tests.reading import read_spec, replaced

SMALL = """
    plugins=[tests.kernels.plugins.fused] mechanism=fused seeds=1 steps=3 batch=2 evaluation.every_steps=3
    evaluation.sequences=4 report=false lr=1e-3 launcher=serial objective=mlm model.layers=2 model.width=16
    model.heads=2 model.positions=16 device=cpu name=small data=text hessian=false
"""
TRITON, AUTO = "mechanism.fused.impl=triton", "mechanism.fused.impl=auto"


@pytest.fixture
def words(lab):
    return [*SMALL.split(), f"runs_dir={lab.pool}", f"data.path={lab.text}"]


@pytest.fixture
def on_cuda(monkeypatch):
    """A machine on which Triton's kernels run."""
    monkeypatch.setattr(availability, "find_lacking", lambda device=None, *, interpreted=True: None)


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.delenv(availability.INTERPRET, raising=False)
    monkeypatch.setattr(availability.torch.cuda, "is_available", lambda: False)


@pytest.fixture
def spec_of(words):
    """The sweep that these words say, as the entry reads it."""
    return lambda *more: read_spec("sweep", [*words, *more])


def settings_of(spec: SweepSpec):
    return spec.points("data")[0][1].mechanism.settings


def refused(ended) -> str:
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    return ended.stderr


# what is asked for by name


def test_kernels_are_asked_for_where_triton_can_run_or_a_line_says_what_is_missing(
    entered, words, lab, without_cuda, monkeypatch
):
    told = refused(entered("stability.sweep", *replaced(words, TRITON)))
    assert "mechanism.fused.impl=triton needs a CUDA device (or TRITON_INTERPRET=1, which interprets them" in told
    assert "; impl=reference computes the same everywhere" in told
    assert "mechanism.fused.impl=triton needs a CUDA" in refused(
        entered("stability.sweep", *replaced(words, TRITON, "dry_run=true"))
    )
    assert not list(lab.pool.glob("*/spec.json"))
    monkeypatch.setattr(availability.torch.cuda, "is_available", lambda: True)
    assert availability.find_lacking(availability.torch.device("cpu")) == "device=cuda"
    assert availability.find_lacking() is None
    monkeypatch.setenv(availability.INTERPRET, "1")
    assert availability.find_lacking(availability.torch.device("cpu")) is None
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert availability.find_lacking() == "triton (pip install triton)"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["mechanism.fused.power=2"], "mechanism.fused.impl=triton has no kernel for power=2; impl=reference computes"),
        (["model.width=160"], "mechanism.fused.impl=triton has no kernel for heads of width 80; impl=reference"),
        (["compile=true"], "compile=true takes torch's own operations, and mechanism.fused.impl=triton has kernels"),
        (
            ["optimizer=sophia"],
            "optimizer=sophia takes second derivatives by autograd, and mechanism.fused.impl=triton",
        ),
        (
            ["hessian=true", "curvature.method=double_backward"],
            "hessian=true measures α_max, which by method=double_backward takes second derivatives by autograd, and "
            "mechanism.fused.impl=triton has none; use hessian=false, or impl=reference",
        ),
        (
            ["hessian=true", "curvature.measure=[alpha_max,density]"],
            "hessian=true measures density, which takes second derivatives by autograd, and mechanism.fused.impl=",
        ),
    ],
)
def test_a_run_asks_no_more_of_kernels_than_they_can(entered, words, on_cuda, more, said):
    assert said in refused(entered("stability.sweep", *replaced(words, TRITON, *more)))


def test_kernels_without_a_second_derivative_are_not_promised_one(entered, words, on_cuda, monkeypatch):
    monkeypatch.setattr(fused.Fused, "kernels_second_order", False)
    told = refused(entered("stability.sweep", *replaced(words, TRITON, "hessian=true")))
    assert (
        "hessian=true measures α_max, which takes second derivatives, and mechanism.fused.impl=triton has none" in told
    )


def test_a_module_is_built_with_kernels_and_refuses_what_they_do_not_compute():
    add_plugin("tests.kernels.plugins.fused")
    assert build("fused", width=16, heads=2, impl="triton").config.impl == "triton"
    with pytest.raises(ValueError, match=r"^mechanism\.fused\.impl=triton has no kernel for power=2; impl=reference"):
        build("fused", width=16, heads=2, impl="triton", power=2)
    with pytest.raises(
        ValueError, match=r"^mechanism\.fused\.impl=auto: auto is resolved in a sweep only; write triton"
    ):
        build("fused", width=16, heads=2, impl="auto")


# auto


def test_auto_is_reference_where_there_is_no_cuda_and_a_plan_says_so(entered, words, lab, without_cuda):
    planned = entered("stability.sweep", *replaced(words, AUTO, "dry_run=true"))
    assert planned.returncode == 0, planned.stderr
    line = "mechanism.fused.impl=auto: reference, since triton's kernels need a CUDA device"
    assert line in planned.stdout.splitlines()
    assert entered("stability.sweep", *words, AUTO).returncode == 0
    (file,) = lab.pool.glob("*/spec.json")
    assert json.loads(file.read_text())["mechanism"]["impl"] == "reference" and '"auto"' not in file.read_text()


def test_auto_is_triton_where_the_kernels_run(spec_of, on_cuda):
    spec = spec_of(AUTO)
    assert settings_of(spec).impl == "triton"
    assert spec.choices == ("mechanism.fused.impl=auto: triton, on this machine's CUDA device",)


@pytest.mark.parametrize(
    ("has_cuda", "reason"), [(True, "need TRITON_INTERPRET=1 to be left out"), (False, "need a CUDA device")]
)
def test_a_machine_that_interprets_kernels_takes_the_reference(spec_of, monkeypatch, has_cuda, reason):
    monkeypatch.setenv(availability.INTERPRET, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    spec = spec_of(AUTO)
    assert settings_of(spec).impl == "reference" and reason in spec.choices[0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["mechanism.fused.power=2"], "mechanism.fused.impl=triton has no kernel for power=2"),
        (["compile=true"], "compile=true takes torch's own operations, and mechanism.fused.impl=triton has kernels"),
        (["optimizer=[adamw,sophia]"], "optimizer=sophia takes second derivatives by autograd, and mechanism.fused"),
        (["hessian=true", "curvature.measure=[sharpness]"], "hessian=true measures sharpness, which takes second"),
    ],
)
def test_auto_is_reference_where_the_kernels_would_be_refused_and_says_why(spec_of, on_cuda, more, why):
    spec = spec_of(AUTO, *more)
    assert settings_of(spec).impl == "reference"
    (line,) = spec.choices
    assert line.startswith(f"mechanism.fused.impl=auto: reference, since {why}")


def test_each_part_of_a_pattern_is_settled_by_itself(words, on_cuda):
    def spec_of(**settings) -> SweepSpec:
        values = compose_values(SweepSpec, Invocation.of(words))
        values["mechanism"] = {
            "mix": {"pattern": ["sa", "fused"], "fused": {"impl": "auto", **settings}},
            "fused": {"impl": "triton"},
        }
        return parse(SweepSpec, values)

    spec = spec_of(power=2)
    assert spec.choices == (
        "mechanism.mix.fused.impl=auto: reference, since mechanism.mix.fused.impl=triton has no kernel for power=2",
    )
    kinds = {run.mechanism.name: run.mechanism.settings for _, run in spec.points("data")}
    assert kinds["fused"].impl == "triton" and kinds["mix"].parts[1].settings.impl == "reference"
    assert spec_of().points("data")[0][1].mechanism.settings.parts[1].settings.impl == "triton"


def test_a_run_is_known_by_what_auto_came_to(spec_of, monkeypatch):
    """impl=reference is neutral: a run has the id that it had before there was the setting."""

    def identity(*more: str) -> str:
        return run_id(spec_of(*more).points("data")[0][1])

    monkeypatch.setenv(availability.INTERPRET, "1")
    plain = identity()
    assert identity("mechanism.fused.impl=reference") == identity(AUTO) == plain != identity(TRITON)
    monkeypatch.setattr(availability, "find_lacking", lambda device=None, *, interpreted=True: None)
    assert identity(AUTO) == identity(TRITON)


def test_what_was_settled_is_read_as_it_was_written_and_never_settled_again(spec_of, on_cuda, monkeypatch):
    spec = spec_of(AUTO).points("data")[0][1]
    written = json.loads(spec.model_dump_json())
    monkeypatch.setattr(availability, "find_lacking", lambda device=None, *, interpreted=True: "a CUDA device")
    assert parse_run(written) == spec and spec.mechanism.settings.impl == "triton"
    written["mechanism"]["impl"] = "auto"
    with pytest.raises(
        ValueError, match=r"^mechanism\.fused\.impl=auto: auto is resolved in a sweep only; write triton"
    ):
        parse_run(written)


def test_auto_is_no_value_of_an_ablation(entered, words, on_cuda):
    told = refused(entered("stability.sweep", *replaced(words, "ablate.fused.impl=[reference,auto]")))
    assert "mechanism.fused.impl=auto: auto is resolved in a sweep only; write triton or reference here" in told


# through the kernels


def test_a_run_on_kernels_is_trained_and_measured_through_them_as_its_reference_is(entered, words, lab, on_cuda):
    rows = {}
    for impl in ("reference", "triton"):
        fused.CALLS.clear()
        more = [f"mechanism.fused.impl={impl}", "hessian=true", "curvature.recorded_steps=2", "name=" + impl]
        ended = entered("stability.sweep", *replaced(words, *more))
        assert ended.returncode == 0, ended.stderr
        assert bool(fused.CALLS) == (impl == "triton")
        study = json.loads((lab.pool / "studies" / impl / "study.json").read_text())
        rows[impl] = pd.read_parquet(lab.pool / study["run_ids"][0] / "curvature" / "terminal.parquet")
        assert set(rows[impl]["method"]) == {"taylor"} and rows[impl]["rel_error"].dropna().max() < 1e-2
    for column in ("loss_before", "slope", "curvature", "alpha_max"):
        assert rows["triton"][column].to_numpy() == pytest.approx(rows["reference"][column].to_numpy(), rel=1e-4)
