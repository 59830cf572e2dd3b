"""What the monitor says of steps that were skipped, broken or unusual, and of settings that do not fit."""

import inspect
import math

import pytest
import torch
from torch import nn

from stability.curvature import AlphaMaxMonitor, MonitorRow

from .nets import tiny, token_loss
from .test_monitor import Quadratic, energy, quadratic


def one_row(act, model=None, optimizer=None, **options):
    model = model or quadratic()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, energy, **options)
    with monitor.step(1.0):
        act(model, optimizer)
    return monitor.history[0]


def step(model, optimizer):
    energy(model, 1.0).backward()
    optimizer.step()


def test_a_step_that_was_skipped_is_a_row_that_says_so():
    row = one_row(lambda model, optimizer: None)
    assert row.method == "none"
    assert "optimizer.step() was not called" in row.note
    assert math.isnan(row.alpha_max)
    assert math.isnan(row.actual_change)
    model = quadratic()
    scaler = torch.amp.GradScaler("cpu")

    def overflow(model, optimizer):
        scaler.scale(energy(model, 1.0) * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "no step" in one_row(overflow, model).note


def test_a_rate_of_zero_and_a_gradient_of_zero_are_no_step():
    model = quadratic()
    row = one_row(step, model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert (row.method, row.note) == ("not defined", "the step is zero: no parameter changed, the learning rate is 0")
    still = Quadratic(torch.eye(2), torch.zeros(2))
    row = one_row(step, still)
    assert (row.method, row.note) == ("not defined", "the step is zero: no parameter changed")
    assert math.isnan(row.alpha_max) and math.isnan(row.alpha_max_over_lr)


def test_a_step_along_which_the_loss_does_not_change_is_neither_stable_nor_unstable():
    flat = Quadratic(torch.zeros(2, 2), torch.ones(2))
    row = one_row(step, flat, torch.optim.SGD(flat.parameters(), lr=0.5, weight_decay=1.0))
    assert (row.method, row.note, row.slope, row.curvature) == (
        "not defined",
        "the loss does not change along the step",
        0.0,
        0.0,
    )
    assert math.isnan(row.alpha_max) and row.actual_change == 0.0


def test_nan_is_reported_with_its_origin():
    def broken(model, optimizer):
        model.x.grad = torch.full_like(model.x, math.nan)
        optimizer.step()

    row = one_row(broken)
    assert all(
        math.isnan(value)
        for value in (row.slope, row.curvature, row.alpha_max, row.predicted_change, row.actual_change)
    )
    assert row.note == "direction['x'] is not finite"


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_rate_is_the_one_that_the_optimizer_used(when):
    def scheduled(model, optimizer):
        if when == "before":
            optimizer.param_groups[0]["lr"] = 0.05
        step(model, optimizer)
        if when == "after":
            optimizer.param_groups[0]["lr"] = 0.05

    assert one_row(scheduled).lr == (0.05 if when == "before" else 0.1)


def test_rates_of_several_groups_are_in_the_direction():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.3}]
    optimizer, x = torch.optim.SGD(groups), torch.randn(6, 3, dtype=torch.float64)
    monitor = AlphaMaxMonitor(model, optimizer, lambda model, x: model(x).square().mean())
    with monitor.step(x):
        model(x).square().mean().backward()
        optimizer.step()
    expected = -model.weight.grad.square().sum() - 3 * model.bias.grad.square().sum()
    assert monitor.history[0].lr == 0.1
    assert monitor.history[0].slope == pytest.approx(float(expected), rel=1e-9)
    assert monitor.history[0].predicted_change == pytest.approx(monitor.history[0].actual_change, rel=1e-9)


def test_two_optimizer_steps_in_one_block_are_announced():
    def twice(model, optimizer):
        step(model, optimizer)
        optimizer.step()

    assert one_row(twice).note == "optimizer.step() was called 2 times; u is their sum"


def test_frozen_and_tied_parameters():
    net, params, tokens = tiny()
    params["qkv.weight"].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = AlphaMaxMonitor(
        net, optimizer, lambda model, rows: token_loss(model, rows)(dict(model.named_parameters()))
    )
    with monitor.step(tokens):
        token_loss(net, tokens)(params).backward()
        squared = sum(float(param.grad.square().sum()) for param in params.values() if param.grad is not None)
        optimizer.step()
    assert monitor.history[0].slope == pytest.approx(-squared, rel=1e-9)


def test_an_exception_in_the_block_measures_nothing_and_leaves_the_monitor_usable():
    model = quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, energy)
    with pytest.raises(KeyError), monitor.step(1.0):
        raise KeyError
    assert monitor.history == []
    with monitor.step(1.0):
        step(model, optimizer)
    assert monitor.history[0].step == 0
    assert not optimizer._optimizer_step_pre_hooks


def test_no_curvature_is_an_infinite_alpha_max_without_a_note_as_the_help_says():
    """L = −x²/2 has the curvature −1: gradient descent from 2 steps along u = 2."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, lambda m, _: -m.weight.square().sum() / 2)
    with monitor.step(None):
        (-model.weight.square().sum() / 2).backward()
        optimizer.step()
    (row,) = monitor.history
    assert row.alpha_max == row.alpha_max_over_lr == math.inf and row.note is None
    assert (row.slope, row.curvature) == (pytest.approx(-4, rel=1e-5), pytest.approx(-4, rel=1e-5))
    said = " ".join(inspect.getdoc(MonitorRow).split())
    assert "α_max = ∞ is a result and has no note" in said and "not finite" not in said


def test_log_gets_every_row_as_a_dict():
    seen = []
    row = one_row(step, log=seen.append)
    assert seen == [row.__dict__]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"every": 0}, "every is 0"), ({"rows": 0}, "rows is 0"), ({"method": "exact"}, "method is 'exact'")],
)
def test_settings_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        one_row(step, **options)


def test_optimizers_of_other_tensors_are_refused():
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="holds no trainable parameter of the model"):
        one_row(step, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    model = quadratic()
    with pytest.raises(ValueError, match="holds 2 tensors that are not the model's"):
        one_row(step, model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))


def test_rows_need_a_batch_that_can_be_cut():
    with pytest.warns(RuntimeWarning, match="step 0 was not measured: rows= needs a batch"):
        row = one_row(step, rows=2)
    assert row.note.startswith("not measured: rows= needs a batch whose tensors share their first dimension")


def test_a_loss_that_is_no_tensor_is_a_note():
    model = quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, lambda model, batch: energy(model, batch).item())
    with pytest.warns(RuntimeWarning, match="loss_fn"), monitor.step(1.0):
        step(model, optimizer)
    assert monitor.history[0].note == (
        "not measured: loss_fn(model, batch) returns a scalar tensor or (sum, count); it returned a float"
    )
    assert (monitor.history[0].method, monitor.history[0].lr) == ("none", 0.1)


def test_a_first_group_at_rate_0_leaves_the_largest_rate_to_divide_by():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias], "lr": 0.3}]
    optimizer, x = torch.optim.SGD(groups), torch.randn(6, 3, dtype=torch.float64)
    monitor = AlphaMaxMonitor(model, optimizer, lambda model, x: model(x).square().mean())
    with monitor.step(x):
        model(x).square().mean().backward()
        optimizer.step()
    row = monitor.history[0]
    assert (row.lr, row.note) == (
        0.3,
        "the first parameter group's learning rate is 0; u is divided by the largest, 0.3",
    )
    assert row.slope == pytest.approx(-float(model.bias.grad.square()), rel=1e-9)
    assert row.alpha_max == pytest.approx(1.0)  # the second derivative by the bias is 2


def test_the_error_bar_of_differences_is_in_the_row():
    exact, row = one_row(step), one_row(step, method="finite_difference")
    assert exact.error_bar is None
    assert abs(row.curvature - exact.curvature) <= row.error_bar < 1e-3 * exact.curvature


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_loss_that_adds_up_rows_is_named_where_the_batch_is_cut(rows, reduction):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    monitor = AlphaMaxMonitor(
        model,
        optimizer,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction),
        rows=rows,
    )
    with monitor.step(batch):
        nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
        optimizer.step()
    note = monitor.history[0].note
    assert ("loss_fn adds up the rows" in note) if reduction == "sum" else (note is None)


def test_a_step_that_is_mostly_rounding_says_so():
    model = quadratic(torch.float32)
    row = one_row(step, model, torch.optim.SGD(model.parameters(), lr=1e-7))
    assert "of this step is float rounding of the parameters" in row.note
    assert one_row(step, quadratic(torch.float32)).note is None
