"""The monitor beside a training loop: right numbers for the step that was taken, and not one bit of the training
changed."""

import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.curvature import AlphaMaxMonitor

from .nets import dense_hessian, flatten, tiny, token_loss


def noisy_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))


def batches(number=6, rows=8):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(number)
    ]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(monitored, every=1, rows=None, method="auto"):
    """Everything that training left behind, and the losses that it saw."""
    model = noisy_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, classify, every, rows, method=method) if monitored else None
    losses = []
    for batch in batches():
        with monitor.step(batch) if monitor else nullcontext():
            optimizer.zero_grad()
            loss = classify(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        losses.append(loss.item())
    left = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return left + moments, losses, monitor.history if monitor else []


@pytest.mark.parametrize("method", ["auto", "double_backward", "finite_difference"])
def test_training_is_bit_identical_with_and_without_the_monitor(method):
    plain, losses, _ = train(monitored=False)
    watched, watched_losses, history = train(monitored=True, rows=3 if method == "auto" else None, method=method)
    assert losses == watched_losses
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [row.step for row in history] == list(range(6))
    assert all(math.isfinite(row.curvature) for row in history)


def test_the_replay_meets_the_dropout_and_batch_norm_of_the_step():
    _, losses, history = train(monitored=True)
    assert [row.loss for row in history] == pytest.approx(losses, rel=1e-5)
    for row in history:
        assert row.actual_change == pytest.approx(row.predicted_change, rel=0.5)


class Quadratic(nn.Module):
    def __init__(self, matrix, start):
        super().__init__()
        self.matrix, self.x = matrix, nn.Parameter(start.clone())


def quadratic(dtype=torch.float64):
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return Quadratic(root @ root.T, torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=dtype))


def energy(model, scale):
    return scale * (model.x @ model.matrix @ model.x) / 2


def test_a_quadratic_gives_its_closed_form_and_the_prediction_is_exact():
    model = quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=0.01)
    monitor = AlphaMaxMonitor(model, optimizer, energy)
    for scale in (1.0, 2.0, 0.5):
        before = model.x.detach().clone()
        with monitor.step(scale):
            optimizer.zero_grad()
            energy(model, scale).backward()
            optimizer.step()
        u = (model.x.detach() - before) / 0.03
        slope, curvature = scale * u @ model.matrix @ before, scale * u @ model.matrix @ u
        row = monitor.history[-1]
        assert row.lr == 0.03
        assert row.slope == pytest.approx(float(slope), rel=1e-12)
        assert row.curvature == pytest.approx(float(curvature), rel=1e-12)
        assert row.alpha_max == pytest.approx(float(-2 * slope / curvature), rel=1e-12)
        assert row.alpha_max_over_lr == pytest.approx(row.alpha_max / 0.03, rel=1e-12)
        assert row.predicted_change == pytest.approx(row.actual_change, rel=1e-9)
        assert row.actual_change == pytest.approx(
            energy(model, scale).item() - scale * float(before @ model.matrix @ before) / 2, rel=1e-9
        )
        assert row.note is None


def test_adamw_on_a_transformer_equals_the_dense_hessian():
    net, params, tokens = tiny()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    monitor = AlphaMaxMonitor(
        net, optimizer, lambda model, rows: F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    )
    loss, start = token_loss(net, tokens), {name: param.detach().clone() for name, param in params.items()}
    hessian = dense_hessian(loss, start)
    with monitor.step(tokens):
        loss(params).backward()
        optimizer.step()
    u = (flatten(params) - flatten(start)) / 1e-3
    row = monitor.history[0]
    assert row.method == "taylor"
    assert row.curvature == pytest.approx(float(u @ hessian @ u), rel=1e-9)
    assert row.actual_change == pytest.approx((loss(params) - loss(start)).item(), rel=1e-9)


def test_every_third_step_is_measured_and_the_others_cost_nothing():
    model, calls = quadratic(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = AlphaMaxMonitor(model, optimizer, lambda model, batch: calls.append(batch) or energy(model, 1.0), every=3)
    for index in range(7):
        with monitor.step(index):
            optimizer.zero_grad()
            energy(model, 1.0).backward()
            optimizer.step()
    assert [row.step for row in monitor.history] == [0, 3, 6]
    assert set(calls) == {0, 3, 6}


def counted(model, batch):
    inputs, targets, weights = batch
    return (F.cross_entropy(model(inputs), targets, reduction="none") * weights).sum(), weights.sum()


def smooth_step(rows, scalar=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    inputs, targets = batches(1, rows=9)[0]
    batch = (
        inputs.double(),
        targets,
        torch.ones(9).double() if scalar else torch.tensor([1, 0, 0, 2, 1, 1, 0, 3, 1]).double(),
    )

    def mean(model, given):
        total, count = counted(model, given)
        return total / count

    monitor = AlphaMaxMonitor(model, optimizer, mean if scalar else counted, rows=rows)
    with monitor.step(batch):
        mean(model, batch).backward()
        optimizer.step()
    return monitor.history[0]


@pytest.mark.parametrize("scalar", [False, True], ids=["sum_and_count", "scalar"])
@pytest.mark.parametrize("rows", [1, 2, 9, 100])
def test_pieces_of_rows_give_the_whole_batch(rows, scalar):
    whole, pieces = smooth_step(None, scalar), smooth_step(rows, scalar)
    for name in ("loss", "slope", "curvature", "alpha_max", "predicted_change", "actual_change"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name), rel=1e-10)


def test_accumulated_batches_are_measured_as_the_one_step_that_they_make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, classify)
    losses = []
    for index, (inputs, targets) in enumerate(batches(4)):
        with monitor.step((inputs.double(), targets), accumulate=index % 2 == 0):
            loss = classify(model, (inputs.double(), targets)) / 2
            loss.backward()
            losses.append(loss.item())
            if index % 2:
                squared = sum(float(param.grad.square().sum()) for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        torch.rand(3)  # what a loader may draw in between
        if index % 2:
            assert monitor.history[-1].slope == pytest.approx(-squared, rel=1e-9)
    assert [row.loss for row in monitor.history] == pytest.approx([sum(losses[:2]), sum(losses[2:])], rel=1e-12)
    assert [row.step for row in monitor.history] == [0, 1]


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize("method", ["double_backward", "finite_difference"])
def test_draws_from_pythons_and_numpys_generators_repeat_and_go_on_as_without_the_monitor(draw, method):
    def noisy(model, batch):
        return energy(model, 1.0 + draw())

    def train(monitored):
        random.seed(0)
        np.random.seed(0)
        model, losses = quadratic(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = AlphaMaxMonitor(model, optimizer, noisy, method=method) if monitored else None
        for _ in range(3):
            with monitor.step(None) if monitor else nullcontext():
                optimizer.zero_grad()
                loss = noisy(model, None)
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses, draw(), [row.loss for row in monitor.history] if monitor else None

    (losses, drawn, _), (watched, drawn_after, measured) = train(False), train(True)
    assert (watched, drawn_after) == (losses, drawn)
    assert measured == pytest.approx(losses, rel=1e-12)
