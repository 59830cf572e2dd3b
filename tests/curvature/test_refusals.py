"""What has no second derivative, what is not finite, and what the caller got wrong."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stability.curvature import (
    GradientWithGraph,
    NoSecondDerivative,
    block_shares,
    critical_lr,
    directional,
    hessian_diagonal,
    hutchinson_trace,
    hvp,
    top_eigenvalue,
)
from tests.curvature.nets import HalfSlope
from tests.within import assert_within


class GoodCube(torch.autograd.Function):
    """x³, differentiable as often as one likes; others below replace its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.slope = 3 * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class OnceCube(GoodCube):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class KernelCube(GoodCube):
    """As a kernel would: its backward leaves torch, so that autograd.grad drops the second derivative without a
    word."""

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(3 * np.square(ctx.saved_tensors[0].detach().numpy()) * grad.detach().numpy())


class RefusingCube(GoodCube):
    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("the cube kernel has no second derivative")
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class HalfCube(GoodCube):
    """Differentiable in the incoming gradient, but x² comes from a kernel: no structure shows it, only the check
    does."""

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(3 * np.square(ctx.saved_tensors[0].detach().numpy())) * grad


class ConstantCube(GoodCube):
    """The pattern of a fused kernel in plain torch: what backward multiplies with was computed without a graph."""

    @staticmethod
    def backward(ctx, grad):
        return ctx.slope * grad


def cube_loss(function, tail="sum"):
    def loss(params):
        y = function.apply(params["x"])
        return y.sum() if tail == "sum" else (y * y).sum()

    return loss


def ctc_loss(params):
    return F.ctc_loss(params["x"].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


X = {"x": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
U = {"x": torch.tensor([-1.0, 0.5, -2.0], dtype=torch.float64)}
CUBE = float((6 * X["x"] * U["x"] ** 2).sum())
SQUARE = float((30 * X["x"] ** 4 * U["x"] ** 2).sum())


@pytest.mark.parametrize(("tail", "truth"), [("sum", CUBE), ("square", SQUARE)])
@pytest.mark.parametrize("function", [OnceCube, KernelCube, RefusingCube])
def test_auto_falls_back_to_differences_where_a_function_has_no_second_derivative_and_says_so(function, tail, truth):
    with pytest.warns(
        RuntimeWarning, match="curvature by central differences of gradients, not exactly: .*(Cube|cube kernel)"
    ):
        result = directional(cube_loss(function, tail), X, U)
    assert result.method == "finite_difference"
    assert_within(abs(result.curvature - truth), result.error_bar)
    with pytest.raises(NoSecondDerivative, match="use method='finite_difference'"):
        directional(cube_loss(function, tail), X, U, "double_backward")
    with pytest.raises(RuntimeError, match="second derivative"):
        hvp(cube_loss(function, tail), X, U)


def test_auto_falls_back_for_an_operation_of_torch_without_a_second_derivative():
    x = {"x": torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(0))}
    u = {"x": torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(1))}
    with pytest.warns(RuntimeWarning, match="_ctc_loss_backward is not implemented"):
        assert directional(ctc_loss, x, u).method == "finite_difference"
    held = GradientWithGraph(ctc_loss, x)
    with pytest.warns(RuntimeWarning, match="_ctc_loss_backward is not implemented"):
        assert held.along(u).method == "finite_difference"


def test_gradient_with_graph_falls_back_the_same_way():
    held = GradientWithGraph(cube_loss(OnceCube), X)
    torch.testing.assert_close(held.gradient()["x"], 3 * X["x"] ** 2)
    with pytest.warns(RuntimeWarning, match="OnceCube"):
        result = held.along(U)
    assert result.method == "finite_difference"
    assert_within(abs(result.curvature - CUBE), result.error_bar)
    with pytest.raises(NoSecondDerivative):
        GradientWithGraph(cube_loss(OnceCube), X, method="double_backward")


def test_a_custom_function_is_checked_against_differences_without_being_asked():
    assert_within(directional(cube_loss(GoodCube), X, U).rel_error, 1e-4)
    assert directional(cube_loss(GoodCube), X, U, check=False).rel_error is None


@pytest.mark.parametrize("function", [HalfCube, ConstantCube])
def test_a_custom_function_that_differences_contradict_is_measured_by_them_and_named(function):
    said = (
        f"{function.__name__} .*has a wrong second derivative: uᵀHu comes out as 0, by differences of gradients as "
        f"{CUBE:.4g}"
    )
    with pytest.warns(RuntimeWarning, match=f"by central differences of gradients, not exactly: {said}"):
        result = directional(cube_loss(function), X, U)
    assert result.method == "finite_difference"
    assert_within(abs(result.curvature - CUBE), result.error_bar)
    held = GradientWithGraph(cube_loss(function), X, method="double_backward")
    for measure in (lambda: directional(cube_loss(function), X, U, "double_backward"), lambda: held.along(U)):
        with pytest.raises(NoSecondDerivative, match=said):
            measure()
    assert directional(cube_loss(function), X, U, "double_backward", check=False).curvature == 0.0


@pytest.mark.parametrize("method", ["auto", "double_backward", "finite_difference"])
def test_a_custom_function_with_a_wrong_gradient_is_noted_by_every_method(method):
    said = (
        "the slope of loss_fn is .* by differences of the loss, .* by its gradient: its gradient is not its derivative"
    )
    assert re.match(said, directional(cube_loss(HalfSlope), X, U, method).note)
    assert directional(cube_loss(GoodCube), X, U, method).note is None


@pytest.mark.parametrize(
    "measure",
    [
        hvp,
        critical_lr,
        block_shares,
        lambda *given: top_eigenvalue(*given[:2]),
        lambda *given: hutchinson_trace(*given[:2]),
        lambda *given: hessian_diagonal(*given[:2]),
    ],
)
def test_a_wrong_gradient_of_a_custom_function_is_a_warning_of_every_operator(measure):
    with pytest.warns(RuntimeWarning, match="its gradient is not its derivative"):
        measure(cube_loss(HalfSlope), X, U)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(cube_loss(GoodCube), X, U)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_is_reported_and_never_answered_by_differences(bad):
    for method in ("auto", "taylor", "double_backward", "finite_difference", "parity"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = directional(lambda p: (p["x"] * bad).sum(), X, U, method)
        assert math.isnan(result.alpha_max)
        assert result.method == ("taylor" if method == "auto" else method)
    broken = {"x": torch.tensor([math.nan, 0.0, 0.0], dtype=torch.float64)}
    for method in ("taylor", "double_backward", "finite_difference"):
        assert math.isnan(directional(lambda p: (p["x"] ** 2).sum(), X, broken, method).alpha_max)
        assert math.isnan(directional(lambda p: (p["x"] ** 2).sum(), broken, U, method).alpha_max)


class Root(torch.nn.Module):
    """√x of a layer that gives 0: its value is finite there, its derivatives are not."""

    def __init__(self):
        super().__init__()
        self.first, self.root = torch.nn.Linear(1, 3, dtype=torch.float64), SquareRoot()

    def forward(self, x):
        return self.root(self.first(x))


class SquareRoot(torch.nn.Module):
    def forward(self, x):
        return x.sqrt()


@pytest.mark.parametrize("method", ["auto", "double_backward"])
def test_a_nan_is_traced_to_the_first_module_that_made_it(method):
    model = Root()
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    params = dict(model.named_parameters())
    u = {name: torch.ones_like(param) for name, param in params.items()}

    def loss(p):
        return torch.func.functional_call(model, p, (torch.ones(1, dtype=torch.float64),)).sum()

    result = directional(loss, params, u, method)
    assert math.isnan(result.alpha_max)
    assert result.nonfinite == "the first derivative along u of root (SquareRoot) is the first that is not finite"
    broken = {name: param.detach() * math.nan for name, param in params.items()}
    assert directional(loss, broken, u, method).nonfinite == "params['first.weight'] is not finite"
    assert directional(loss, params, broken, method).nonfinite == "direction['first.weight'] is not finite"
    assert directional(lambda p: p["x"].sum() * math.nan, X, U, method).nonfinite.startswith(
        "every module's output is finite"
    )


def test_a_loss_that_is_not_finite_gives_nan_even_where_its_derivatives_are():
    assert math.isnan(directional(lambda p: (p["x"] ** 2).sum() + math.inf, X, U).alpha_max)


def test_an_error_of_another_kind_is_passed_on():
    def loss(params):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        directional(loss, X, U)


def test_auto_says_so_where_a_loss_gets_no_tensor_subclass_through():
    def loss(params):
        if type(params["x"]) is not torch.Tensor:
            raise TypeError("plain tensors only")
        return (params["x"] ** 3).sum()

    with pytest.warns(
        RuntimeWarning, match="curvature by double backward, because taylor failed: TypeError: plain tensors only"
    ):
        result = directional(loss, X, U)
    assert (result.method, result.curvature) == ("double_backward", pytest.approx(CUBE))


def test_auto_takes_taylor_and_double_backward_where_it_has_no_rule():
    assert directional(lambda p: (p["x"] ** 3).sum(), X, U).method == "taylor"
    x = {"x": torch.diag(X["x"])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = directional(lambda p: torch.linalg.eigvalsh(p["x"]).pow(3).sum(), x, {"x": torch.diag(U["x"])})
    assert (result.method, result.curvature) == ("double_backward", pytest.approx(CUBE))


def square(params):
    return (params["x"] ** 2).sum()


@pytest.mark.parametrize(
    ("params", "direction", "text"),
    [
        ({}, {}, "params holds no tensor; give"),
        ([1], {}, "params holds no tensor; give"),
        ({"x": 3.0}, {"x": 1.0}, r"params\['x'\] is a float, not a tensor"),
        ({"x": torch.arange(3)}, U, r"params\['x'\] has dtype torch.int64; only floating-point"),
        (
            {"x": X["x"].clone().requires_grad_(), "frozen": torch.ones(1)},
            U,
            r"params\['frozen'\] has requires_grad=False",
        ),
        (X, {}, "direction lacks 1 of its keys, first 'x'"),
        (X, {**U, "y": U["x"]}, "direction has, beyond params, 1 of its keys, first 'y'"),
        (X, [1], "direction must be a dict"),
        (X, {"x": torch.ones(2)}, r"direction\['x'\] has shape \(2,\); params\['x'\] has \(3,\)"),
        (X, {"x": torch.ones(3, dtype=torch.int64)}, r"direction\['x'\] has dtype torch.int64"),
        (X, {"x": 1.0}, r"direction\['x'\] is a float"),
        (X, {"x": torch.ones(3, device="meta")}, r"direction\['x'\] is on meta"),
    ],
)
def test_params_and_directions_that_do_not_fit_are_refused_in_one_line(params, direction, text):
    with pytest.raises(ValueError, match=text) as raised:
        directional(square, params, direction)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (lambda p: p["x"] ** 2, {}, r"loss_fn returned torch.float64 of shape \(3,\); a floating-point scalar"),
        (lambda p: 3.0, {}, "loss_fn returned a float; a scalar tensor"),
        (lambda p: torch.tensor(1.0), {}, "the loss depends on none of params"),
        (lambda p: torch.tensor(1.0), {"method": "finite_difference"}, "the loss depends on none of params"),
        ("loss", {}, "loss_fn must be callable"),
        (square, {"method": "exact"}, "method is 'exact'; choose one of auto, taylor, double_backward"),
        (square, {"batches": []}, "batches is empty"),
        (lambda p, b: square(p), {"batches": [1]}, r"returns \(sum, count\); it returned a tensor"),
        (lambda p, b: (square(p), -1), {"batches": [1]}, r"it returned the count -1"),
        (lambda p, b: (square(p), 0), {"batches": [1, 2]}, "the counts of all batches sum to 0"),
    ],
)
def test_losses_that_do_not_fit_are_refused_in_one_line(loss, options, text):
    with pytest.raises(ValueError, match=text) as raised:
        directional(loss, X, U, **options)
    assert "\n" not in str(raised.value)


def test_an_empty_microbatch_beside_full_ones_counts_nothing():
    result = directional(lambda p, n: (n * square(p), n), X, U, batches=[0, 2, 3])
    assert result.loss == pytest.approx(float(square(X)))
    assert result.curvature == pytest.approx(float(2 * (U["x"] ** 2).sum()))
