"""Reading from several residual streams and joining them, by kernels, equals the formulas in float64: results, gradients
and second order along a line, with guards around every buffer."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from kernels import _streams_join, _streams_read, _streams_read_backward
from kernels._streams_mixing import pad_matrices, sinkhorn, sinkhorn_backward
from kernels.streams import join, read_gated
from tests.kernels.interpreted import interpreted, interpreter_is_prepared_once
from tests.kernels.streams_reference import (
    Case,
    assert_each_close,
    assert_joining_equals_the_formulas,
    assert_reading_equals_the_formulas,
    divided,
    plain_join,
)
from tests.within import assert_within

__all__ = ["interpreter_is_prepared_once"]

CASES = {
    "mhc-lite": Case("mhc_lite", 4, 24, 9),
    "mhc": Case("mhc", 4, 24, 9),
    "hc": Case("hc", 4, 24, 9),
    "three streams, more tokens than a block": Case("mhc", 3, 11, 35, iterations=2),
    "a part of the permutations of eight streams": Case("mhc_lite", 8, 5, 2, count=20),
    "one stream": Case("mhc", 1, 5, 2),
    "hc of two streams": Case("hc", 2, 35, 17),
    "bf16": Case("mhc_lite", 4, 16, 5, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reading_and_its_gradients_equal_the_formulas(case):
    assert_reading_equals_the_formulas(case)


@pytest.mark.parametrize("by_differences", [False, True])
@pytest.mark.parametrize("name", ["mhc", "three streams, more tokens than a block", "one stream", "bf16"])
def test_joining_and_its_gradients_equal_the_formulas(name, by_differences):
    assert_joining_equals_the_formulas(CASES[name], by_differences=by_differences)


def random_case(seed):
    draw = random.Random(seed)
    scheme, streams = draw.choice(["hc", "mhc", "mhc_lite"]), draw.randint(1, 8)
    most = min(math.factorial(streams), 40)
    return Case(
        scheme,
        streams,
        draw.choice([1, 2, 7, 16, 33, 70]),
        draw.randint(1, 40),
        draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
        iterations=draw.randint(1, 6),
        count=None if streams <= 4 else draw.randint(1, most),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_shapes_equal_the_formulas(seed):
    case = random_case(seed)
    assert_reading_equals_the_formulas(case, seed)
    assert_joining_equals_the_formulas(case, seed, by_differences=seed % 2 == 0)


def test_no_tokens_have_zero_gradients():
    given, _ = Case("mhc", 2, 3, 0).drawn()
    leaves = [each.requires_grad_() for each in given]
    u, coefficients, _ = read_gated(*leaves, None, iterations=2)
    assert u.shape == (0, 3) and coefficients.shape == (0, 2, 4)
    assert all((each == 0).all() for each in torch.autograd.grad(u.sum(), leaves))


def test_gradcheck():
    for case in (Case("mhc_lite", 2, 2, 1, torch.float64), Case("hc", 2, 2, 1, torch.float64)):
        leaves = [each.requires_grad_() for each in case.drawn()[0]]
        assert torch.autograd.gradcheck(case.kernels, leaves, fast_mode=True)


@triton.jit
def scaled_and_back(M, ADJOINT, MIX, DM, HISTORY, N: tl.constexpr, NP: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    s, t, b = tl.arange(0, NP)[:, None, None], tl.arange(0, NP)[None, :, None], tl.arange(0, B)[None, None, :]
    place, inside = (b * N + s) * N + t, (s < N) & (t < N) & (b >= 0)
    m = pad_matrices(tl.load(M + place, inside, other=0.0), s, t, N)
    tl.store(MIX + place, sinkhorn(m, K, NP, B), inside)
    adjoint = tl.load(ADJOINT + place, inside, other=0.0)
    tl.store(DM + place, sinkhorn_backward(m, adjoint, HISTORY, K, NP, B), inside)


def of_matrices(logits, adjoint, iterations):
    """Sinkhorn's result and gradient by the kernels' parts, of many matrices at once."""
    number, streams, _ = logits.shape
    padded = max(4, triton.next_power_of_2(streams))
    mix, back = torch.full_like(logits, math.nan), torch.full_like(logits, math.nan)
    history = torch.full((2 * iterations * padded * number,), math.nan, dtype=logits.dtype)
    scaled_and_back[(1,)](logits, adjoint, mix, back, history, N=streams, NP=padded, B=number, K=iterations)
    return mix, back


@pytest.mark.parametrize("std", [1, 4, 8, 16])
def test_the_gradient_of_sinkhorn_is_that_of_its_twenty_iterations(std):
    """Not the implicit one of a converged matrix, which is 0.4 to 15 % off here."""
    generator = torch.Generator().manual_seed(std)
    logits, adjoint = (torch.randn(256, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = (std * logits).requires_grad_()
    truth = divided(exact, 20)
    (expected,) = torch.autograd.grad(truth, exact, adjoint)
    mix, back = of_matrices(exact.detach(), adjoint, 20)
    assert_each_close((mix, back), (truth, expected), 1e-12, torch.float64)
    assert_within((mix.sum(-1) - 1).abs().max(), 1e-14)
    # float32: logits of 60 have steps of 4e-6
    single = exact.detach().float()
    exact = single.double().requires_grad_()
    truth = divided(exact, 20)
    (expected,) = torch.autograd.grad(truth, exact, adjoint.float().double())
    mix, back = of_matrices(single, adjoint.float(), 20)
    assert_each_close((mix, back), (truth, expected), 1e-5, torch.float32)
    assert_within((mix.sum(-1) - 1).abs().max(), 1e-6)


def test_sinkhorn_bears_logits_of_a_thousand():
    logits = 1e3 * torch.randn(16, 3, 3, generator=torch.Generator().manual_seed(0))
    mix, back = of_matrices(logits, torch.ones_like(logits), 20)
    assert mix.isfinite().all() and back.isfinite().all()
    assert_within((mix.sum(-1) - 1).abs().max(), 1e-6)


def rounded_coefficients(case):
    """The coefficients of a case, in float32, rounded to bfloat16 and back, as a careless connection has them."""
    with torch.no_grad():
        return case.kernels(*case.drawn()[0])[1].bfloat16().float()


def test_a_constant_signal_keeps_its_size_through_48_joins_in_bf16():
    """Whatever the coefficients are rounded to; the plain form loses it with them."""
    x = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16().expand(-1, 4, -1).contiguous()
    kept, plain, none = x, x, torch.zeros(3, 16, dtype=torch.bfloat16)
    coefficients = rounded_coefficients(Case("mhc_lite", 4, 16, 3))
    for _ in range(48):
        with torch.no_grad():
            kept = join(kept, coefficients, none, by_differences=True)
            plain = plain_join(plain.float(), coefficients, none.float(), by_differences=False)
    assert_within((kept.double() / x.double() - 1).abs().max(), 1e-6)
    assert (plain.double() / x.double() - 1).abs().max() >= 1e-3, "coefficients of bf16 lose it, or this shows nothing"


@triton.jit
def without_border(m_STB, s, t, N: tl.constexpr):
    return m_STB


@triton.jit
def next_row(x_BSC, s, index: tl.constexpr):
    return tl.sum(tl.where((s == index + 1)[None, :, None], x_BSC, 0.0), 1)


@triton.jit
def all_columns(column, R, N: tl.constexpr, NP: tl.constexpr, LITE: tl.constexpr):
    return column, column < R + 1


@triton.jit
def post_before_pre(gate, N: tl.constexpr):
    return tl.where(gate < N, gate * (N + 2) + N + 1, (gate - N) * (N + 2))


PLANTED = [
    (_streams_read, "pad_matrices", without_border, Case("mhc", 3, 5, 2)),
    (_streams_read_backward, "pad_matrices", without_border, Case("mhc", 3, 5, 2)),
    (_streams_read, "mix_columns", all_columns, Case("mhc_lite", 3, 5, 2)),
    (_streams_read_backward, "gate_places", post_before_pre, Case("mhc", 2, 5, 2)),
    (_streams_join, "row_of", next_row, None),
]


@interpreted
@pytest.mark.parametrize(("module", "name", "wrong", "case"), PLANTED)
def test_a_planted_fault_is_caught(monkeypatch, module, name, wrong, case):
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        if case is None:
            assert_joining_equals_the_formulas(Case("mhc", 3, 5, 2))
        else:
            assert_reading_equals_the_formulas(case)


def test_twice_gives_the_same_bits():
    case = Case("mhc_lite", 4, 24, 40)
    given, gradients = case.drawn()
    leaves = [each.requires_grad_() for each in given]
    one, other = (torch.autograd.grad(case.kernels(*leaves), leaves, gradients) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 9, 3)}, "9 streams: the kernels take 1 to 8; use impl=reference"),
        ({"x": torch.zeros(2, 2, 3, dtype=torch.int32)}, "streams of torch.int32"),
        ({"weight": torch.zeros(6, 9)}, r"weight \(6, 9\): give \(6, 8\)"),
        ({"bias": torch.zeros(8).double()}, "weights and coefficients of torch.float64: give torch.float32"),
        ({"iterations": 0}, "iterations=0 of Sinkhorn and Knopp: give 1 or more"),
        ({"precision": "bf16"}, "precision='bf16': give one of ieee, tf32, tf32x3"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(change, message):
    given = {"x": torch.zeros(2, 2, 3), "weight": torch.zeros(6, 8), "bias": torch.zeros(8), "iterations": 2}
    device = given["x"].device  # the changes were made when the tests were collected
    given |= {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in change.items()}
    with pytest.raises(ValueError, match=message):
        read_gated(given.pop("x"), given.pop("weight"), given.pop("bias"), None, **given)
