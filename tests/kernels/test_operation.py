"""An operation made of given functions is differentiated once, is carried to second order by its own rule, and refuses
the rest by name."""

import pytest
import torch
import triton
import triton.language as tl
from torch.utils import _device

from kernels.operation import Operation
from stability.curvature import NoRule, NoSecondDerivative, directional
from tests.kernels.guards import guards
from tests.kernels.interpreted import interpreted


def forward(x, weight, *, factor):
    return factor * x**3 * weight, ()


def backward(gradient, needed, saved, x, weight, *, factor):
    assert not torch.is_grad_enabled()
    return 3 * factor * x**2 * weight * gradient if needed[0] else None, factor * x**3 * gradient if needed[1] else None


def second_order(x, weight, *, factor):
    """(factor·x³·w)″ with x and w moving along a line; the parts that are None are zero."""
    (x0, x1, x2), (w0, w1, w2) = (
        [torch.zeros_like(of[0]) if part is None else part for part in of] for of in (x, weight)
    )
    cube = (x0**3, 3 * x0**2 * x1, 6 * x0 * x1**2 + 3 * x0**2 * x2)
    return (
        factor * cube[0] * w0,
        factor * (cube[1] * w0 + cube[0] * w1),
        factor * (cube[2] * w0 + 2 * cube[1] * w1 + cube[0] * w2),
    )


WITH_RULE = Operation("cubed", forward, backward, second_order)
WITHOUT = Operation("cubed", forward, backward)


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(5, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"x": draw(), "weight": draw()}, {"x": draw(), "weight": draw()}


def loss_by(operation):
    return lambda params: operation(torch.sin(params["x"]), params["weight"], factor=2.0).square().sum()


def plain(params):
    return (2.0 * torch.sin(params["x"]) ** 3 * params["weight"]).square().sum()


def test_its_gradient_is_the_one_given(numbers):
    params, _ = numbers
    leaves = [each.clone().requires_grad_() for each in params.values()]
    assert torch.autograd.gradcheck(lambda x, weight: WITHOUT(x, weight, factor=2.0), leaves)


def test_an_input_that_needs_no_gradient_is_not_asked_for_one(numbers):
    params, _ = numbers
    x = params["x"].clone().requires_grad_()
    (found,) = torch.autograd.grad(WITHOUT(x, params["weight"], factor=2.0).sum(), x)
    assert torch.equal(found, 6 * params["x"] ** 2 * params["weight"])


@pytest.mark.parametrize("method", ["auto", "taylor"])
def test_its_own_rule_carries_it_to_second_order(numbers, method):
    params, direction = numbers
    truth = directional(plain, params, direction, "double_backward")
    found = directional(loss_by(WITH_RULE), params, direction, method)
    assert found.method == "taylor"
    assert (found.slope, found.curvature) == pytest.approx((truth.slope, truth.curvature), rel=1e-12)


def test_without_a_rule_taylor_names_it(numbers):
    with pytest.raises(NoRule, match=r"no rule for .*cubed"):
        directional(loss_by(WITHOUT), *numbers, "taylor")


def test_a_second_derivative_by_autograd_is_refused_by_name(numbers):
    with pytest.raises(NoSecondDerivative, match=r"cubed has no second derivative"):
        directional(loss_by(WITHOUT), *numbers, "double_backward")
    x = numbers[0]["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(WITHOUT(x, x, factor=1.0).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cubed has no second derivative by autograd; impl=reference has one"):
        torch.autograd.grad((gradient * x).sum(), x)


def test_forward_mode_is_refused_by_name(numbers):
    x = numbers[0]["x"]
    with pytest.raises(RuntimeError, match=r"cubed has no forward mode|setup_context|forward mode"):
        torch.func.jvp(lambda x: WITHOUT(x, x, factor=1.0), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="cubed has no forward mode"):
        WITHOUT(torch.autograd.forward_ad.make_dual(x, x), x, factor=1.0)


def two_forward(x, weight):
    return (x * weight, x), ()


def two_backward(gradients, needed, saved, x, weight):
    of_product, of_x = gradients
    return of_product * weight + of_x, of_product * x


def two_second_order(x, weight):
    (x0, x1, x2), (w0, w1, w2) = (
        [torch.zeros_like(of[0]) if part is None else part for part in of] for of in (x, weight)
    )
    return (x0 * w0, x1 * w0 + x0 * w1, x2 * w0 + 2 * x1 * w1 + x0 * w2), x


def test_an_operation_may_have_several_outputs_an_input_among_them(numbers):
    two = Operation("two", two_forward, two_backward, two_second_order)
    params, direction = numbers
    x, weight = (each.clone().requires_grad_() for each in params.values())
    assert torch.autograd.gradcheck(two, (x, weight))
    product, _ = two(x, weight)
    (found,) = torch.autograd.grad(product.sum(), x)  # of the other output there is no gradient: zeros
    assert torch.equal(found, weight)

    def loss(params):
        product, same = two(torch.sin(params["x"]), params["weight"])
        return (product * same**2).sum()

    def plain(params):
        return (torch.sin(params["x"]) ** 3 * params["weight"]).sum()

    truth = directional(plain, params, direction, "double_backward")
    found = directional(loss, params, direction, "taylor")
    assert (found.slope, found.curvature) == pytest.approx((truth.slope, truth.curvature), rel=1e-12)
    with pytest.raises(NoSecondDerivative, match="two has no second derivative"):
        directional(loss, params, direction, "double_backward")


@interpreted
def test_tensors_where_kernels_neither_run_nor_are_interpreted_are_refused_in_a_line(numbers, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError, match=r"^impl=triton needs .*, and tensors are on cpu; impl=reference computes the"
    ):
        WITH_RULE(*numbers[0].values(), factor=2.0)


def test_guards_leave_torch_its_own_constructors():
    _device._device_constructors.cache_clear()
    with guards(), torch.device("cpu"):
        torch.empty(1).zero_()
    with torch.device("meta"):
        assert torch.empty(1).is_meta


@triton.jit
def less_than_one(out, beta):
    tl.store(out, 1.0 - beta)


@interpreted
def test_a_float_is_rounded_in_a_launch_as_on_a_gpu():
    out = torch.zeros(1)
    less_than_one[(1,)](out, 0.999)
    assert out.item() == 1.0 - torch.tensor(0.999).item() != pytest.approx(1e-3, rel=1e-5)
