from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from stability.config.curvature import CurvatureSpec
from stability.corpora.cache import load
from stability.models.passes import generator_for
from stability.probes.curvature.alpha_max import is_measured, measure, measure_checkpoint
from stability.runs.directory import read_jsonl
from stability.runs.schema import CURVATURE_COLUMNS
from stability.training import checkpoint
from tests.within import assert_within

SHORT = CurvatureSpec(warmup_batches=3, warmup_steps=2, recorded_steps=4)


def measured(lab, spec, curvature=SHORT):
    directory = lab.train(spec)
    for _ in measure(directory, curvature, cache_dir=lab.cache, device="cpu"):
        pass
    return directory, pd.read_parquet(directory.curvature_file("terminal"))


class ByHand:
    """The protocol once more in float64 and plain formulas: AdamW written out, derivatives along u by central
    differences of the loss."""

    def __init__(self, lab, directory, spec):
        self.spec, self.corpus = spec, load(lab.cache, spec.data_fingerprint)
        _, model = checkpoint.load(directory.checkpoints()[-1])
        self.model = model.double()
        self.theta = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.trainer = checkpoint.load_trainer(directory.checkpoints()[-1])
        self.decay = spec.optimizer.settings.weight_decay
        self.measured_decay, self.clipped_slope = True, False

    def loss(self, theta, index):
        generator = generator_for(SHORT.seed, "curvature", index)
        tokens = self.corpus.batch("train", self.spec.batch, self.spec.model.positions, generator)
        rates = ((torch.rand(1, generator=generator) + torch.arange(4) / 4) % 1)[
            torch.randperm(4, generator=generator)
        ].clamp(0.05, 0.95)
        draws = torch.rand(4, 16, generator=generator)
        masked = (draws < rates[:, None]) | (draws == draws.min(dim=1, keepdim=True).values)
        torch.nn.utils.vector_to_parameters(theta, self.model.parameters())
        logits = self.model(torch.where(masked, 256, tokens))
        return sum(F.cross_entropy(logits[row][masked[row]], tokens[row][masked[row]]) for row in range(4)) / 4

    def gradient(self, theta, index):
        gradient = torch.autograd.grad(self.loss(theta, index), tuple(self.model.parameters()))
        return torch.cat([g.flatten() for g in gradient])

    def clipped(self, theta, index):
        gradient = self.gradient(theta, index)
        return gradient * min(1.0, self.spec.clip_norm / (gradient.norm().item() + 1e-6))

    def start(self, state):
        if state == "paper":
            gradients = torch.stack([self.clipped(self.theta, index) for index in range(3)])
            self.m, self.v, self.count = gradients.mean(0), (gradients**2).mean(0), 3
        else:
            states = self.trainer["optimizer"]["state"]
            self.m = torch.cat([states[i]["exp_avg"].flatten() for i in range(len(states))]).double()
            self.v = torch.cat([states[i]["exp_avg_sq"].flatten() for i in range(len(states))]).double()
            self.count = int(states[0]["step"])

    def direction(self, theta, index):
        gradient = self.clipped(theta, index)
        self.count += 1
        self.m, self.v = 0.9 * self.m + 0.1 * gradient, 0.999 * self.v + 0.001 * gradient**2
        m, v = self.m / (1 - 0.9**self.count), self.v / (1 - 0.999**self.count)
        return -m / (v.sqrt() + 1e-8) - self.decay * theta

    def rows(self, state):
        self.start(state)
        theta = self.theta.clone()
        for index in range(3, 3 + SHORT.warmup_steps):
            theta = theta + self.spec.lr_peak * self.direction(theta, index)
        for index in range(3 + SHORT.warmup_steps, 3 + SHORT.warmup_steps + SHORT.recorded_steps):
            u = self.direction(theta, index)
            along = u if self.measured_decay else u + self.decay * theta
            h = 1e-3 / along.norm()
            with torch.no_grad():
                down, here, up = (self.loss(theta + t * along, index).item() for t in (-h, 0, h))
            slope, curvature = (up - down) / (2 * h.item()), (up - 2 * here + down) / h.item() ** 2
            if self.clipped_slope:
                slope *= (self.clipped(theta, index).norm() / self.gradient(theta, index).norm()).item()
            yield slope, curvature, here
            theta = theta + self.spec.lr_peak * u


def assert_rows(table, by_hand, state):
    """Compare a table's rows of a state with those by hand."""
    rows = table[table.state == state]
    for row, (slope, curvature, loss) in zip(rows.itertuples(), by_hand.rows(state), strict=True):
        assert row.loss_before == pytest.approx(loss, rel=1e-4)
        assert row.slope == pytest.approx(slope, rel=5e-3)
        assert row.curvature == pytest.approx(curvature, rel=2e-2)
        expected = 0.0 if slope >= 0 else math.inf if curvature <= 0 else -2 * slope / curvature
        assert row.alpha_max == pytest.approx(expected, rel=3e-2)


@pytest.mark.parametrize("state", ["paper", "checkpoint"])
def test_rows_are_those_of_the_protocol_written_out_by_hand(lab, state):
    spec = lab.spec(lr_peak=3e-3, evaluation={"every_steps": 12, "sequences": 8})
    directory, table = measured(lab, spec)
    by_hand = ByHand(lab, directory, spec)
    by_hand.clipped_slope = state == "paper"
    assert_rows(table, by_hand, state)


def test_the_rate_is_that_of_the_schedule_where_the_checkpoint_stands(lab):
    directory, table = measured(lab, lab.spec(schedule={"name": "cosine", "warmup_steps": 0, "final_ratio": 0.1}))
    last = list(read_jsonl(directory.metrics_file))[-1]["lr"]
    assert last < 0.5 * lab.spec().lr_peak
    assert set(table.lr) == {last}


def test_the_table_names_its_phase_state_method_and_check(lab):
    directory, table = measured(lab, lab.spec(mechanism={"name": "sw"}))
    assert list(table.columns) == CURVATURE_COLUMNS
    assert list(table.groupby("state").size().items()) == [("checkpoint", 4), ("paper", 4)]
    assert set(table.method) <= {"taylor", "double_backward"}
    assert set(table.phase) == {"terminal"}
    first = table[table.step == 0]
    assert_within(first.rel_error, 0.02, "the exact curvature agrees with central differences")
    assert table[table.step > 0].rel_error.isna().all()
    assert np.isfinite(table.loss_after).all()


def test_what_is_measured_is_not_measured_again_unless_the_protocol_changed(lab):
    directory, _ = measured(lab, lab.spec())
    assert is_measured(directory, SHORT)
    assert list(measure(directory, SHORT, cache_dir=lab.cache)) == []
    longer = SHORT.model_copy(update={"recorded_steps": 5})
    assert not is_measured(directory, longer)
    assert not is_measured(directory, SHORT.model_copy(update={"phase": "all"}))


def test_the_checkpoint_and_the_global_random_state_are_left_as_they_were(lab):
    directory = lab.train(lab.spec())
    before = {path: path.read_bytes() for path in directory.checkpoints()[-1].iterdir()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    for _ in measure(directory, SHORT, cache_dir=lab.cache, device="cpu"):
        pass
    assert torch.equal(torch.rand(3), expected)
    assert {path: path.read_bytes() for path in directory.checkpoints()[-1].iterdir()} == before


def test_steps_lost_to_a_non_finite_loss_stay_in_the_denominator(lab, monkeypatch):
    directory = lab.train(lab.spec())
    gradient = torch.nn.functional.cross_entropy

    def poisoned(*args, **kwargs):
        return gradient(*args, **kwargs) * float("nan")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", poisoned)
    for _ in measure(directory, SHORT, cache_dir=lab.cache, device="cpu"):
        pass
    table = pd.read_parquet(directory.curvature_file("terminal"))
    assert len(table) == 8
    assert table.alpha_max.isna().all()
    assert set(table.method) == {"none"}


def test_a_run_without_a_checkpoint_leaves_an_empty_table_that_counts_as_measured(lab):
    directory = lab.train(lab.spec(lr_peak=1e30, optimizer={"name": "sgd"}))
    assert directory.checkpoints() == []
    assert list(measure(directory, SHORT, cache_dir=lab.cache)) == []
    assert len(pd.read_parquet(directory.curvature_file("terminal"))) == 0
    assert is_measured(directory, SHORT)


def test_the_paper_state_is_left_out_where_the_optimizer_has_no_moments(lab):
    _, table = measured(lab, lab.spec(optimizer={"name": "sgd"}))
    assert set(table.state) == {"checkpoint"}


def test_earliest_and_any_single_checkpoint_can_be_measured(lab):
    directory = lab.train(lab.spec(checkpoint={"every_steps": 5}))
    for _ in measure(directory, SHORT.model_copy(update={"phase": "all"}), cache_dir=lab.cache, device="cpu"):
        pass
    assert {path.stem for path in (directory.path / "curvature").iterdir()} == {"earliest", "terminal"}
    folder = next(path for path in directory.checkpoints() if path.name == "step_000010")
    for _ in measure_checkpoint(folder, "step_000010", SHORT, cache_dir=lab.cache, device="cpu"):
        pass
    assert set(pd.read_parquet(directory.curvature_file("step_000010")).phase) == {"step_000010"}


def test_data_that_changed_since_the_run_is_refused(lab):
    import shutil

    directory = lab.train(lab.spec())
    shutil.rmtree(lab.cache)
    lab.text.write_text(lab.text.read_text().replace("wide", "vast"))
    with pytest.raises(ValueError, match="the run was trained on data .*\n.*data=text reads"):
        list(measure(directory, SHORT, cache_dir=lab.cache))


def test_a_finite_difference_is_recorded_as_such(lab):
    _, table = measured(lab, lab.spec(), SHORT.model_copy(update={"method": "finite_difference"}))
    assert set(table.method) == {"finite_difference"}


def test_along_sgds_step_the_slope_is_minus_the_squared_gradient_norm(lab):
    """Eq. 19: u = −∇L where no gradient is clipped, so ⟨∇L, u⟩ = −‖∇L‖²; the norm by autograd of the by-hand loss."""
    spec = lab.spec(optimizer={"name": "sgd"}, lr_peak=1e-2, clip_norm=1e9)
    directory, table = measured(lab, spec)
    by_hand = ByHand(lab, directory, spec)
    theta = by_hand.theta.clone()
    for index in range(3, 3 + SHORT.warmup_steps):
        theta = theta - spec.lr_peak * by_hand.gradient(theta, index)
    norm = by_hand.gradient(theta, 3 + SHORT.warmup_steps).norm().item()
    assert table.slope[0] == pytest.approx(-(norm**2), rel=1e-3)


def test_a_run_without_a_verdict_is_not_measured(lab):
    """What its last checkpoint gives now would pass for its terminal one later."""
    directory = lab.train(lab.spec(), steps=6)
    with pytest.raises(
        ValueError, match="is interrupted at step 6; α_max is measured on runs that reached their verdict"
    ):
        list(measure(directory, SHORT, cache_dir=lab.cache))
    assert not directory.curvature_file("terminal").exists()


def test_a_second_state_joins_the_first_and_another_protocol_replaces_it(lab):
    directory = lab.train(lab.spec())
    for states, expected in (
        (("paper",), {"paper"}),
        (("checkpoint",), {"paper", "checkpoint"}),
        (("paper",), {"paper", "checkpoint"}),
    ):
        for _ in measure(directory, SHORT.model_copy(update={"state": states}), cache_dir=lab.cache, device="cpu"):
            pass
        table = pd.read_parquet(directory.curvature_file("terminal"))
        assert set(table.state) == expected
        assert len(table) == 4 * len(expected)
    assert is_measured(directory, SHORT)
    for _ in measure(
        directory, SHORT.model_copy(update={"state": ("paper",), "batch": 2}), cache_dir=lab.cache, device="cpu"
    ):
        pass
    assert set(pd.read_parquet(directory.curvature_file("terminal")).state) == {"paper"}
