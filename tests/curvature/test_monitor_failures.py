"""Nothing that a replay raises ends a training, or changes it."""

import gc
import math
import warnings

import pytest
import torch
from torch import nn

from stability.curvature import AlphaMaxMonitor


def mean_square(model, x):
    return model(x).square().mean()


def train(loss_fn, steps=3, log=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, loss_fn, log=log, **options) if loss_fn else None
    for _ in range(steps):
        x = torch.randn(6, 3)
        if monitor:
            monitor.begin(x)
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
        if monitor:
            monitor.end()
    return [*model.parameters(), *(param.grad for param in model.parameters()), torch.get_rng_state()], model, monitor


def raising(error):
    def loss_fn(model, x):
        model.eval()
        torch.rand(3)
        mean_square(model, x)
        raise error

    return loss_fn


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "not measured: OutOfMemoryError: CUDA out of memory."),
        (ValueError("a label is out of range"), "not measured: a label is out of range"),
        (AssertionError(), "not measured: AssertionError: "),
        (KeyError("labels"), "not measured: KeyError: 'labels'"),
    ],
)
@pytest.mark.parametrize("method", ["auto", "finite_difference"])
def test_what_the_replay_raises_is_a_note_and_one_warning(error, note, method):
    plain, _, _ = train(None)
    with pytest.warns(RuntimeWarning) as given:
        watched, model, monitor = train(raising(error), method=method)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(module.training for module in model.modules())
    assert [row.note for row in monitor.history] == [note] * 3
    assert [row.lr for row in monitor.history] == [0.1] * 3
    assert all(math.isnan(row.alpha_max) for row in monitor.history)
    assert len([warning for warning in given if "AlphaMaxMonitor" in str(warning.message)]) == 1


def test_a_failure_in_the_first_batch_alone_leaves_the_others_measured():
    seen = []

    def loss_fn(model, x):
        seen.append(x)
        if seen[0] is x:
            raise RuntimeError("not this one")
        return mean_square(model, x)

    with pytest.warns(RuntimeWarning, match="step 0 was not measured: RuntimeError: not this one"):
        _, _, monitor = train(loss_fn)
    assert [row.note is None for row in monitor.history] == [False, True, True]


def test_a_copy_of_the_parameters_that_does_not_fit_is_a_note(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    plain, _, _ = train(None)
    monkeypatch.setattr("stability.curvature.monitor.StepUnderWay.__init__", full)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        watched, _, monitor = train(mean_square)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [row.note for row in monitor.history] == ["not measured: OutOfMemoryError: out of memory"] * 3


def test_a_log_that_fails_is_one_warning():
    def log(row):
        raise OSError("disk full")

    with pytest.warns(RuntimeWarning, match="log failed at step 0: OSError: disk full") as given:
        _, _, monitor = train(mean_square, log=log)
    assert len(given) == 1
    assert all(math.isfinite(row.alpha_max) for row in monitor.history)


def test_hooks_are_gone_after_each_step():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loss_fn in (mean_square, raising(ValueError("no"))):
            _, model, monitor = train(loss_fn)
            assert not monitor.optimizer._optimizer_step_pre_hooks
            assert not monitor.optimizer._optimizer_step_post_hooks
            assert not model._forward_pre_hooks
            assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.parametrize("call", ["step", "begin"])
def test_a_warning_names_the_loops_own_line(call):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unmeasured = AlphaMaxMonitor(model, optimizer, raising(ArithmeticError()))
    by_differences = AlphaMaxMonitor(model, optimizer, lambda model, x: once(model(x)).mean())
    for monitor in (unmeasured, by_differences):
        with pytest.warns(RuntimeWarning) as caught:
            if call == "step":
                with monitor.step(torch.ones(2, 3)):
                    once(model(torch.ones(2, 3))).mean().backward()
                    optimizer.step()
            else:
                monitor.begin(torch.ones(2, 3))
                once(model(torch.ones(2, 3))).mean().backward()
                optimizer.step()
                monitor.end()
        assert caught[0].filename == __file__


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


def once(x):
    return Once.apply(x)


def test_a_monitor_that_is_forgotten_within_a_step_leaves_torch_as_it_was():
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    net = nn.Linear(3, 1)
    monitor = AlphaMaxMonitor(net, torch.optim.SGD(net.parameters(), 0.1), lambda net, x: net(x).square().mean())
    monitor.begin(torch.ones(2, 3))
    assert torch.autocast.__enter__ is not enter
    del monitor
    gc.collect()
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == (enter, leave)
