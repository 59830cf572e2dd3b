"""A deployed folder: its weights against BitLinear and loops, its validation, and what is told of a mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stability.build import build_objective
from stability.deployed import load, writing
from stability.deployed.folder import MANIFEST, MODEL
from stability.linears.bitnet import BitLinear
from stability.models.rounding import find_matrices
from stability.probes.checkpoints import corpus_of
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from stability.training.evaluate import Validation
from tests.conftest import Lab

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    runs = {
        "dense": lab.train(lab.spec(lr_peak=0.01)),
        "bitnet": lab.train(lab.spec(lr_peak=0.02, linear={"name": "bitnet"})),
        "ar": lab.train(lab.spec(lr_peak=0.03, objective={"name": "ar"})),
        "moe": lab.train(lab.spec(lr_peak=0.01, ffn={"name": "moe", "experts": 3})),
    }
    return lab, runs


def deployed(entered, run, out, *words):
    done = entered("stability.deploy", f"ckpt={run.path}", f"out={out}", *words)
    assert done.returncode == 0, done.stderr
    return load(out), done.stdout


def nll_of(lab, spec, model) -> float:
    corpus = corpus_of(spec, lab.cache)
    return Validation(spec, corpus, build_objective(spec, corpus.format), CPU).measure(model)["val_nll"]


def test_fp32_is_the_checkpoint_bit_for_bit(trained, tmp_path, entered):
    _, runs = trained
    found, printed = deployed(entered, runs["dense"], tmp_path / "out", "format=fp32")
    _, model = checkpoint.load(runs["dense"].checkpoints()[-1])
    ours = found.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert found.manifest["validation"]["relative_change"] == 0.0
    assert found.manifest["validation"]["largest_logit_difference"] == 0.0
    assert f"python -m stability.infer dir={tmp_path / 'out'}" in printed


def test_bf16_keeps_vectors_and_rounds_the_rest(trained, tmp_path, entered):
    _, runs = trained
    found, _ = deployed(entered, runs["dense"], tmp_path / "out", "format=bf16")
    _, model = checkpoint.load(runs["dense"].checkpoints()[-1])
    for name, value in model.state_dict().items():
        expected = value if value.ndim < 2 else value.bfloat16().float()
        assert torch.equal(found.model.state_dict()[name], expected), name


@pytest.mark.parametrize("head", ["rest", "int8"])
def test_int8_is_within_half_a_step_of_each_weight(trained, tmp_path, entered, head):
    lab, runs = trained
    found, _ = deployed(entered, runs["dense"], tmp_path / "out", "format=int8", f"head={head}")
    spec, model = checkpoint.load(runs["dense"].checkpoints()[-1])
    stored, ours = load_file(tmp_path / "out" / MODEL), found.model.state_dict()
    matrices = {f"{name}.weight" for name in find_matrices(model)}
    tables = {"embedding.weight", "head.weight"}
    for name, value in model.state_dict().items():
        if name in matrices or (name in tables and head == "int8"):
            assert stored[name].dtype == torch.int8
            rows = value.double().numpy()
            for row, codes in zip(rows, stored[name].numpy(), strict=True):
                step = np.abs(row).max() / 127
                assert np.abs(codes * step - row).max() <= step * (0.5 + 1e-5)
        else:
            assert torch.equal(ours[name], value if value.ndim < 2 else value.bfloat16().float()), name
    said = found.manifest["validation"]
    assert said["nll_after"] == pytest.approx(nll_of(lab, spec, found.model), rel=1e-6)
    assert said["nll_before"] == pytest.approx(nll_of(lab, spec, model), rel=1e-6)
    assert abs(said["relative_change"]) < 5e-3


@pytest.mark.parametrize(
    "words",
    [["format=bf16"], ["format=int8", "head=int8"], ["format=ternary", "force=true"]],
    ids=lambda words: words[0],
)
def test_routers_of_experts_are_stored_as_they_are(trained, tmp_path, entered, words):
    """Rounded logits would choose other experts; the experts themselves are rounded."""
    _, runs = trained
    found, _ = deployed(entered, runs["moe"], tmp_path / "out", *words)
    _, model = checkpoint.load(runs["moe"].checkpoints()[-1])
    theirs, ours = model.state_dict(), found.model.state_dict()
    routers = {name for name in theirs if name.endswith(".router.weight")}
    experts = {name for name in theirs if ".experts." in name and theirs[name].ndim == 2}
    assert len(routers) == 2 and len(experts) == 2 * 3 * 3
    assert all(torch.equal(ours[name], theirs[name]) for name in routers)
    assert not any(torch.equal(ours[name], theirs[name]) for name in experts)


@pytest.mark.parametrize("pack", ["2bit", "base3"])
def test_ternary_weights_are_those_that_bitnet_computes_with(trained, tmp_path, entered, pack):
    lab, runs = trained
    words = ("format=ternary", f"pack={pack}", "rest=fp32")
    found, _ = deployed(entered, runs["bitnet"], tmp_path / "out", *words)
    spec, model = checkpoint.load(runs["bitnet"].checkpoints()[-1])
    theirs = {name: each for name, each in model.named_modules() if isinstance(each, BitLinear)}
    ours = dict(found.model.named_modules())
    assert len(theirs) == 8
    for name, each in theirs.items():
        assert torch.equal(ours[name].weight, each.ternary()), name
        assert torch.equal(ours[name].ternary(), each.ternary()) or ours[name].is_ternary
    # BitLinear computes W + (W̃ − W) in float32, which is W̃ but for one rounding
    assert nll_of(lab, spec, found.model) == pytest.approx(nll_of(lab, spec, model), rel=1e-5)
    size = found.manifest["files"][MODEL]["bytes"]
    assert size == (tmp_path / "out" / MODEL).stat().st_size
    packed = sum(
        len(value) for name, value in load_file(tmp_path / "out" / MODEL).items() if value.dtype == torch.uint8
    )
    assert packed == sum(-(-each.weight.numel() // {"2bit": 4, "base3": 5}[pack]) for each in theirs.values())


def test_a_dense_model_becomes_ternary_by_force_only(trained, tmp_path, entered):
    _, runs = trained
    words = [f"ckpt={runs['dense'].path}", f"out={tmp_path / 'out'}", "format=ternary"]
    refused = entered("stability.deploy", *words)
    assert refused.returncode == 2 and "needs a run with linear=bitnet" in refused.stderr
    assert not (tmp_path / "out").exists()
    assert entered("stability.deploy", *words, "force=true").returncode == 0
    weight = load(tmp_path / "out").model.state_dict()["blocks.0.ffn.out.weight"]
    assert len(weight.abs().unique()) == 2  # 0 and γ


def test_above_the_tolerance_nothing_is_written(trained, tmp_path, entered):
    _, runs = trained
    words = [f"ckpt={runs['dense'].path}", f"out={tmp_path / 'out'}", "format=int8"]
    done = entered("stability.deploy", *words, "tolerance=0")
    assert done.returncode == 1 and "more than tolerance=0" in done.stderr and list(tmp_path.iterdir()) == []
    accepted = done.stderr.split("tolerance=")[-1].split()[0]
    assert entered("stability.deploy", *words, f"tolerance={accepted}").returncode == 0


@pytest.mark.parametrize(("change", "code"), [(-0.01, 1), (0.01, 1), (float("nan"), 1), (-0.001, 0), (0.001, 0)])
def test_the_tolerance_is_of_either_sign_and_accepts_no_nan(trained, tmp_path, entered, monkeypatch, change, code):
    _, runs = trained
    measure = writing.compare

    def compare(*args):
        found = measure(*args)
        return found | {"nll_after": found["nll_before"] * (1 + change), "relative_change": change}

    monkeypatch.setattr(writing, "compare", compare)
    done = entered("stability.deploy", f"ckpt={runs['dense'].path}", f"out={tmp_path / 'out'}", "format=int8")
    assert done.returncode == code, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ([] if code else ["out"])
    assert ("more than tolerance=0.005" in done.stderr) == bool(code)


def test_of_a_study_the_best_run_is_taken(trained, tmp_path, entered):
    lab, runs = trained
    study = StudyFolder.of(lab.pool, "two")
    study.write([runs["dense"].run_id, runs["bitnet"].run_id])
    done = entered("stability.deploy", f"ckpt={study.path}", "format=bf16", f"out={tmp_path / 'out'}")
    nlls = {name: runs[name].status()["result"]["val_nll"] for name in ("dense", "bitnet")}
    best = runs[min(nlls, key=nlls.__getitem__)].run_id
    assert done.returncode == 0 and f"best of 2 runs: {best}" in done.stdout
    assert load(tmp_path / "out").manifest["run"] == best


def test_an_existing_folder_is_replaced_on_request_only(trained, tmp_path, entered):
    _, runs = trained
    words = [f"ckpt={runs['dense'].path}", "format=bf16"]
    assert entered("stability.deploy", *words, f"out={tmp_path / 'out'}").returncode == 0
    again = entered("stability.deploy", *words, f"out={tmp_path / 'out'}")
    assert again.returncode == 2 and "add overwrite=true" in again.stderr
    assert entered("stability.deploy", *words, f"out={tmp_path / 'out'}", "overwrite=true").returncode == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    foreign = entered("stability.deploy", *words, f"out={tmp_path / 'mine'}", "overwrite=true")
    assert foreign.returncode == 2 and "no deployed model" in foreign.stderr


def test_a_damaged_folder_is_refused(trained, tmp_path, entered):
    _, runs = trained
    deployed(entered, runs["dense"], tmp_path / "out", "format=int8")
    with pytest.raises(ValueError, match="no deployed model in"):
        load(tmp_path)
    manifest = (tmp_path / "out" / MANIFEST).read_text()
    (tmp_path / "out" / MANIFEST).write_text(manifest.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="layout version 2"):
        load(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match="is no folder of stability.deploy"):
        load(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).write_text(manifest)
    for old, new in (('"format": "int8"', '"format": "int9"'), ('"data_format": 256', '"data_format": "a"')):
        assert old in manifest
        (tmp_path / "out" / MANIFEST).write_text(manifest.replace(old, new))
        with pytest.raises(ValueError, match="is altered \\(its sha256 is not its own\\); deploy the checkpoint again"):
            load(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).write_text(manifest)
    whole = (tmp_path / "out" / MODEL).read_bytes()
    (tmp_path / "out" / MODEL).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="its sha256 is not the manifest's"):
        load(tmp_path / "out")


def test_the_folder_names_no_place_of_the_data_and_answers_without_the_run(trained, tmp_path, entered, fresh_processes):
    """In a process of its own, with the folder alone in another place."""
    lab, runs = trained
    deployed(entered, runs["ar"], tmp_path / "out", "format=int8")
    for file in (tmp_path / "out").iterdir():
        assert str(lab.text.parent).encode() not in file.read_bytes()
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(tmp_path / "out", moved)
    shutil.rmtree(tmp_path / "out")
    words = ["-m", "stability.infer", f"dir={moved}", "text=the window", "tokens=5", "temperature=0"]
    hidden = lab.pool.rename(lab.pool.with_name("gone"))
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    finally:
        hidden.rename(lab.pool)
    assert (done.returncode, done.stderr) == (0, "") and "nats per token over 9 tokens" in done.stdout
    assert json.loads((moved / MANIFEST).read_text())["run"] == runs["ar"].run_id


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["format=fp32", "rest=fp32"], "rest=fp32 belongs to format=int8 and ternary"),
        (["format=bf16", "head=int8"], "head=int8 belongs to format=int8"),
        (["format=int8", "pack=base3"], "pack=base3 belongs to format=ternary"),
        (["format=int8", "force=true"], "force=true belongs to format=ternary"),
        (["format=int4"], "format"),
        ([], "format"),
    ],
)
def test_settings_of_another_format_are_refused(trained, tmp_path, entered, words, told):
    _, runs = trained
    done = entered("stability.deploy", f"ckpt={runs['dense'].path}", f"out={tmp_path / 'out'}", *words)
    assert done.returncode == 2 and told in done.stderr and not (tmp_path / "out").exists()
