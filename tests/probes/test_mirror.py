"""`stability.probe what=mirror`: rows against a slow loop on the trained model, a model that is blind to order, what
lands on disk, and what a mistake is told."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from stability.build import build_model, build_objective
from stability.config.base import validate
from stability.config.entries import ProbeSpec
from stability.models.passes import generator_for
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.nll import mirror_numbers
from stability.runs.directory import read_jsonl
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from stability.training.evaluate import VALIDATION_SEED
from tests.conftest import Lab
from tests.objectives.test_recall import recall_spec
from tests.probes.proteins import ProteinLab
from tests.within import assert_within

QUICK = ["what=mirror", "device=cpu"]
PROBE = validate(ProbeSpec, {"what": "mirror", "ckpt": "x", "device": "cpu"})
UNIT = 2.0**-23  # twice the rounding of float32: of the examples' weights, and of their sum
BLIND = {"name": "sc", "rope": "none"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    parts = {"sa": {"name": "sa"}, "blind": BLIND}
    runs = {name: lab.train(lab.spec(mechanism=mechanism, lr_peak=0.03)) for name, mechanism in parts.items()}
    runs["ar"] = lab.train(lab.spec(mechanism={"name": "sa"}, objective={"name": "ar"}, lr_peak=0.03))
    study = StudyFolder.of(lab.pool, "two")
    study.write([runs[name].run_id for name in parts])
    return lab, runs, study


def row_of(directory):
    assert main([*QUICK, f"ckpt={directory.path}"]) == 0
    (row,) = pd.read_parquet(directory.probe_file("terminal", "mirror")).to_dict("records")
    return row


def last_val_nll(directory):
    return [row["val_nll"] for row in read_jsonl(directory.metrics_file) if row.get("val_nll") is not None][-1]


def loop_nll(model, objective, tokens_BN, *, backwards):
    """Of masked windows, one by one, read backwards by turning Python lists: nats of the hidden tokens, the mean of each
    window's mean."""
    inputs_BN = objective.examples(tokens_BN, generator_for(VALIDATION_SEED, "validation", 0)).inputs_BN
    means = []
    for seen, tokens in zip(inputs_BN.tolist(), tokens_BN.tolist(), strict=True):
        seen, tokens = (row[::-1] if backwards else row for row in (seen, tokens))
        with torch.no_grad():
            (logits_NV,) = model(torch.tensor([seen])).tolist()
        nats = [
            math.log(math.fsum(map(math.exp, logits_V))) - logits_V[token]
            for logits_V, token, is_seen in zip(logits_NV, tokens, seen, strict=True)
            if is_seen == objective.mask_id
        ]
        means.append(math.fsum(nats) / len(nats))
    return math.fsum(means) / len(means)


@pytest.mark.parametrize("name", ["sa", "blind"])
def test_both_nlls_are_those_of_a_slow_loop_in_float64(trained, name):
    lab, runs, _ = trained
    spec, model = checkpoint.load(runs[name].checkpoints()[-1])
    corpus = corpus_of(spec, lab.cache)
    found = mirror_numbers(spec, model.double(), corpus, PROBE)
    tokens_BN = corpus.windows("val", spec.evaluation.sequences, spec.model.positions)
    objective = build_objective(spec, corpus.format)
    for column, backwards in (("nll", False), ("mirrored_nll", True)):
        truth = loop_nll(model, objective, tokens_BN, backwards=backwards)
        assert_within(abs(found[column] - truth), UNIT * truth, column)
    assert found["difference"] == found["mirrored_nll"] - found["nll"] and found["sequences"] == len(tokens_BN) == 8


def test_consensus_without_rotation_has_the_same_nll_on_the_mirror_image_to_rounding_and_attention_has_not(trained):
    lab, runs, _ = trained
    differences = {}
    for name in ("sa", "blind"):
        spec, model = checkpoint.load(runs[name].checkpoints()[-1])
        differences[name] = mirror_numbers(spec, model.double(), corpus_of(spec, lab.cache), PROBE)["difference"]
    assert_within(abs(differences["blind"]), 1e-12)
    assert abs(differences["sa"]) > 1e-4, "twelve steps on a page of text"


@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_consensus_of_rotated_embeddings_is_not_exactly_symmetric(lab, rope):
    spec = lab.spec(mechanism=BLIND | {"rope": rope})
    corpus = corpus_of(spec, lab.cache)
    torch.manual_seed(0)
    model = build_model(spec, corpus.format).double()
    assert abs(mirror_numbers(spec, model, corpus, PROBE)["difference"]) > 1e-9


def test_a_study_is_measured_collected_and_printed_and_skipped_the_second_time(trained, capsys):
    _, runs, study = trained
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    assert "NLL of mirrored examples, terminal checkpoint" in capsys.readouterr().out
    rows = pd.read_parquet(study.results / "mirror.parquet").set_index("run_id")
    assert ["run_id", *rows.columns] == PROBE_COLUMNS["mirror"] and len(rows) == 2
    for name in ("sa", "blind"):
        row = rows.loc[runs[name].run_id]
        assert row.nll == last_val_nll(runs[name]) and row.difference == row.mirrored_nll - row.nll
        assert (row.phase, row.lr, row.sequences) == ("terminal", 0.03, 8)
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    assert "skips 2 of 2: measured already" in capsys.readouterr().out


def test_a_single_checkpoint_and_an_autoregressive_run_are_measured(trained, capsys):
    _, runs, _ = trained
    assert main([*QUICK, f"ckpt={runs['sa'].checkpoints()[0]}"]) == 0
    assert "NLL of mirrored examples, earliest checkpoint" in capsys.readouterr().out
    row = row_of(runs["ar"])
    assert row["nll"] == last_val_nll(runs["ar"]) and row["difference"] != 0


def test_proteins_are_measured_with_their_contexts(tmp_path):
    lab = ProteinLab(tmp_path)
    directory = lab.train(lab.spec(contexts=("ss", "sasa"), mechanism={"name": "sa"}))
    row = row_of(directory)
    assert row["nll"] == last_val_nll(directory) and row["difference"] != 0


def test_a_run_of_recall_is_refused_in_a_line(lab):
    directory = lab.train(recall_spec(lab, steps=4))
    with pytest.raises(
        ValueError, match="what=mirror reads a text backwards; objective=recall has no mirror image"
    ) as caught:
        main([*QUICK, f"ckpt={directory.path}"])
    assert len(str(caught.value).splitlines()) == 1
    assert not (directory.path / "probes").exists()
