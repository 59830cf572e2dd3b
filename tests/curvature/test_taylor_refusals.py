"""What the Taylor pass refuses, because it would drop derivatives in silence."""

import copy
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from stability.curvature import NoRule, directional

G = torch.Generator().manual_seed(0)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round() + 0 * x

    @staticmethod
    def backward(ctx, grad):
        return grad


straight = Straight.apply


def assign_data(x):
    y = x * 2
    y.data = x
    return y


def write_into(target, x):
    target[0] = x[0]
    return target.sum() * x


def without_grad(x):
    with torch.no_grad():
        return x * 2


def in_place(x):
    y = x * 2
    y += x
    return y


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x.detach() * x, "Tensor.detach"),
        (lambda x: torch.detach(x) * x, "detach"),
        (lambda x: x.data * x, "Tensor.data"),
        (assign_data, "Tensor.data"),
        (lambda x: write_into(torch.zeros(3, 4, dtype=torch.float64), x), "Tensor.__setitem__"),
        (lambda x: write_into(x * 1, x), "Tensor.__setitem__"),
        (lambda x: torch.zeros(3, 4, dtype=torch.float64).copy_(x), "Tensor.copy_"),
        (lambda x: torch.zeros(3, 4, dtype=torch.float64).add_(x), "Tensor.add_"),
        (lambda x: torch.add(x, x, out=torch.zeros(3, 4, dtype=torch.float64)), "aten.add"),
        (in_place, "in place"),
        (lambda x: F.relu(x * 1, inplace=True), "aten.relu_"),
        (lambda x: Straight.apply(x), "custom autograd.Function"),
        (straight, "custom autograd.Function"),
        (without_grad, "no_grad"),
        (lambda x: x * x.sum().item(), "Tensor.item"),
        (lambda x: x * float(x.sum()), "Tensor.(item|__float__)"),
        (lambda x: x if x.sum() > math.inf else x * x.max().tolist(), "Tensor.tolist"),
        (lambda x: x * torch.from_numpy(x.numpy()), "Tensor.numpy"),
        (lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0], "autograd.grad"),
        (lambda x: x.apply_(lambda number: number), "Tensor.apply_"),
        (lambda x: copy.deepcopy(x) * x, "Tensor.__deepcopy__"),
        (lambda x: torch.nn.Parameter(x) * x, "Tensor.detach"),
        (lambda x: torch.tensor(list(x.sum(0))) * x, "Tensor.__float__"),
        (lambda x: x.new_tensor(x) * x, "Tensor.new_tensor"),
        (lambda x: torch.special.bessel_j0(x), "bessel_j0"),
        (lambda x: torch.linalg.eigvalsh(x[:, :3] + x[:, :3].T), "eigh"),
        (lambda x: x.clone().requires_grad_(False) * x, "Tensor.requires_grad_"),
        (lambda x: setattr(x, "requires_grad", False) or x.square(), "Tensor.requires_grad"),
    ],
)
def test_what_would_drop_derivatives_is_refused_by_name(function, named):
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    with pytest.raises(NoRule, match=named) as raised:
        directional(lambda p: function(p["x"]).sum(), x, x, "taylor")
    assert "\n" not in str(raised.value)


def test_a_value_dependent_branch_is_refused():
    x = {"x": torch.ones(3)}
    with pytest.raises(NoRule, match="__bool__"):
        directional(lambda p: (p["x"] if p["x"].sum() else -p["x"]).sum(), x, x, "taylor")


@pytest.mark.parametrize("function", [lambda x: x / x.detach().abs().max(), lambda x: x * x.sum().item(), without_grad])
def test_auto_says_that_what_is_detached_counts_as_a_constant(function):
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    with pytest.warns(RuntimeWarning, match="taylor refuses .*takes for a constant what is detached") as caught:
        assert directional(lambda p: (function(p["x"]) * p["x"]).sum(), x, x).method == "double_backward"
    assert caught[0].filename == __file__  # the caller's line, each of which warns once


def first_column_written(x):
    y = torch.zeros(3, 4, dtype=torch.float64)
    y[:, 0] = x[:, 0]
    return y * x


def residual_of_an_equation(x):
    """The loss of a physics-informed network: a derivative of it by its own input."""
    t = torch.ones(4, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad((x * t).tanh().sum(), t, create_graph=True)[0] - x.sum(0)


def penalty(x):
    return torch.autograd.grad((x**3).sum(), x, None, None, True)[0]


@pytest.mark.parametrize("function", [first_column_written, residual_of_an_equation, penalty])
def test_auto_says_nothing_where_double_backward_is_exact_and_nothing_is_detached(function):
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert directional(lambda p: (function(p["x"]) ** 2).sum(), x, x).method == "double_backward"


def test_auto_says_that_a_gradient_without_its_graph_counts_as_a_constant():
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    with pytest.warns(RuntimeWarning, match="autograd.grad without create_graph.*takes for a constant"):
        directional(
            lambda p: (torch.autograd.grad((p["x"] ** 3).sum(), p["x"], retain_graph=True)[0] * p["x"]).sum(), x, x
        )


def scaled_in_place(p):
    with torch.no_grad():
        p["x"].mul_(1.1)
    return (p["x"] ** 3).sum()


@pytest.mark.parametrize("method", ["auto", "double_backward", "finite_difference", "parity"])
@pytest.mark.parametrize(
    "loss", [scaled_in_place, lambda p: F.embedding(torch.tensor([0, 2]), p["x"], max_norm=0.5).square().sum()]
)
def test_a_loss_that_writes_into_its_parameters_is_an_error(method, loss):
    x = {"x": torch.ones(3, 4, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"loss_fn writes into params\['x'\] in place .*max_norm"):
        directional(loss, x, x, method)


def test_a_request_for_a_gradient_changes_nothing():
    def flagged(params):
        y = params["x"].exp()
        y.requires_grad = True
        y.retain_grad()
        return y.requires_grad_().requires_grad_(True).square().sum()

    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    result, plain = (directional(loss, x, x, "taylor") for loss in (flagged, lambda p: p["x"].exp().square().sum()))
    assert (result.slope, result.curvature) == (plain.slope, plain.curvature)
