"""Runs that start from a finished run's weights: against the source, against steps taken by hand, and against
interruptions; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from stability.build import build_model, build_objective, shapes
from stability.config.identity import run_id
from stability.config.training import WeightsSpec
from stability.corpora.cache import load
from stability.objectives import training_examples
from stability.runs.directory import RunDirectory, read_jsonl
from stability.runs.results import collect
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from stability.training.run import train
from stability.training.step import Replica
from stability.training.weights import Weights
from tests.within import assert_within

FRESH = "init.partial=true takes those that do, and initialises the others as without init"


@pytest.fixture
def source(lab):
    return lab.train(lab.spec(lr_peak=1e-2))


def found(**asked):
    return Weights.find(WeightsSpec(**asked), {}, Path("unused"))


def starting(lab, folder, partial=False, **changes):
    """The spec of a run that starts from the weights in a folder, which are kept for it."""
    weights = found(source=f"ckpt:{folder}", partial=partial).keep(lab.cache)
    return lab.spec(weights=weights.spec.model_dump(mode="json"), **changes)


def tensors(directory):
    return checkpoint.load(directory.checkpoints()[-1])[1].state_dict()


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_first_validation_is_the_sources_last_to_the_bit(lab, source):
    run = lab.train(starting(lab, source.path, seed=3))
    first = next(read_jsonl(run.metrics_file))
    assert (first["step"], first["val_nll"]) == (0, source.status()["result"]["val_nll"])
    assert first["val_nll"] != next(read_jsonl(source.metrics_file))["val_nll"]
    assert run.status()["result"]["init_nll"] == first["val_nll"] and run.status()["step"] == 12


def test_the_steps_are_a_fresh_adams_from_those_weights(lab, source):
    """Taken by hand with torch's own optimizer: neither its averages nor its count of steps come from the source."""
    spec = starting(lab, source.path, seed=3)
    corpus = load(lab.cache, spec.data_fingerprint)
    objective, model = build_objective(spec, corpus.vocab_size), checkpoint.load(source.checkpoints()[-1])[1].train()
    settings = spec.optimizer.settings
    optimizer = torch.optim.AdamW(
        model.parameters(), spec.lr_peak, (settings.beta1, settings.beta2), settings.epsilon, settings.weight_decay
    )
    for step in range(1, spec.steps + 1):
        examples = training_examples(spec, corpus, objective, "train", step, seed=3, batch=spec.batch)
        total, count = objective.loss(model, examples)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm)
        optimizer.step()
    trained, truth = tensors(lab.train(spec)), model.state_dict()
    assert_within(max((trained[name] - truth[name]).abs().max().item() for name in truth), 1e-5)
    trainer = checkpoint.load_trainer(lab.directory(spec).checkpoints()[-1])
    assert {int(state["step"]) for state in trainer["optimizer"]["state"].values()} == {12}


def test_the_id_changes_with_the_weights_and_not_with_where_they_lie(lab, source, tmp_path):
    spec = starting(lab, source.path)
    moved = tmp_path / "elsewhere" / "mine"
    shutil.copytree(source.checkpoints()[-1], moved)
    again = starting(lab, moved)
    assert again.weights.source != spec.weights.source and again.weights.label == "mine at step 12"
    assert spec.weights.label == f"{source.run_id} at step 12"
    assert run_id(again) == run_id(spec)
    others = [
        starting(lab, source.checkpoints()[0]),
        starting(lab, lab.train(lab.spec(seed=7)).path),
        starting(lab, source.path, partial=True),
        lab.spec(),
    ]
    assert len({run_id(spec), *map(run_id, others)}) == 5
    run = lab.train(spec)
    assert lab.train(again).path == run.path  # nor is its folder refused for a path that has changed
    assert (lab.cache / "weights" / f"{spec.weights.sha256}.safetensors").read_bytes() == (
        source.checkpoints()[-1] / checkpoint.MODEL
    ).read_bytes()


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_run_that_was_left_ends_as_one_that_was_not(lab, source, tmp_path, is_kept):
    """With its checkpoint, or begun anew from the weights, of which only the kept copy is still there."""
    spec = starting(lab, source.path, seed=2)
    whole = lab.train(spec)
    shutil.rmtree(source.path)
    directory = RunDirectory(tmp_path / "cut", whole.run_id)
    for number, steps in enumerate((3, None)):
        generator: Any = train(spec, directory, cache_dir=lab.cache, device="cpu")
        for step, _ in enumerate(generator, 1):
            if step == steps:
                generator.close()
                break
        if not number and not is_kept:
            shutil.rmtree(directory.path / "checkpoints")
    assert directory.metrics_file.read_bytes() == whole.metrics_file.read_bytes()
    assert same_weights(tensors(directory), tensors(whole))


def test_a_segment_goes_on_from_another_runs_checkpoint_whatever_the_first_began_with(lab, source):
    """As population based training has it: the weights stay part of what each segment is, and are not taken again."""
    weights = {"weights": starting(lab, source.path).weights.model_dump(mode="json")}
    whole, first = lab.spec(steps=12, **weights), lab.spec(steps=5, **weights)
    second = lab.spec(steps=12, init={"run": run_id(first), "step": 5}, **weights)
    lines = [lab.train(spec).metrics_file.read_text().splitlines() for spec in (whole, first, second)]
    assert lines[2] == lines[0][6:] and len(lines[2]) == 7
    assert len({run_id(spec) for spec in (whole, second, lab.spec(steps=12, init=second.init.model_dump()))}) == 3


def test_what_a_guard_brings_back_before_the_first_checkpoint_are_those_weights(lab, source, monkeypatch):
    real = Replica._backward

    def backward(self, examples, step):
        loss = real(self, examples, step)
        return [part * float("nan") for part in loss] if self.step == 1 else loss

    spec = starting(lab, source.path, lr_peak=1e-9, guards={"on_nonfinite": "restore_last_good", "retries": 2})
    monkeypatch.setattr(Replica, "_backward", backward)
    rows = {row["step"]: row for row in read_jsonl(lab.train(spec).metrics_file)}
    assert rows[2]["restored_step"] == 0
    assert rows[4]["val_nll"] == pytest.approx(source.status()["result"]["val_nll"], abs=1e-5)


@pytest.mark.slow  # two processes that import torch; tests/training/test_parallel.py keeps a plain run in the fast suite
@pytest.mark.parametrize("how", [{"devices": 2}, {"devices": 2, "shard": True}])
def test_several_devices_start_from_the_same_weights(lab, source, tmp_path, how):
    spec = starting(lab, source.path, microbatch=2)
    directory = RunDirectory(tmp_path / "two", lab.directory(spec).run_id)
    for _ in train(spec, directory, cache_dir=lab.cache, device="cpu", **how):
        pass
    assert next(read_jsonl(directory.metrics_file))["val_nll"] == source.status()["result"]["val_nll"]
    alone = lab.train(spec)
    assert directory.status()["result"]["val_nll"] == pytest.approx(alone.status()["result"]["val_nll"], rel=1e-5)


def test_what_does_not_fit_is_named(lab, source):
    def refusal(**changes):
        weights = found(source=f"ckpt:{source.path}")
        own = shapes(lab.spec(**changes), load(lab.cache, lab.spec().data_fingerprint).vocab_size)
        with pytest.raises(ValueError) as caught:
            weights.fit(own).require(weights.spec, "sc")
        first, second = str(caught.value).split("\n")
        assert second == f"all tensors must match by name and shape; {FRESH}"
        return first.partition(" does not fit ")[2]

    bias = {"mechanism": {"name": "sa"}, "norm": {"name": "layernorm", "bias": False}}
    assert refusal(**bias) == (
        "sc: unexpected: blocks.0.ffn_norm.bias, blocks.0.mixer_norm.bias, blocks.1.ffn_norm.bias and 2 more"
    )
    deeper = {"model": {**lab.spec().model.model_dump(), "layers": 3}}
    assert refusal(**deeper) == (
        "sc: missing: blocks.2.mixer.qkv.weight, blocks.2.mixer.qkv.bias, blocks.2.mixer.out.weight and 9 more"
    )
    narrower = {"ffn": {"name": "mlp", "multiple": 3.0}, "model": {**lab.spec().model.model_dump(), "layers": 1}}
    assert refusal(**narrower) == (
        "sc: unexpected: blocks.1.ffn.hidden.bias, blocks.1.ffn.hidden.weight, blocks.1.ffn.out.bias and 9 more; "
        "of another shape: blocks.0.ffn.hidden.weight (64×16, here 48×16), blocks.0.ffn.hidden.bias (64, here 48), "
        "blocks.0.ffn.out.weight (16×64, here 16×48)"
    )


def test_a_partial_match_takes_what_fits_and_says_what_is_new(lab, source):
    spec = starting(lab, source.path, partial=True, mechanism={"name": "sc", "edge_hidden": 4})
    vocab_size = load(lab.cache, spec.data_fingerprint).vocab_size
    drawn, given = build_model(spec, vocab_size).state_dict(), tensors(source)
    state = Weights.load_cached(spec.weights, lab.cache).state(drawn)
    fresh = [name for name in drawn if name not in given]
    assert fresh and all(name.startswith(("blocks.0.mixer.", "blocks.1.mixer.")) for name in fresh)
    assert same_weights(state, {name: given.get(name, drawn[name]) for name in drawn})
    assert not same_weights(state, drawn)
    run = lab.train(spec)
    account = json.loads(run.provenance_file.read_text())["weights"]
    assert account["initialised"] == fresh and account["num_taken"] == len(drawn) - len(fresh)
    assert account["not_read"] == sorted(name for name in given if name not in drawn) != []
    assert account["label"] == f"{source.run_id} at step 12"
    alone = lab.train(lab.spec(mechanism={"name": "sc", "edge_hidden": 4}))
    assert run.status()["result"]["init_nll"] != alone.status()["result"]["init_nll"]
    narrow = build_model(lab.spec(ffn={"name": "mlp", "multiple": 3.0}), vocab_size).state_dict()
    own = [name for name in narrow if narrow[name].shape != given[name].shape]
    assert len(own) == 6 and same_weights(
        Weights.load_cached(spec.weights, lab.cache).state(narrow),
        {name: narrow[name] if name in own else given[name] for name in narrow},
    )
    with pytest.raises(ValueError, match="init.partial=true: none of its 29 tensors has the name and the shape of one"):
        Weights.load_cached(spec.weights, lab.cache).state({"head.weight": torch.zeros(3)})


def test_weights_that_are_gone_or_altered_end_the_run_before_it_begins(lab, source):
    spec = starting(lab, source.path)
    kept = lab.cache / "weights" / f"{spec.weights.sha256}.safetensors"
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{kept}, the weights that this run starts from \(.* at step 12\), was alt"):
        lab.train(spec)
    kept.unlink()
    with pytest.raises(ValueError, match=rf"{kept}, .*, is gone; the sweep's command keeps them there again"):
        lab.train(spec)
    assert not lab.directory(spec).path.exists()
    assert starting(lab, source.path) == spec and lab.train(spec).finished
    kept.write_bytes(content)
    assert starting(lab, source.path) == spec and bytes(content) != kept.read_bytes()


def test_a_source_that_is_no_finished_run_is_refused_by_its_key(lab, source, tmp_path):
    left = lab.train(lab.spec(seed=5), steps=6)
    study = StudyFolder.of(lab.pool, "two")
    study.write([source.run_id, left.run_id])
    empty = lab.train(lab.spec(seed=6), steps=1)
    shutil.rmtree(empty.path / "checkpoints")
    altered = tmp_path / "altered"
    shutil.copytree(source.checkpoints()[-1], altered)
    (altered / checkpoint.MODEL).write_bytes(b"")
    for folder, message in {
        left.path: f"this run is interrupted and has not reached its last step;\nname the checkpoint that is meant, e.g. "
        f"init=ckpt:{left.checkpoints()[-1]} (step 6)",
        empty.path: "this run is interrupted and has not reached its last step;\nit left no checkpoint; name a run that "
        "has ended",
        study.path: f" is a study of 2 runs, and a run starts from one run's weights;\ngive one of them: "
        f"ckpt:{source.path}, ckpt:{left.path}",
        tmp_path / "none": "no checkpoint at ",
        altered: "is missing, truncated or altered",
    }.items():
        with pytest.raises(ValueError) as caught:
            found(source=f"ckpt:{folder}")
        assert str(caught.value).startswith(f"init=ckpt:{folder}") and message in str(caught.value)
    study.write([source.run_id])
    assert found(source=f"ckpt:{study.path}").spec.label == f"{source.run_id} at step 12"
    with pytest.raises(ValueError, match=f"but init.sha256 is\n{'0' * 64}"):
        found(source=f"ckpt:{source.path}", sha256="0" * 64)


def test_runs_with_other_weights_are_never_pooled(lab, source):
    """One learning rate, two seeds, three beginnings: three curves, each of two runs."""
    from analysis.study.load import load as load_study
    from stability.runs.results import write

    other = lab.train(lab.spec(seed=7))
    beginnings = [
        {},
        *({"weights": starting(lab, each.path).weights.model_dump(mode="json")} for each in (source, other)),
    ]
    runs = [lab.train(lab.spec(seed=seed, **each)) for each in beginnings for seed in (0, 1)]
    study = StudyFolder.of(lab.pool, "mixed")
    study.write([run.run_id for run in runs])
    write(collect(study.path), study.results)
    loaded = load_study(study.path)
    hashes = [each["weights"]["sha256"][:12] for each in beginnings[1:]]
    assert {series: list(loaded.of(series)["run_id"]) for series in loaded.series} == {
        "sa": [run.run_id for run in runs[:2]],
        f"sa init={hashes[0]}": [run.run_id for run in runs[2:4]],
        f"sa init={hashes[1]}": [run.run_id for run in runs[4:]],
    }
