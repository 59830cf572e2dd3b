"""What is measured of a run with dropout is measured with nothing dropped: α_max along the step that its optimizer
takes by the dropped gradient, samples, validation of a checkpoint."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch

from analysis.study.load import load
from analysis.study.protocol import describe_protocol
from stability.build import build_model
from stability.config.base import validate
from stability.config.generation import GenerateSpec
from stability.curvature import directional
from stability.curvature._differences import PARITY_EPSILON
from stability.probes.checkpoints import Loaded, corpus_of
from stability.probes.curvature.checkpoint_descent import Probe
from stability.probes.generation.tokens import Source
from stability.runs.results import collect, write
from stability.runs.study import StudyFolder
from stability.training import checkpoint
from tests.conftest import TINY, Lab
from tests.probes.test_alpha_max import SHORT, ByHand, assert_rows, measured

SIZE = {**TINY["model"], "dropout": 0.3}


class ByHandDropped(ByHand):
    """The protocol by hand, but that the optimizer's own gradients are taken in training mode, whose masks come from
    the global generator, seeded by the batch's number. What is measured along its steps stays as it is."""

    drops = False

    def loss(self, theta, index):
        if not self.drops:
            return super().loss(theta, index)
        digest = hashlib.sha256(f"{SHORT.seed}/curvature/dropout/0/{index}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self.model.train()
            loss = super().loss(theta, index)
            self.model.eval()
        return loss

    def start(self, state):
        self.drops = True
        super().start(state)
        self.drops = False

    def direction(self, theta, index):
        self.drops = True
        direction = super().direction(theta, index)
        self.drops = False
        return direction


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("dropout"))
    spec = lab.spec(model=SIZE, lr_peak=3e-3, evaluation={"every_steps": 12, "sequences": 8})
    return lab, spec, *measured(lab, spec)


@pytest.mark.parametrize("state", ["paper", "checkpoint"])
def test_the_rows_are_those_of_the_loss_without_dropout_along_the_step_with_it(trained, state):
    lab, spec, directory, table = trained
    by_hand = ByHandDropped(lab, directory, spec)
    by_hand.clipped_slope = state == "paper"
    assert_rows(table, by_hand, state)


def probe_of(trained, **changes):
    """A probe of the checkpoint, and the steps that it records."""
    lab, _, directory, _ = trained
    steps = []
    probe = Probe(
        Loaded.read(directory.checkpoints()[-1], lab.cache),
        SHORT.model_copy(update=changes),
        torch.device("cpu"),
        observe=lambda step: steps.append(step) or {},
    )
    return probe, steps


def test_measured_twice_it_is_the_same_whatever_was_drawn_between(trained):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        probe, _ = probe_of(trained)
        found.append([row for row in probe.rows("checkpoint") if row is not None])
    assert found[0] == found[1]


def test_along_the_same_step_a_model_without_dropout_has_the_same_numbers(trained):
    """Of the loss nothing is dropped, by its exact derivatives bit for bit, by the paper's difference up to rounding."""
    lab, spec, _, _ = trained
    probe, steps = probe_of(trained, parity_steps=4)
    rows = [row for row in probe.rows("checkpoint") if row is not None]
    plain = build_model(lab.spec(), probe.corpus.format)
    for number, (row, step) in enumerate(zip(rows, steps, strict=True)):
        examples = probe.descent.examples(SHORT.warmup_batches + SHORT.warmup_steps + number)

        def loss(params, examples=examples):
            total, count = probe.objective.loss(plain, examples, params)
            return total.double() / count  # as the probe divides

        exact = directional(loss, step.params, step.direction, row["method"])
        assert (row["loss_before"], row["slope"], row["curvature"]) == (exact.loss, exact.slope, exact.curvature)
        difference = directional(loss, step.params, step.direction, "parity")
        # the probe's gradient is of the sum, this one of the mean: 8 float32 roundings (`_ROUNDINGS`) over the paper's ε
        rounding = 8 * 2**-24 * abs(exact.slope) / PARITY_EPSILON
        assert row["parity_curvature"] == pytest.approx(difference.curvature, rel=0, abs=rounding)


def test_a_microbatched_step_takes_the_gradient_of_its_own_masks(trained):
    """Two halves are two microbatches, of which the first draws as the whole batch's first rows do not."""
    directions = []
    for rows in (None, 2):
        probe, steps = probe_of(trained, microbatch=rows, recorded_steps=1)
        assert len([row for row in probe.rows("checkpoint") if row is not None]) == 1
        directions.append(torch.cat([part.flatten() for part in steps[0].direction.values()]))
    assert not torch.allclose(*directions, rtol=1e-2)


def test_a_gradient_that_is_not_finite_only_where_something_is_dropped_allows_no_step(trained):
    probe, _ = probe_of(trained)
    dropped, first = probe.descent.stepped_by, SHORT.warmup_batches + SHORT.warmup_steps

    def broken(index):
        assert dropped is not None
        return {name: part if index < first else part * math.nan for name, part in dropped(index).items()}

    probe.descent.stepped_by = broken
    row, *_ = [row for row in probe.rows("paper") if row is not None]
    assert (row["method"], row["note"]) == ("none", "the gradient is not finite where something is dropped")


def test_samples_are_those_of_a_model_without_dropout_and_the_same_twice(trained):
    lab, spec, directory, _ = trained
    corpus: Any = corpus_of(spec, lab.cache)
    _, model = checkpoint.load(directory.checkpoints()[-1])
    plain = build_model(lab.spec(), corpus.format)
    plain.load_state_dict(model.state_dict())
    drawn = []
    for read in (model, model, plain):
        asked = validate(GenerateSpec, {"ckpt": "x", "num": 3, "device": "cpu"})
        source = Source(spec, read, corpus, asked, "top_prob", torch.device("cpu"))
        tokens = source.start(range(3))
        list(source.steps(tokens))
        drawn.append(tokens)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_captions_say_what_the_step_and_what_the_loss_was_made_with(trained):
    lab, _, directory, _ = trained
    plain, _ = measured(lab, lab.spec(), SHORT.model_copy(update={"recorded_steps": 1}))
    lines = []
    for name, run in (("dropped", directory), ("plain", plain)):
        study = StudyFolder.of(lab.pool, name)
        study.write([run.run_id])
        write(collect(study.path), study.results)
        lines.append(describe_protocol(load(study.path).curvature))
    said = "; u by gradients with dropout 0.3, the loss along it without; clipping norm 1;"
    assert said in lines[0] and "dropout" not in lines[1]
