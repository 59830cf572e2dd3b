"""A compiled training step is the same step up to rounding, and nothing but the training step is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stability.build import build_model
from stability.config.identity import run_id
from stability.corpora.cache import load
from stability.runs.directory import RunDirectory, read_jsonl
from stability.training import machine
from stability.training.machine import compile_model
from tests.training.test_loop import final_weights, same

TRAIN = """
import json, sys
from pathlib import Path
from stability.config.base import validate
from stability.config.run import RunSpec
from stability.runs.directory import RunDirectory
from stability.training.run import train

spec, pool, cache, left_after = sys.argv[1:]
directory = RunDirectory(Path(pool), "run")
steps = train(validate(RunSpec, json.loads(spec)), directory, cache_dir=Path(cache), device="cpu")
for number, _ in enumerate(steps, 1):
    if number == int(left_after):
        steps.close()
        break
"""


def trained(lab, pool, spec, *left_after):
    """Return the folder of a run that was left after these steps, one after another, and then taken to its end, each
    time by a process of its own: the checks of shapes that tests put around ours do not compile."""
    for number in (*left_after, 0):
        text = json.dumps(spec.model_dump(mode="json"))
        command = [sys.executable, "-W", "ignore", "-c", TRAIN, text, str(pool), str(lab.cache), str(number)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return RunDirectory(pool, "run")


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "residual"), [("sa", "identity"), ("sc", "mhc_lite")])
def test_a_compiled_run_is_the_same_run_up_to_rounding_and_resumes_bit_for_bit(lab, tmp_path, mechanism, residual):
    parts = {"mechanism": {"name": mechanism}, "residual": {"name": residual}, "steps": 8}
    plain, spec = lab.train(lab.spec(**parts)), lab.spec(**parts, compile=True)
    assert run_id(spec) != plain.run_id
    resumed, whole = trained(lab, tmp_path / "resumed", spec, 5), trained(lab, tmp_path / "whole", spec)
    assert resumed.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    assert (
        resumed.metrics_file.read_bytes() != plain.metrics_file.read_bytes()
    )  # it rounds otherwise, so it was compiled
    assert same(final_weights(resumed), final_weights(whole))
    for exact, found in zip(read_jsonl(plain.metrics_file), read_jsonl(resumed.metrics_file), strict=True):
        for name in ("loss", "grad_norm", "update_norm", "val_nll"):
            if exact.get(name) is not None:
                assert found[name] == pytest.approx(exact[name], rel=1e-4), (name, exact["step"])


def test_the_model_beside_a_compiled_one_stays_as_it_is(lab):
    spec = lab.spec()
    model = build_model(spec, load(lab.cache, spec.data_fingerprint).format)
    other = compile_model(model)
    assert not hasattr(model, "_orig_mod")
    assert [parameter.data_ptr() for parameter in other.parameters()] == [
        parameter.data_ptr() for parameter in model.parameters()
    ]


def test_without_a_compiler_there_is_a_line_that_says_so(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"compile=true needs a C\+\+ compiler.*compile=false"):
        compile_model(torch.nn.Linear(2, 2))


def test_chunks_of_the_loss_are_not_compiled(lab):
    with pytest.raises(ValueError, match="compile=true does not go together with objective.loss_chunk"):
        lab.spec(compile=True, objective={"name": "mlm", "loss_chunk": 8})
