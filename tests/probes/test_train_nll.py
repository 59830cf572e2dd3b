"""`stability.probe what=train_nll`: both NLLs against a slow loop in float64, the side and the number of the windows, and
what lands on disk."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from stability.config.base import validate
from stability.config.entries import ProbeSpec
from stability.corpora.tokens.corpus import Corpus
from stability.probe import main
from stability.probes.checkpoints import corpus_of
from stability.probes.layers.nll import train_numbers
from stability.runs.directory import read_jsonl
from stability.runs.schema import PROBE_COLUMNS
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import Lab
from tests.objectives.test_recall import recall_spec
from tests.objectives.test_sentence_pairs import PAIRS
from tests.probes.proteins import ProteinLab

QUICK = ["what=train_nll", "device=cpu"]
PROBE = validate(ProbeSpec, {"what": "train_nll", "ckpt": "x", "device": "cpu"})
WINDOW = 17  # 16 positions and the token that follows


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    ar = {"objective": {"name": "ar"}, "lr_peak": 0.03}
    dropped = {"model": {**lab.spec().model.model_dump(), "dropout": 0.5, "dropout_at": "branches"}}
    runs = {"sa": lab.train(lab.spec(**ar)), "dropout": lab.train(lab.spec(**ar, **dropped))}
    study = StudyFolder.of(lab.pool, "two")
    study.write([each.run_id for each in runs.values()])
    return lab, runs, study


def load(trained, name="sa"):
    lab, runs, _ = trained
    spec, model = checkpoint.load(runs[name].checkpoints()[-1])
    return spec, model, corpus_of(spec, lab.cache)


def halves(num_val=400, values=(1, 2)):
    """Byte tokens, below 100 alone in training and from 100 on alone held out. ``values``: seeds of the two sides."""
    train = np.random.default_rng(values[0]).integers(0, 100, 5000).astype(np.uint16)
    val = np.random.default_rng(values[1]).integers(100, 256, num_val).astype(np.uint16)
    named = {"description": "two alphabets", "num_train_documents": 1, "num_val_documents": 1}
    return Corpus.of(train, val, vocab_size=256, **named)


def loop_nll(model, tokens, number):
    """Plain cross entropy of the next token, in float64 by Python's own exp and log, over ``number`` windows of a list of
    tokens, spread evenly from its first to its last."""
    starts = [index * (len(tokens) - WINDOW) // (number - 1) for index in range(number)]
    nats = []
    for start in starts:
        seen, following = tokens[start : start + WINDOW - 1], tokens[start + 1 : start + WINDOW]
        with torch.no_grad():
            (logits_NV,) = model(torch.tensor([seen])).tolist()
        nats += [
            math.log(math.fsum(map(math.exp, logits_V))) - logits_V[token]
            for logits_V, token in zip(logits_NV, following, strict=True)
        ]
    return math.fsum(nats) / len(nats)


@pytest.mark.parametrize("name", ["sa", "dropout"])
@pytest.mark.parametrize("data", ["page", "two alphabets"])
def test_both_nlls_are_those_of_a_slow_loop_in_float64(trained, name, data):
    spec, model, corpus = load(trained, name)
    corpus = halves() if data == "two alphabets" else corpus
    found = train_numbers(spec, model.train(), corpus, PROBE)  # which drops nothing here
    assert model.embedding.weight.dtype == torch.float32
    model = model.double().eval()
    truth = {key: loop_nll(model, side.tolist(), 8) for key, side in (("train_nll", corpus.train_tokens), ("nll", corpus.val_tokens))}  # fmt: skip
    for key, value in truth.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key
    assert abs(truth["nll"] - truth["train_nll"]) > 1e-3 * truth["nll"], (
        "the sides must differ by more than the tolerance"
    )
    assert found["difference"] == found["nll"] - found["train_nll"] and found["sequences"] == 8


def test_the_training_nll_depends_on_the_training_side_alone(trained):
    spec, model, _ = load(trained)
    base, other_val, other_train = (
        train_numbers(spec, model, halves(values=values), PROBE) for values in ((1, 2), (1, 3), (4, 2))
    )
    assert other_val["train_nll"] == base["train_nll"] and other_val["nll"] != base["nll"]
    assert other_train["nll"] == base["nll"] and other_train["train_nll"] != base["train_nll"]


def test_there_are_as_many_training_windows_as_validation_has(trained):
    spec, model, _ = load(trained)
    corpus = halves(num_val=3 * WINDOW + 1)  # three windows of the eight that are wanted
    found = train_numbers(spec, model, corpus, PROBE)
    assert found["sequences"] == 3
    model = model.double().eval()
    assert found["train_nll"] == pytest.approx(loop_nll(model, corpus.train_tokens.tolist(), 3), rel=1e-5)


def test_a_study_is_measured_collected_and_printed_and_skipped_the_second_time(trained, capsys):
    _, runs, study = trained
    logs = {each.run_id: each.metrics_file.read_bytes() for each in runs.values()}
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    assert "Generalisation gap, terminal checkpoint" in capsys.readouterr().out
    rows = pd.read_parquet(study.results / "train_nll.parquet").set_index("run_id")
    assert ["run_id", *rows.columns] == PROBE_COLUMNS["train_nll"] and len(rows) == 2
    for directory in runs.values():
        row, logged = rows.loc[directory.run_id], list(read_jsonl(directory.metrics_file))
        assert row.nll == [each["val_nll"] for each in logged if each.get("val_nll") is not None][-1]
        assert (row.phase, row.lr, row.sequences) == ("terminal", 0.03, 8) and row.train_nll != logged[-1]["loss"]
        assert directory.metrics_file.read_bytes() == logs[directory.run_id]
    assert main([*QUICK, f"ckpt={study.path}"]) == 0
    assert "skips 2 of 2: measured already" in capsys.readouterr().out


def test_a_checkpoint_of_any_objective_is_measured(trained, lab, tmp_path, capsys):
    proteins = ProteinLab(tmp_path)
    for directory in (
        trained[1]["sa"],
        lab.train(recall_spec(lab, steps=4)),
        lab.train(lab.spec(objective={"name": "sentence_pairs", "loss": "mnrl"}, data=PAIRS)),
        proteins.train(proteins.spec(contexts=("ss", "sasa"), mechanism={"name": "sa"})),
    ):
        assert main([*QUICK, f"ckpt={directory.checkpoints()[-1]}"]) == 0
        assert "Generalisation gap, terminal checkpoint" in capsys.readouterr().out
        (row,) = pd.read_parquet(directory.probe_file("terminal", "train_nll")).to_dict("records")
        assert math.isfinite(row["train_nll"]) and row["difference"] == row["nll"] - row["train_nll"] != 0
