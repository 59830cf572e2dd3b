"""Recall: loss and accuracy against loops over the answers, nothing read elsewhere; a run from data to verdict, resumed
byte for byte; what is refused, in which words."""

from __future__ import annotations

import math
import shutil

import pandas as pd
import pytest
import torch

from stability.build import build_model, build_objective
from stability.config.curvature import CurvatureSpec
from stability.config.entries import ProbeSpec
from stability.config.generation import GenerationSpec
from stability.config.parse import parse
from stability.config.parts import validate_settings
from stability.config.sweep import SweepSpec
from stability.corpora.cache import load
from stability.corpora.questions.corpus import QuestionBatch
from stability.objectives.recall import Recall
from stability.probes.curvature.alpha_max import measure
from stability.probes.generation.generating import resolve_sampler
from stability.probes.layers import measuring
from stability.runs.directory import read_jsonl
from stability.runs.schema import RUNS_COLUMNS
from stability.training.evaluate import Validation
from tests.reading import compose
from tests.within import assert_within

VOCABULARY = 12
DATA = {"name": "mqar", "vocab_size": VOCABULARY, "length": 16, "pairs": 2, "queries": 4, "num": 3000, "held_out": 60}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def recall(**settings):
    return Recall(validate_settings("objectives", "recall", settings), VOCABULARY)


class Saying(torch.nn.Module):
    """A model that says the same logits whatever it reads."""

    def __init__(self, logits_BNV):
        super().__init__()
        self.logits_BNV = logits_BNV

    def forward(self, inputs_BN):
        return self.logits_BNV


def batch(num=5, positions=9):
    tokens, answers = torch.randint(VOCABULARY, (2, num, positions), generator=generator(1))
    return QuestionBatch(tokens, torch.where(torch.rand(answers.shape, generator=generator(2)) < 0.4, answers, -1))


def recall_spec(lab, **changes):
    given = {
        "objective": {"name": "recall"},
        "data": DATA,
        "model": {"name": "tiny", "layers": 2, "width": 16, "heads": 2, "positions": 16, "qk_bias": 0.0},
        "batch": 8,
        "evaluation": {"every_steps": 6, "sequences": 40},
    }
    return lab.spec(**(given | changes))


def test_loss_and_accuracy_are_those_of_a_loop_over_the_answers():
    given, objective = batch(), recall()
    logits = torch.randn(5, 9, VOCABULARY, generator=generator(3), dtype=torch.float64)
    examples = objective.examples(given, generator())
    total, count, others = objective.validate(Saying(logits), examples)
    nats, right, asked = 0.0, 0, 0
    for row, answers in enumerate(given.answers_BN.tolist()):
        for place, answer in enumerate(answers):
            if answer >= 0:
                scores = logits[row, place].tolist()
                nats += math.log(sum(map(math.exp, scores))) - scores[answer]
                right += scores.index(max(scores)) == answer
                asked += 1
    assert total.item() == pytest.approx(nats, rel=1e-6) and count.item() == asked
    assert others["val_accuracy"].item() == right
    assert torch.equal(examples.inputs_BN, given.tokens_BN)


def test_only_answers_have_a_gradient_and_what_is_elsewhere_can_be_right_for_nothing():
    given, objective = batch(), recall()
    examples = objective.examples(given, generator())
    logits = torch.randn(5, 9, VOCABULARY, generator=generator(3), requires_grad=True)
    objective.loss_sum(logits, examples)[0].backward()
    assert logits.grad is not None
    moved_BN = logits.grad.ne(0).any(-1)
    assert torch.equal(moved_BN, given.answers_BN >= 0)
    # where nothing is asked every target is guessed, and nothing is gained
    sure = torch.zeros(5, 9, VOCABULARY)
    sure[given.answers_BN < 0] = 50 * torch.eye(VOCABULARY)[0]
    sure[..., 1] -= 1
    found = objective.validate(Saying(sure), examples)
    others = objective.validate(Saying(sure * (given.answers_BN >= 0)[..., None]), examples)
    assert torch.equal(found[0], others[0]) and torch.equal(found[2]["val_accuracy"], others[2]["val_accuracy"])


def test_what_frequencies_reach_is_the_cross_entropy_of_the_answers(lab):
    spec = recall_spec(lab)
    corpus = load(lab.cache, spec.data_fingerprint)
    found = Validation(spec, corpus, build_objective(spec, corpus.format), torch.device("cpu")).unigram_nll(
        corpus.log_frequencies()
    )
    log_probs = corpus.log_frequencies().tolist()
    answers = corpus.windows("val", 40, 16).answers_BN
    asked = [answer for answer in answers.flatten().tolist() if answer >= 0]
    assert len(asked) == 160
    assert found == pytest.approx(-sum(log_probs[answer] for answer in asked) / 160, rel=1e-6)
    assert found == pytest.approx(math.log(6), rel=0.05), "six values"


def test_a_run_learns_to_recall_and_its_accuracy_is_in_metrics_and_tables(lab):
    evaluation = {"every_steps": 125, "sequences": 60}
    spec = recall_spec(lab, steps=250, batch=16, lr_peak=1e-2, evaluation=evaluation)
    directory = lab.train(spec)
    rows = [row for row in read_jsonl(directory.metrics_file) if row.get("val_accuracy") is not None]
    assert [row["step"] for row in rows] == [0, 125, 250]
    result = directory.status()["result"]
    assert result["val_accuracy"] == rows[-1]["val_accuracy"] > 0.9 > 0.4 > rows[0]["val_accuracy"]
    assert result["val_nll"] < 0.3 * result["unigram_nll"] and "val_accuracy" in RUNS_COLUMNS


@pytest.mark.parametrize("stop", [5, 11])
def test_a_resumed_run_is_an_undisturbed_one_byte_for_byte(lab, stop):
    spec = recall_spec(lab)
    directory = lab.train(spec)
    rows, weights = (
        directory.metrics_file.read_bytes(),
        (directory.checkpoints()[-1] / "model.safetensors").read_bytes(),
    )
    shutil.rmtree(directory.path)
    lab.train(spec, steps=stop)
    lab.train(spec)
    assert directory.metrics_file.read_bytes() == rows
    assert (directory.checkpoints()[-1] / "model.safetensors").read_bytes() == weights


def test_alpha_max_is_of_the_same_loss_and_that_of_differences(lab):
    spec = recall_spec(lab, steps=3)
    directory = lab.train(spec)
    curvature = CurvatureSpec(warmup_steps=1, warmup_batches=1, recorded_steps=2, parity_steps=0)
    for _ in measure(directory, curvature, cache_dir=lab.cache, device="cpu"):
        pass
    table = pd.read_parquet(directory.curvature_file("terminal"))
    assert len(table) == 4 and set(table["method"]) == {"taylor"}
    assert_within(table["rel_error"].dropna().to_numpy(), 1e-2)
    # before three steps of training the loss is still about that of a guess among all the values
    losses = table["loss_before"].to_numpy()
    assert losses.min() > 0.5 * math.log(6) and losses.max() < 2 * math.log(VOCABULARY)


def test_a_loss_in_chunks_is_the_whole_one_in_whichever_microbatches(lab):
    corpus = load(lab.cache, recall_spec(lab).data_fingerprint)
    model = build_model(recall_spec(lab), corpus.format).double()
    whole = None
    for chunk, rows in ((None, 12), (7, 12), (None, 5), (7, 1)):
        objective = recall(loss_chunk=chunk)
        examples = objective.examples(corpus.batch("train", 12, 16, generator()), generator())
        parts = [objective.loss(model, part) for part in examples.split(rows)]
        loss = float(sum(total for total, _ in parts) / sum(count for _, count in parts))
        whole = loss if whole is None else whole
        assert loss == pytest.approx(whole, rel=1e-12)


def test_probes_of_layers_read_questions_too_and_nothing_is_sampled(lab):
    spec = recall_spec(lab, steps=2)
    directory = lab.train(spec)
    for _ in measuring.measure(
        directory, ProbeSpec(what="qk", ckpt=str(directory.path), sequences=2, device="cpu"), cache_dir=lab.cache
    ):
        pass
    assert len(pd.read_parquet(directory.probe_file("terminal", measuring.TABLES["qk"][0])))
    with pytest.raises(ValueError, match="objective=recall predicts nothing that could be sampled"):
        resolve_sampler(spec, GenerationSpec(num=2))


REFUSED = [
    (
        ["objective=ar", "mechanism=sa", "data=mqar"],
        "objective=ar reads tokens, and data=mqar gives questions; objective=ar takes data=dna or hf or stdlib or text, "
        "data=mqar takes objective=recall",
    ),
    (["objective=recall", "mechanism=sa", "data=stdlib"], "objective=recall reads questions, and data=stdlib gives"),
    (["objective=recall", "mechanism=sa", "data=mqar", "data.pairs=40"], "data.pairs=40: a vocabulary of 64 has 31"),
    (["objective=recall", "mechanism=sa", "data=copy", "data.copied=40"], "data.length=64: 40 tokens and their copies"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_in_a_line(words, message):
    with pytest.raises(ValueError) as caught:
        parse(SweepSpec, {**compose("sweep", words), "name": "x"})
    assert str(caught.value).startswith(message) and len(str(caught.value).splitlines()) == 1
