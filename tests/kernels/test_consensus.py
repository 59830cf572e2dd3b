"""Consensus by kernels equals dense sums in float64: g, gradients and second order along a line, with guards around
every buffer."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.kernel_cases.consensus import LAUNCHES, traffic
from kernels import (
    _consensus_backward,
    _consensus_edges,
    _consensus_forward,
    _consensus_launch,
    _consensus_passes,
    _consensus_taylor,
)
from kernels.consensus import cross_consensus, self_consensus
from stability.curvature import NoSecondDerivative, directional
from tests.kernels.ahead import compiled
from tests.kernels.consensus_reference import Case, assert_equals_dense, random_case, replace
from tests.kernels.counting import counting
from tests.kernels.interpreted import interpreted, interpreter_is_prepared_once
from tests.within import assert_within, relative_error, rounding_floor

__all__ = ["interpreter_is_prepared_once"]

CASES = {
    "heads, sequences and padding": Case(5, 2, 2, heads=2, batch=2, masked=True),
    "tiles whose pairs reach into the next": Case(31, 3, 3),  # a tile stores 32 − 3
    "scalar weights": Case(6, 1, 0),
    "one position": Case(1, 2, 2),
    "a window beyond the sequence": Case(3, 9, 1),
    "a context in a window": Case(7, 2, 2, context=7, masked=True),
    "a window beyond the sequence, in a longer context": Case(2, 5, 2, context=7),
    "a window beyond a shorter context": Case(7, 5, 2, context=2),
    "a whole context": Case(4, None, 2, context=3, masked=True),
    "no context": Case(4, None, 1, context=0),
    "more rows of Λ than a program holds": Case(3, 1, 5, width=65, hidden=17),
    "turned, heads, sequences and padding": Case(5, 2, 2, heads=2, batch=2, masked=True, turned=True),
    "turned, tiles whose pairs reach into the next": Case(31, 3, 1, turned=True),
    "turned, a context in a window": Case(7, 2, 2, context=7, masked=True, width=6, turned=True),
    "turned, a window beyond a shorter context": Case(7, 5, 2, context=2, turned=True),
    "turned, a whole context": Case(4, None, 2, context=3, masked=True, turned=True),
    "turned, no context": Case(4, None, 1, context=0, turned=True),
    "turned, more rows of Λ than a program holds": Case(3, 1, 5, width=66, hidden=17, turned=True),
    "turned, scalar weights": Case(6, 1, 0, turned=True),
    "tiles without padding": Case(5, 2, 2, width=16, hidden=32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_g_and_its_gradients_equal_the_dense_sums(case):
    assert_equals_dense(case, 1e-5)


# Two products on the longest path, λ = zW and its gradient's; two factors of each, rounded by 2⁻⁹ in root mean square
# (2⁻⁸ at most); and λ, a sum of 5 terms of any sign, is about half as large as their sizes together, and is divided by.
BF16 = 2 * 2 * 2**-9 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_bf16_are_as_near_as_bf16_is(dtype):
    assert_equals_dense(Case(6, 2, 2, dtype=dtype, precision="bf16"), BF16)


def test_float64_is_computed_in_float64():
    assert_equals_dense(Case(5, 2, 2, dtype=torch.float64), 1e-13)
    assert_equals_dense(Case(4, None, 1, context=3, dtype=torch.float64), 1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_random_shapes_equal_the_dense_sums(seed):
    assert_equals_dense(random_case(seed), 1e-5, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 55))
def test_more_random_shapes_equal_the_dense_sums(seed):
    assert_equals_dense(random_case(seed), 1e-5, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(40, 16, 1), Case(34, 1, 16, width=16, hidden=256), Case(17, 2, 2, width=128)])
def test_the_largest_sizes_equal_the_dense_sums(case):
    assert_equals_dense(case, 1e-5)


@pytest.mark.parametrize("case", [Case(3, 1, 1, width=2, hidden=2), Case(2, None, 1, context=2, width=2, hidden=2)])
def test_gradcheck(case):
    given, masks = replace(case, dtype=torch.float64).drawn()
    leaves = [each.requires_grad_() for each in given.values()]
    compute = lambda *tensors: case.kernels(dict(zip(given, tensors, strict=True)), masks)  # noqa: E731
    assert torch.autograd.gradcheck(compute, leaves, fast_mode=True)


@pytest.mark.parametrize("case", [CASES["heads, sequences and padding"], CASES["a whole context"]])
def test_edges_in_many_chunks_equal_the_dense_sums(monkeypatch, case):
    """One head, sequence and step at a time."""
    monkeypatch.setattr(_consensus_launch, "CHUNK_BYTES", 1)
    assert_equals_dense(replace(case, heads=2, batch=2), 1e-5)


def test_two_calls_give_the_same_bits():
    case = Case(17, 1, 1)
    given, masks = case.drawn()
    leaves = [each.requires_grad_() for each in given.values()]
    twice = [torch.autograd.grad(case.kernels(given, masks).square().sum(), leaves) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*twice, strict=True))


def test_a_zero_row_of_lambda_stays_zero_and_its_derivatives_finite():
    """Eq. 36 does not normalise it."""
    case = Case(4, 1, 2, dtype=torch.float64)
    given, masks = case.drawn()
    of_row = torch.arange(2 * case.width) < case.width
    for name in ("lambda_weight", "lambda_bias"):
        given[name][:, of_row] = 0.0
    found, truth = case.kernels(given, masks), case.dense(given, masks)
    assert_within(relative_error(found, truth, rounding_floor(1e-14, case.dtype, *given.values())), 1e-14)
    leaves = [each.requires_grad_() for each in given.values()]
    gradients = torch.autograd.grad(case.kernels(given, masks).square().sum(), leaves)
    assert all(each.isfinite().all() for each in gradients)
    found = directional(lambda params: case.kernels(params, masks).square().sum(), *two_draws(case, given), "taylor")
    assert torch.tensor([found.slope, found.curvature]).isfinite().all()


def two_draws(case, given):
    """The tensors, and a direction."""
    return {name: each.detach() for name, each in given.items()}, case.drawn(7)[0]


# A second derivative along a line

ALONG = {
    "self": Case(5, 2, 2, masked=True),
    "scalar weights": Case(4, 1, 0),
    "tiles": Case(17, 1, 1),
    "context": Case(4, 1, 2, context=4),
    "a window beyond a shorter context": Case(7, 5, 2, context=2),
    "a whole context": Case(3, None, 1, context=2, masked=True),
    "turned": Case(5, 2, 2, masked=True, turned=True),
    "turned, tiles": Case(17, 1, 1, turned=True),
    "turned, a window beyond a shorter context": Case(7, 5, 2, context=2, turned=True),
    "turned, a whole context": Case(3, None, 1, context=2, masked=True, turned=True),
}


def loss_of(compute, masks, moved):
    """A loss of which g is neither first nor last: of its inputs those in ``moved`` bend along the line, too."""

    def loss(params):
        bent = {name: torch.sin(each) if name in moved else each for name, each in params.items()}
        return torch.tanh(compute(bent, masks)).square().sum()

    return loss


@pytest.mark.parametrize(
    "moved", [("u", "v", "source", "target"), ("lambda_weight", "scalar_bias")], ids=["nodes", "weights"]
)
@pytest.mark.parametrize("case", ALONG.values(), ids=ALONG)
def test_it_is_carried_to_second_order_in_one_pass(case, moved):
    given, masks = case.drawn()
    params, direction = two_draws(case, given)
    exact = [{name: each.double() for name, each in of.items()} for of in (params, direction)]
    reference = loss_of(case.dense, masks, moved)
    truth = directional(reference, *exact, "double_backward")
    of_u, of_g, of_product = map(norm, (exact[1].values(), *derivatives(reference, *exact)))
    found = directional(loss_of(case.kernels, masks, moved), params, direction, "auto")
    assert found.method == "taylor"
    assert found.slope == pytest.approx(truth.slope, abs=1e-5 * of_u * of_g)
    assert found.curvature == pytest.approx(truth.curvature, abs=1e-5 * of_u * of_product)
    wide = directional(loss_of(case.kernels, masks, moved), *exact, "taylor")
    assert (wide.slope, wide.curvature) == pytest.approx((truth.slope, truth.curvature), rel=1e-9)


def norm(parts):
    return sum(float(part.square().sum()) for part in parts) ** 0.5


def derivatives(loss, params, direction):
    """Return g and Hu."""
    leaves = {name: each.clone().requires_grad_() for name, each in params.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    slope = sum((gradient * u).sum() for gradient, u in zip(gradients, direction.values(), strict=True))
    return gradients, torch.autograd.grad(slope, list(leaves.values()))


def test_a_second_derivative_by_autograd_is_refused_by_name():
    case = Case(3, 1, 1)
    given, masks = case.drawn()
    with pytest.raises(NoSecondDerivative, match="self_consensus has no second derivative"):
        directional(loss_of(case.kernels, masks, ()), *two_draws(case, given), "double_backward")


# Faults that the comparison finds


def without_second_half(tile, distance, M, F):
    return tl.zeros([M, F], tile.dtype)


@interpreted
@pytest.mark.parametrize("module", [_consensus_forward, _consensus_backward], ids=["forward", "backward"])
def test_a_pair_that_does_not_reach_its_right_end_is_found(monkeypatch, module):
    monkeypatch.setattr(module, "shift_down", InterpretedFunction(without_second_half))
    with pytest.raises(AssertionError):
        assert_equals_dense(Case(4, 1, 1), 1e-5)


def test_a_halo_one_node_too_short_is_found(monkeypatch):
    arguments = _consensus_passes.arguments
    short = lambda *given: arguments(*given) | {"window": given[0].reach - 1}  # noqa: E731  # of which the halo is made
    monkeypatch.setattr(_consensus_passes, "arguments", short)
    with pytest.raises(AssertionError):
        assert_equals_dense(CASES["tiles whose pairs reach into the next"], 1e-5)


def test_a_mask_that_is_left_out_is_found(monkeypatch):
    settings = _consensus_passes.settings
    monkeypatch.setattr(
        _consensus_passes, "settings", lambda *given: settings(*given) | {"OWN_MASKED": False, "OTHER_MASKED": False}
    )
    with pytest.raises(AssertionError):
        assert_equals_dense(Case(5, 1, 1, masked=True), 1e-5)


@interpreted
def test_a_rotation_by_the_wrong_end_or_of_the_wrong_sign_is_found(monkeypatch):
    """In the forward pass, of which the backward one is the transpose."""
    case = Case(4, 1, 1, turned=True)
    for name in ("rotate_back", "read_turn"):
        right = getattr(_consensus_forward, name)
        wrong = {"rotate_back": _consensus_edges.rotate, "read_turn": InterpretedFunction(by_the_source)}[name]
        monkeypatch.setattr(_consensus_forward, name, wrong)
        with pytest.raises(AssertionError):
            assert_equals_dense(case, 1e-5)
        monkeypatch.setattr(_consensus_forward, name, right)


def by_the_source(turn, own, other, valid, width, head_width, num_targets, direction, FROM_OWN, WIDE):
    return _consensus_edges.read_turn(
        turn, own, other, valid, width, head_width, num_targets, 1 - direction, FROM_OWN, WIDE
    )


@interpreted
def test_a_gradient_by_the_signal_that_is_not_turned_is_found(monkeypatch):
    monkeypatch.setattr(_consensus_backward, "rotate", _consensus_edges.rotate_back)
    with pytest.raises(AssertionError):
        assert_equals_dense(CASES["turned, a whole context"], 1e-5)


@interpreted
def test_a_gelu_without_its_second_derivative_is_found(monkeypatch):
    monkeypatch.setattr(_consensus_taylor, "gaussian_density", _consensus_taylor.gaussian_cdf)
    with pytest.raises(AssertionError):
        test_it_is_carried_to_second_order_in_one_pass(ALONG["scalar weights"], ("u", "source"))


# What it refuses, and what it moves


def test_sizes_beyond_the_kernels_are_refused_in_one_line():
    given, masks = Case(20, 17, 1).drawn()
    with pytest.raises(ValueError, match=r"made for a window up to 16, got 17; impl=reference takes any"):
        Case(20, 17, 1).kernels(given, masks)
    wide = Case(2, 1, 1, hidden=257)
    with pytest.raises(ValueError, match=r"a hidden up to 256, got 257"):
        wide.kernels(*wide.drawn())
    with pytest.raises(ValueError, match=r"precision=fp8 is not one of ieee, tf32x3, tf32, bf16"):
        replace(wide, precision="fp8").kernels(*wide.drawn())


@pytest.mark.parametrize(
    "case",
    [
        Case(18, 2, 3, heads=2, width=5, hidden=20),
        Case(6, None, 3, context=3, hidden=17),
        Case(5, 1, 0, context=5),
        Case(18, 2, 5, heads=2, width=66, hidden=17, turned=True),
        Case(6, None, 3, context=3, hidden=17, turned=True),
    ],
    ids=["self", "a whole context", "a context in a window", "self, turned", "a whole context, turned"],
)
def test_traffic_is_what_the_interpreter_counts(case):
    given, masks = case.drawn()
    sizes = {
        "batch": case.batch,
        "heads": case.heads,
        "positions": case.positions,
        "head_width": case.width,
        "hidden": case.hidden,
        "rank": case.rank,
        "window": case.window,
        "context": case.context,
        "turned": case.turned,
    }
    expected = {name: traffic(name, **sizes, once=False) for name in LAUNCHES}
    leaves = [each.requires_grad_() for each in given.values()]
    with counting() as count:
        g = case.kernels(given, masks)
    assert count.traffic == expected["forward"]
    with counting() as count:
        torch.autograd.grad(g.sum(), leaves)
    backward = expected["ends_backward"] + expected["network_backward"]
    assert count.traffic == (backward if case.context is None else backward + expected["context_backward"])
    operation = self_consensus if case.context is None else cross_consensus
    parts = [(each.detach(), each.detach(), None) for each in leaves]
    absent = [(None, None, None)] * (0 if case.rank else 2) + [(mask, None, None) for mask in masks]
    with counting() as count:
        operation.second_order(*parts, *absent, window=case.window)
    assert count.traffic == expected["second_order"]


def test_time_and_memory_are_linear_in_the_length():
    sizes = {"batch": 1, "heads": 12, "head_width": 64, "hidden": 256, "rank": 4, "window": 2}
    for name in ("forward", "ends_backward", "network_backward", "second_order"):
        short, long = (traffic(name, positions=length, **sizes, once=False) for length in (1024, 8192))
        assert long.flops == pytest.approx(8 * short.flops, rel=0.03)
        assert long.bytes == pytest.approx(8 * short.bytes, rel=0.1)


AHEAD = """
from tests.kernels.consensus_reference import Case, replace
cases = [Case(64, 2, 4, width=16, hidden=16, masked=True), Case(64, None, 4, context=5, width=16, hidden=16)]
for case in (*cases, *(replace(case, turned=True) for case in cases)):
    given, masks = case.drawn()
    case.kernels({name: each.requires_grad_() for name, each in given.items()}, masks).sum().backward()
    parts = [(each.detach(), each.detach(), None) for each in given.values()] + [(mask, None, None) for mask in masks]
    from kernels.consensus import cross_consensus, self_consensus
    (self_consensus if case.context is None else cross_consensus).second_order(*parts, window=case.window)
"""

AUTOCAST = """
from stability.mechanisms import build
layer, x = build("sc", impl="triton", width=32, heads=2), torch.randn(1, 20, 32).requires_grad_()
with torch.autocast("cpu", torch.bfloat16):
    y = layer(x)
y.float().sum().backward()
"""


@pytest.mark.slow
def test_they_compile_under_autocast_where_an_edges_target_stays_float32():
    assert {each.name for each in compiled(AUTOCAST)} == {"flow_kernel", "ends_kernel", "weights_kernel"}


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100():
    found = compiled(AHEAD)
    assert {each.name for each in found} == {"flow_kernel", "ends_kernel", "weights_kernel", "flow_along_kernel"}
    for each in found:
        each.assert_fits()
