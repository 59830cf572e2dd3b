"""`stability.probe what=quantization`: rows against a loop on rounded copies, phases before a decay, and refusals."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch

from stability.build import build_objective
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.measuring import read_held_out
from stability.runs.phases import phases
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from stability.training.evaluate import Validation
from tests.conftest import Lab

QUICK = ["what=quantization", "device=cpu", "bits=[8,3,2]", "groups=[0,5]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    wsd = {"schedule": {"name": "wsd", "decay_share": 0.25}, "checkpoint": {"every_steps": 3}, "lr_peak": 0.03}
    runs = [lab.train(lab.spec(**wsd, seed=seed)) for seed in (0, 1)]
    runs.append(lab.train(lab.spec(linear={"name": "bitnet"})))
    runs.append(lab.train(lab.spec(lr_peak=0.03, ffn={"name": "moe", "experts": 3})))
    study = StudyFolder.of(lab.pool, "wsd")
    study.write([run.run_id for run in runs[:2]])
    return lab, runs, study


OF_BLOCK = ("mixer.qkv", "mixer.out")
OF_FFN = ("ffn.hidden", "ffn.out")
OF_EXPERTS = tuple(f"ffn.experts.{index}.{name}" for index in range(3) for name in ("gate", "hidden", "out"))


def matrices_of(model) -> list[str]:
    """Names of the rounded maps, written out: no router, embedding or head."""
    of_ffn = OF_EXPERTS if hasattr(model.blocks[0].ffn, "experts") else OF_FFN
    return [f"blocks.{layer}.{name}" for layer in range(2) for name in (*OF_BLOCK, *of_ffn)]


def rounded_copy(model, bits: int, group: int):
    """The model with each matrix rounded in NumPy, entry by entry of its groups, in float64."""
    other, most = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for name in matrices_of(model):
        weight = other.get_submodule(name).weight
        values = weight.detach().double().numpy().copy()
        size = group or values.shape[1]
        for start in range(0, values.shape[1], size):
            part = values[:, start : start + size]
            steps = np.abs(part).max(axis=1, keepdims=True) / most
            values[:, start : start + size] = np.clip(np.rint(part / steps), -most, most) * steps
        weight.data.copy_(torch.from_numpy(values))
    return other


@pytest.mark.parametrize("run", [0, 3], ids=["mlp", "moe"])
def test_rows_are_those_of_rounded_copies(trained, run):
    lab, runs, _ = trained
    assert main([*QUICK, f"ckpt={runs[run].path}"]) == 0
    found = pd.read_parquet(runs[run].probe_file("terminal", "quantization"))
    assert list(found.columns) == PROBE_COLUMNS["quantization"] and len(found) == 6
    spec, model = checkpoint.load(runs[run].checkpoints()[-1])
    corpus = corpus_of(spec, lab.cache)
    validation = Validation(spec, corpus, build_objective(spec, corpus.format), torch.device("cpu"))
    nll = validation.measure(model)["val_nll"]
    for row in found.itertuples():
        expected = validation.measure(rounded_copy(model, int(row.bits), int(row.group)))["val_nll"]
        assert row.nll == pytest.approx(nll, rel=1e-6) and row.quantized_nll == pytest.approx(expected, rel=1e-5)
        assert row.difference == row.quantized_nll - row.nll
    worst = found.set_index(["bits", "group"]).loc[(2, 0)]
    assert worst["quantized_nll"] > worst["nll"] and worst["difference"] > 0  # two bits lose
    weights = sum(model.get_submodule(name).weight.numel() for name in matrices_of(model))
    branches = sum(p.numel() for name, p in model.named_parameters() if ".mixer." in name or ".ffn." in name)
    assert found["share"].iloc[0] == pytest.approx(weights / branches)


def test_the_layers_rows_are_relative_errors_and_moments(trained):
    _, runs, _ = trained
    assert main([*QUICK, f"ckpt={runs[0].path}"]) == 0
    found = pd.read_parquet(runs[0].probe_file("terminal", "quantization_layers"))
    assert list(found.columns) == PROBE_COLUMNS["quantization_layers"] and len(found) == 6 * 2 * 2
    _, model = checkpoint.load(runs[0].checkpoints()[-1])
    for layer, branch in ((layer, branch) for layer in range(2) for branch in ("mixer", "ffn")):
        own = found[(found["layer"] == layer) & (found["branch"] == branch) & (found["group"] == 0)].set_index("bits")
        weights = np.concatenate([
            each.weight.detach().double().numpy().ravel()
            for name, each in ((name, model.get_submodule(name)) for name in matrices_of(model))
            if name.startswith(f"blocks.{layer}.{branch}")
        ])  # fmt: skip
        assert own["rms"].iloc[0] == pytest.approx(np.sqrt((weights**2).mean()))
        assert own["kurtosis"].iloc[0] == pytest.approx((weights**4).mean() / (weights**2).mean() ** 2)
        assert 0 < own.loc[8, "error"] < own.loc[3, "error"] < own.loc[2, "error"]


def test_no_router_is_rounded(trained, monkeypatch):
    """Its weights at each measurement of the NLL, and those of an expert beside them."""
    _, runs, _ = trained
    seen, measure = [], Validation.measure

    def keep(self, model):
        seen.append(
            [model.get_submodule(f"blocks.0.ffn.{name}").weight.clone() for name in ("router", "experts.0.out")]
        )
        return measure(self, model)

    monkeypatch.setattr(Validation, "measure", keep)
    assert main(["what=quantization", "device=cpu", "bits=[4,2]", f"ckpt={runs[3].path}"]) == 0
    (router, expert), *others = seen
    assert len(others) == 4 and all(torch.equal(each, router) for each, _ in others)
    assert not any(torch.equal(each, expert) for _, each in others)


def test_a_layer_s_error_is_that_of_its_rounded_copy_on_the_trained_model_s_inputs(trained):
    lab, runs, _ = trained
    assert main([*QUICK, f"ckpt={runs[0].path}"]) == 0
    found = pd.read_parquet(runs[0].probe_file("terminal", "quantization_layers"))
    spec, model = checkpoint.load(runs[0].checkpoints()[-1])
    inputs = {}
    for layer, block in enumerate(model.blocks):
        block.ffn.register_forward_pre_hook(lambda module, args, layer=layer: inputs.update({layer: args[0]}))
    with torch.no_grad():
        read_held_out(spec, lab.cache, 2).logits(model)
        for row in found[found["branch"] == "ffn"].itertuples():
            layers = (
                each.blocks[row.layer].ffn for each in (model, rounded_copy(model, int(row.bits), int(row.group)))
            )
            y, rounded = (each(inputs[row.layer]).double().numpy() for each in layers)
            # a difference of two float32 outputs: known to a few of their ulps, whatever its size
            expected = pytest.approx(np.linalg.norm(rounded - y) / np.linalg.norm(y), rel=1e-4, abs=4 * 2**-23)
            assert row.error == expected


def test_the_model_is_the_same_afterwards(trained):
    """Also a second measurement of all: nothing stays rounded."""
    _, runs, _ = trained
    main([*QUICK, f"ckpt={runs[1].path}"])
    first = pd.read_parquet(runs[1].probe_file("terminal", "quantization"))
    main(["what=quantization", "device=cpu", "bits=[2,8,3]", "groups=[5,0]", f"ckpt={runs[1].path}"])
    second = pd.read_parquet(runs[1].probe_file("terminal", "quantization"))
    keys = ["bits", "group"]
    pd.testing.assert_frame_equal(*(each.sort_values(keys).reset_index(drop=True) for each in (first, second)))


def test_before_the_decay_is_the_last_checkpoint_at_the_peak_rate(trained):
    """12 steps, the last 3 of them decay; checkpoints at 3, 4 (first evaluation), 6, 9 and 12."""
    lab, runs, _ = trained
    found = phases(runs[0], "before_decay")
    assert {name: folder.name for name, folder in found.items()} == {"before_decay": "step_000009"}
    assert "before_decay" not in phases(runs[0], "all")
    assert phases(runs[2], "before_decay") == {}  # a constant rate
    stopped = lab.train(
        lab.spec(schedule={"name": "wsd", "decay_share": 0.25}, checkpoint={"every_steps": 3}, seed=7), steps=11
    )
    assert phases(stopped, "before_decay") == {}  # has not decayed yet


def test_a_study_s_verdicts_are_printed(trained, capsys):
    _, _, study = trained
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    capsys.readouterr()
    assert main([*QUICK, "phase=before_decay", f"ckpt={study.path}"]) == 0
    printed = capsys.readouterr().out
    assert "last checkpoint before the decay" in printed and "the decay makes quantisation worse" in printed
    assert "all seeds keep half of what the best rate learned at 0 of " in printed or "Undecided" in printed


def test_bitnet_is_refused(trained, entered):
    _, runs, _ = trained
    done = entered("stability.probe", "what=quantization", f"ckpt={runs[2].path}")
    assert done.returncode == 2 and "these runs have others: linear=bitnet" in done.stderr
