"""Reading from several residual streams and joining them, by kernels, along a line to second order equals the formulas in
float64."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels import _streams_join
from kernels.streams import join
from stability.curvature import NoSecondDerivative, directional
from tests.kernels.interpreted import interpreted, interpreter_is_prepared_once
from tests.kernels.streams_reference import Case, plain_join
from tests.within import assert_within

__all__ = ["interpreter_is_prepared_once"]


def loss_by(case, plain, gradients, held=None):
    """A loss of a reading and a join in which everything moves but what is ``held`` and not given."""
    connect = case.plain if plain else case.kernels
    by_differences = case.scheme == "mhc_lite"

    def loss(params):
        x, *rest = ((held or {}) | params).values()
        u, coefficients, x = connect(torch.sin(x), *rest)
        joining = plain_join if plain else join
        out = joining(x, coefficients, torch.tanh(u) * u, by_differences=by_differences)
        return (out * gradients[2].to(out.dtype)).sum() + (coefficients * gradients[1].to(coefficients.dtype)).sum()

    return loss


def assert_second_order_equals_the_formulas(case):
    given, gradients = case.drawn()
    moves, _ = case.drawn(1)
    params, direction = ({str(index): each for index, each in enumerate(of)} for of in (given, moves))
    found = directional(loss_by(case, False, gradients), params, direction, "taylor")
    params, direction = ({name: each.double() for name, each in of.items()} for of in (params, direction))
    plain = loss_by(case, True, gradients)
    value, products = torch.autograd.functional.hvp(
        lambda *given: plain(dict(zip(params, given, strict=True))), (*params.values(),), (*direction.values(),)
    )
    u, hu = (math.sqrt(sum(float(each.square().sum()) for each in of)) for of in (direction.values(), products))
    truth = directional(plain, params, direction, "double_backward")
    assert_within(abs(found.curvature - truth.curvature), TOLERANCE_OF_CURVATURE[case.dtype] * u * hu)
    assert found.slope == pytest.approx(truth.slope, rel=1e-5)
    assert value.isfinite()


TOLERANCE_OF_CURVATURE = {torch.float32: 1e-5, torch.float64: 1e-12}
SECOND_ORDER = {
    "mhc-lite": Case("mhc_lite", 4, 6, 3),
    "mhc": Case("mhc", 3, 6, 3, torch.float64),
    "mhc of twenty iterations": Case("mhc", 4, 6, 2, iterations=20, spread=4.0),
    "hc": Case("hc", 3, 6, 3, torch.float64),
}


@pytest.mark.parametrize("case", SECOND_ORDER.values(), ids=SECOND_ORDER)
def test_second_order_along_a_line_equals_double_backward_of_the_formulas(case):
    assert_second_order_equals_the_formulas(case)


def test_second_order_holds_where_one_tensor_alone_moves():
    case = Case("mhc_lite", 2, 3, 2, torch.float64)
    given, gradients = case.drawn()
    params, direction = ({str(index): each for index, each in enumerate(of)} for of in (given, case.drawn(1)[0]))
    for name in params:
        one, along = {name: params[name]}, {name: direction[name]}
        found = directional(loss_by(case, False, gradients, held=params), one, along, "taylor")
        truth = directional(loss_by(case, True, gradients, held=params), one, along, "double_backward")
        assert (found.slope, found.curvature) == pytest.approx((truth.slope, truth.curvature), rel=1e-9)


@triton.jit
def next_row(x_BSC, s, index: tl.constexpr):
    return tl.sum(tl.where((s == index + 1)[None, :, None], x_BSC, 0.0), 1)


@interpreted
def test_a_fault_in_the_second_order_is_caught(monkeypatch):
    monkeypatch.setattr(_streams_join, "row_of", next_row)
    with pytest.raises(AssertionError):
        assert_second_order_equals_the_formulas(Case("mhc_lite", 2, 3, 2, torch.float64))


@pytest.mark.parametrize(("scheme", "name"), [("mhc", "read_gated"), ("hc", "read_hyper")])
def test_a_second_derivative_by_autograd_is_refused_by_name(scheme, name):
    case = Case(scheme, 2, 3, 2, iterations=1)
    given, gradients = case.drawn()
    params, direction = ({str(index): each for index, each in enumerate(of)} for of in (given, case.drawn(1)[0]))
    with pytest.raises(NoSecondDerivative, match=rf"(join|{name}) has no second derivative"):
        directional(loss_by(case, False, gradients), params, direction, "double_backward")
