"""Every rule of the Taylor pass against double backward in float64."""

import pytest
import torch
from torch.nn import functional as F

from stability.curvature import NoSecondDerivative, directional, hvp

from .operations import CONSTANT, INDEX, OPERATIONS, WRONG_IN_TORCH

G = torch.Generator().manual_seed(0)


def normalized_rows(x):
    return F.normalize(torch.cat([x, torch.zeros(1, 4, dtype=x.dtype)]), dim=-1)


def problem(function):
    """(loss, params, direction); x enters through a product, so that its second derivative is not zero."""
    x, y = (torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 0.8).unbind(0)
    u = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def loss(p):
        inner = p["x"] + 0.3 * p["x"] * p["y"]
        return (function(inner, p["y"]) + 0.1).square().sum() + inner.sum()

    return loss, {"x": x, "y": y}, {"x": u[0], "y": u[1]}


@pytest.mark.parametrize("name", OPERATIONS)
def test_rule_agrees_with_double_backward(name):
    loss, params, direction = problem(OPERATIONS[name])
    exact = directional(loss, params, direction, "double_backward")
    ours = directional(loss, params, direction, "taylor")
    for field in ("loss", "slope", "curvature"):
        assert getattr(ours, field) == pytest.approx(getattr(exact, field), rel=1e-10, abs=1e-12), field


# The padding row of an embedding moves the loss, and has no gradient in torch.
@pytest.mark.parametrize("name", [name for name in [*OPERATIONS, *WRONG_IN_TORCH] if name != "embedding_padding"])
def test_rule_agrees_with_differences_of_the_loss_which_know_no_autograd(name):
    loss, params, direction = problem((OPERATIONS | WRONG_IN_TORCH)[name])

    def along(t):
        return float(loss({key: param + t * direction[key] for key, param in params.items()}))

    step = 2e-4  # remainders jump not far from here
    values = [along(k * step) for k in (-2, -1, 0, 1, 2)]
    curvature = sum(factor * value for factor, value in zip((-1, 16, -30, 16, -1), values, strict=True)) / (
        12 * step**2
    )
    assert directional(loss, params, direction, "taylor").curvature == pytest.approx(curvature, rel=2e-6, abs=1e-6)


def test_weight_norm_whose_second_derivative_torch_gets_wrong_is_exact_and_refused_by_double_backward():
    torch.manual_seed(0)
    net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)).double()
    params = {name: param.detach() for name, param in net.named_parameters()}
    u = {name: torch.randn_like(param) for name, param in params.items()}
    g, v, bias = (
        params[name] for name in ("parametrizations.weight.original0", "parametrizations.weight.original1", "bias")
    )

    def loss(p):
        return torch.func.functional_call(net, p, (CONSTANT,)).tanh().square().sum()

    def by_hand(p):
        return (CONSTANT @ (p["v"] * (p["g"] / p["v"].norm(dim=1, keepdim=True))).T + p["b"]).tanh().square().sum()

    same = {"g": "parametrizations.weight.original0", "v": "parametrizations.weight.original1", "b": "bias"}
    truth = directional(
        by_hand, {"g": g, "v": v, "b": bias}, {key: u[name] for key, name in same.items()}, "double_backward"
    ).curvature
    found = directional(loss, params, u)
    assert (found.method, found.curvature) == ("taylor", pytest.approx(truth, rel=1e-10))
    for call in (lambda: directional(loss, params, u, "double_backward"), lambda: hvp(loss, params, u)):
        with pytest.raises(
            NoSecondDerivative, match="weight_norm.*has a wrong second derivative in torch; use method='taylor'"
        ):
            call()


def test_long_tensors_are_computed_in_pieces_that_join():
    x = torch.randn(7, 33_001, dtype=torch.float64, generator=G)
    u = {"x": torch.randn(7, 33_001, dtype=torch.float64, generator=G)}

    def loss(p):
        return (F.gelu(p["x"].T) * F.layer_norm(p["x"], (33_001,)).T).square().mean() + F.cross_entropy(
            p["x"], INDEX.repeat(2)[:7]
        )

    exact, ours = (directional(loss, {"x": x}, u, method) for method in ("double_backward", "taylor"))
    assert ours.curvature == pytest.approx(exact.curvature, rel=1e-10)


def test_hardsigmoid_which_torch_differentiates_once_equals_its_definition():
    x, u = ({"x": 3 * torch.randn(20, dtype=torch.float64, generator=G)} for _ in range(2))
    truth = directional(lambda p: (F.relu6(p["x"] + 3) / 6).square().sum(), x, u, "double_backward").curvature
    assert directional(lambda p: F.hardsigmoid(p["x"]).square().sum(), x, u, "taylor").curvature == pytest.approx(
        truth, rel=1e-10
    )


def test_an_l2_normalised_zero_row_is_finite_and_right():
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    u = {"x": torch.randn(3, 4, dtype=torch.float64, generator=G)}
    truth = directional(lambda p: F.normalize(p["x"], dim=-1)[:, 0].square().sum(), x, u, "double_backward").curvature
    ours = directional(lambda p: normalized_rows(p["x"])[:, 0].square().sum(), x, u, "taylor").curvature
    assert ours == pytest.approx(truth, rel=1e-10)
