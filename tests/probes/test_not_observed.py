"""`stability.probe` and layers of somebody's own: what they expose is measured, what exposes nothing is named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from stability import hessian, registry
from stability.probe import main
from stability.probes.layers.attention import attention_statistics
from stability.probes.layers.measuring import layer_inputs, read_held_out
from stability.probes.layers.observing import list_observable, say_whose_logits_are_unknown
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.mechanisms.names import ATTENTION, SOFTMAX, UNTRAINED, listed
from tests.mechanisms.plugins.unseen_sigmoid import SigmoidAttention

SIGMOID, SEEN = "tests.mechanisms.plugins.unseen_sigmoid", "tests.mechanisms.plugins.sigmoid_seen"
COUNTING = "tests.mechanisms.plugins.counting"
LANES = "tests.residuals.plugins.two_lanes"
SMALL = {"spectra": ["sequences=2", "probes=2", "products=4", "device=cpu"], "qk": []}
SMALL["pdmm"] = ["sequences=2", "iterations=3", "device=cpu"]
SMALL["streams"] = ["sequences=1", "device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of softmax attention, of sigmoid attention that exposes nothing or its weights, of a pattern, of streams."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    mixed = {"name": "mix", "pattern": ["sa", "unseen_sigmoid"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_plugins", dict(registry._plugins))
        for module in (SIGMOID, SEEN, LANES):
            registry.add_plugin(module)
        runs = {"sa": lab.train(lab.spec()), "mix": lab.train(lab.spec(plugins=[SIGMOID], mechanism=mixed))}
        runs["sigmoid"] = lab.train(lab.spec(plugins=[SIGMOID], mechanism={"name": "unseen_sigmoid"}))
        runs["seen"] = lab.train(lab.spec(plugins=[SEEN], mechanism={"name": "sigmoid_seen"}))
        runs["lanes"] = lab.train(lab.spec(plugins=[LANES], residual={"name": "two_lanes"}))
        yield lab, runs


def study_of(lab, name, *directories):
    study = StudyFolder.of(lab.pool, name)
    study.write([directory.run_id for directory in directories])
    return study


def tables_of(directory):
    return sorted(path.name for path in (directory.path / "probes").glob("*"))


@pytest.mark.parametrize("what", ["spectra", "qk", "pdmm"])
def test_attention_without_a_softmax_gets_no_softmax_spectra(trained, capsys, what):
    """It has ``qkv`` and ``heads``, by which it was taken for softmax attention."""
    _, runs = trained
    argv = [f"what={what}", f"ckpt={runs['sigmoid'].path}", *SMALL[what]]
    if what == "spectra":
        with pytest.raises(ValueError) as caught:
            main(argv)
        reason = "unseen_sigmoid has neither consensus nor softmax-attention layers"
        observed = {*ATTENTION, "sc", "sigmoid_seen"} - {*UNTRAINED}  # a plugin is named like one of ours
        looks = f"what=spectra looks at {listed(*observed)}"
        assert str(caught.value) == f"not observed: unseen_sigmoid; {reason}; {looks}"
    else:
        assert main(argv) == 0
        said = capsys.readouterr().out
        why = " without qk_norm, whose logits are bilinear in W_q and W_k" if what == "qk" else ""
        assert said.startswith(f"not observed: unseen_sigmoid; what={what} looks at {listed(*SOFTMAX)}{why}\n")
        assert "leaves out" not in said
    assert tables_of(runs["sigmoid"]) == []


@pytest.mark.parametrize("what", ["spectra", "qk", "pdmm"])
def test_a_study_names_what_is_not_observed_and_measures_the_rest(trained, capsys, what):
    lab, runs = trained
    unknown = "unseen_sigmoid" if what == "spectra" else "unseen_sigmoid, sigmoid_seen"
    study = study_of(lab, what, runs["sa"], runs["sigmoid"], runs["seen"], runs["mix"])
    assert main([f"what={what}", f"ckpt={study.path}", *SMALL[what]]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"not observed: {unknown}; what={what} looks at ") and "leaves out" not in said
    rows = pd.read_parquet(study.results / f"{'discrepancy' if what == 'pdmm' else what}.parquet")
    found = {(run_id, layer, mixer) for run_id, layer, mixer in rows[["run_id", "layer", "mixer"]].to_numpy()}
    measured = {("sa", 0, "sa"), ("sa", 1, "sa"), ("mix", 0, "sa")}
    if what == "spectra":
        measured |= {("seen", 0, "sigmoid_seen"), ("seen", 1, "sigmoid_seen")}
    assert found == {(runs[name].run_id, layer, mixer) for name, layer, mixer in measured}


def test_spectra_of_exposed_weights_are_those_of_the_sigmoids_written_out(trained, capsys):
    lab, runs = trained
    directory = runs["seen"]
    assert main(["what=spectra", f"ckpt={directory.path}", "phase=earliest", *SMALL["spectra"]]) == 0
    said = capsys.readouterr().out
    assert "Attention as a filter, earliest checkpoint" in said and "oftmax" not in said
    spec, model = checkpoint.load(directory.checkpoints()[0])
    model = model.double()
    x_BND = layer_inputs(model, read_held_out(spec, lab.cache, 2).split(1)[1])[1]
    layer, width = model.blocks[1].mixer, 8
    with torch.no_grad():
        q, k, v = (part[:, width:].numpy() for part in layer.qkv(x_BND)[0].split(16, -1))
    a = 1 / (1 + np.exp(-q @ k.T / np.sqrt(width)))
    centre = np.eye(len(a)) - 1 / len(a)
    rows = pd.read_parquet(directory.probe_file("earliest", "spectra"))
    row = rows.query("sequence == 1 and layer == 1 and head == 1")
    assert row["gain"].item() == pytest.approx(np.linalg.norm(centre @ a @ centre, 2), rel=1e-6)
    assert row["variance_before"].item() == pytest.approx(np.square(centre @ v).sum(), rel=1e-6)
    assert row["variance_after"].item() == pytest.approx(np.square(centre @ a @ v).sum(), rel=1e-6)
    assert row["second_eigenvalue"].isna().item(), "no row sums to 1, so that no eigenvalue is the constants'"


def test_logits_and_entropies_are_of_softmax_attention_alone(trained):
    from stability.mechanisms import build
    from stability.mechanisms._base import MixerShape

    layers = nn.ModuleList([SigmoidAttention(None, MixerShape(8, 2)), build("sa", width=8, heads=2)])
    x_BND = torch.randn(1, 5, 8)
    assert list(attention_statistics(layers, lambda: [layer(x_BND) for layer in layers])) == ["1"]


SHARPNESS = ["measure=[alpha_max,sharpness]", "state=[paper]", "warmup_batches=1", "warmup_steps=1", "recorded_steps=1"]
SHARPNESS += ["batch=2", "device=cpu", "spectra.trace_products=6", "spectra.noise_batches=2", "spectra.noise_parts=2"]


@pytest.mark.parametrize("is_study", [True, False])
def test_the_largest_logit_is_left_empty_where_a_layer_is_not_observed_which_is_named(trained, capsys, is_study):
    lab, runs = trained
    study = study_of(lab, "sharp", runs["mix"], runs["sa"], runs["sigmoid"])
    place = study.path if is_study else runs["mix"].checkpoints()[-1]
    assert hessian.main([f"ckpt={place}", *SHARPNESS]) == 0
    said = capsys.readouterr().out
    looks = f"measure=sharpness looks at {listed(*SOFTMAX)}"
    lacking = "so their runs get no attention_logit_max and no attention_entropy"
    assert said.startswith(f"not observed: unseen_sigmoid, {lacking}; {looks}\n")
    seen = {"mix": False, "sigmoid": False, "sa": True} if is_study else {"mix": False}
    for name, is_seen in seen.items():
        row = pd.read_parquet(runs[name].curvature_file("terminal_sharpness")).iloc[0]
        assert row[["attention_logit_max", "attention_entropy"]].notna().tolist() == [is_seen, is_seen]
        assert np.isfinite(row.sharpness)


@pytest.mark.parametrize(
    ("mechanism", "unknown"),
    [
        ({"name": "sa"}, ()),
        ({"name": "mix", "pattern": ["sw", "sc"]}, ()),
        ({"name": "mix", "pattern": ["attentionx", "sigmoid_seen"]}, ("sigmoid_seen",)),
        ({"name": "two_way", "of": "sa"}, ()),
        ({"name": "two_way", "of": "counting"}, ("counting",)),
    ],
)
def test_layers_within_others_are_looked_at_for_logits(trained, capsys, mechanism, unknown):
    registry.add_plugin(COUNTING)
    registry.add_plugin(SEEN)
    spec = trained[0].spec(plugins=[COUNTING, SEEN], mechanism=mechanism)
    assert list_observable(spec, "sharpness").not_observed == unknown
    say_whose_logits_are_unknown([spec])
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"not observed: {name}" for name in unknown
    ]


def test_a_residual_scheme_that_says_nothing_of_its_streams_is_named(trained):
    """Its ``coefficients`` are no mixing matrices."""
    lab, runs = trained
    looks = "what=streams looks at hc, mhc, mhc_lite"
    for alone in ([runs["lanes"]], [runs["lanes"], runs["sa"]]):
        study = study_of(lab, f"streams_{len(alone)}", *alone)
        single = "residual=identity has a single stream; " if len(alone) > 1 else ""
        with pytest.raises(ValueError) as caught:
            main(["what=streams", f"ckpt={study.path}", *SMALL["streams"]])
        assert str(caught.value) == f"not observed: two_lanes; {single}{looks}"
    assert tables_of(runs["lanes"]) == []
