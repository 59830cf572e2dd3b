"""Band attention equals a dense softmax in float64 that is written here: outputs, gradients and second order, under
padding, dilation and global keys, with guards around every buffer."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernel_cases.band_attention import traffic
from kernels import _band_backward, _band_tiles, band_attention
from kernels.band_attention import operation
from stability.curvature import NoSecondDerivative, directional
from stability.mechanisms import build
from tests.kernels.ahead import compiled
from tests.kernels.counting import counting
from tests.kernels.guards import guarded, guards
from tests.kernels.interpreted import interpreted
from tests.within import assert_within, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}
# of one product on its way into a sum: two exponentials, a quotient, a difference, two products
ROUNDINGS = 6
# the settings that a case leaves out
USUAL = {"batch": 1, "heads": 1, "queries": 5, "width": 4, "before": 1, "after": 1, "dilation": 1, "few": 0}
USUAL |= {"own": True, "is_masked": False, "dtype": torch.float32}


def dense(q, k, v, present=None, *, before, after, dilation=1, global_keys=0, own=True, scale=None):
    """Softmax over whole rows of N scores, a row that sees nothing being zero."""
    num_queries, width = q.shape[-2:]
    place = torch.arange(num_queries)
    ahead = place - place[:, None]
    seen = (ahead % dilation == 0) & (ahead >= -before * dilation) & (ahead <= after * dilation)
    seen = torch.cat([torch.ones(num_queries, global_keys, dtype=torch.bool), seen], 1)[None]
    if present is not None:
        itself = torch.cat([torch.zeros(num_queries, global_keys), torch.eye(num_queries)], 1).bool()
        seen = seen & (present[:, None] | (itself if own else torch.zeros_like(itself)))
    seen, is_empty = seen[:, None], ~seen.any(-1)[:, None, :, None]
    scores = q @ k.mT * (1 / math.sqrt(width) if scale is None else scale)
    weights = scores.masked_fill(~seen & ~is_empty, -math.inf).softmax(-1)
    return torch.where(is_empty, 0.0, weights @ v)


def drawn(case, seed=0):
    """q, k, v, the mask and the gradient of the output of a case, and the settings of the call."""
    case = USUAL | case
    generator = torch.Generator().manual_seed(seed)
    normal = lambda length: torch.randn(  # noqa: E731
        case["batch"], length, case["heads"], case["width"], generator=generator
    ).to(case["dtype"])
    lengths = (case["queries"], *[case["queries"] + case["few"]] * 2, case["queries"])
    q, k, v, gradient = (normal(length).transpose(1, 2) for length in lengths)
    present = torch.rand(case["batch"], lengths[1], generator=generator) > 0.4 if case["is_masked"] else None
    settings = {name: case[name] for name in ("before", "after", "dilation", "own")} | {"global_keys": case["few"]}
    return (q, k, v), present, gradient, settings


def summands(q, k, v, gradient, present, **settings):
    """The sizes of the sums that give o, dq, dk and dv: the norm of each with every product taken as positive. Where a
    sum cancels, as dq does of one position alone, its rounding is a share of these and not of the sum.

    With p = softmax(s·q kᵀ): o = p v, dv = pᵀ do, dS = p ∘ (do vᵀ − rowsum(p ∘ do vᵀ)), dq = s·dS k and dk = s·dSᵀ q;
    ``settings`` say which pairs see each other.
    """
    identity = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-1], -1)
    p = dense(q, k, identity, present, **settings)
    towards = gradient.abs() @ v.abs().mT
    ds = p * (towards + (p * towards).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    parts = (p @ v.abs(), ds @ k.abs(), ds.mT @ q.abs(), p.mT @ gradient.abs())
    return [float(each.norm()) for each in parts]


def assert_equals_dense(case, seed=0):
    """The output and all gradients equal those of the dense softmax in float64, every buffer guarded."""
    inputs, present, gradient, settings = drawn(case, seed)
    leaves = [guarded(each).requires_grad_() for each in inputs]
    with guards():
        out = band_attention.band_attention(*leaves, present, **settings)
        found = torch.autograd.grad(out, leaves, guarded(gradient))
    exact = [each.double().requires_grad_() for each in inputs]
    truth = dense(*exact, present, **settings)
    expected = torch.autograd.grad(truth, exact, gradient.double())
    dtype = leaves[0].dtype
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # bf16 is summed in float32
    with torch.no_grad():
        sizes = summands(*exact, gradient.double(), present, **settings)
    for name, one, other, size in zip(("o", "dq", "dk", "dv"), (out, *found), (truth, *expected), sizes, strict=True):
        assert_within(
            relative_error(one, other, ROUNDINGS * unit / TOLERANCE[dtype] * size), TOLERANCE[dtype], name, case
        )


CASES = {
    "one position": {"queries": 1},
    "a whole block": {"queries": 16, "width": 16, "before": 2, "after": 2},
    "beyond a block, causal": {"queries": 19, "before": 3, "after": 0, "heads": 2},
    "padding": {"batch": 2, "queries": 18, "before": 2, "after": 2, "is_masked": True},
    "padding that leaves rows empty": {"queries": 12, "before": 1, "after": 0, "is_masked": True, "own": False},
    "dilation and global keys": {"queries": 7, "dilation": 2, "few": 2, "is_masked": True, "own": False},
    "more global keys than a tile": {"queries": 3, "few": 17},
    "a window beyond the sequence": {"queries": 6, "before": 20, "after": 9},
    "odd widths": {"queries": 4, "width": 19},
    "bf16": {"queries": 17, "width": 8, "before": 2, "after": 2, "few": 1, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_equal_a_dense_softmax(case):
    assert_equals_dense(case)


def random_case(seed):
    draw = random.Random(seed)
    return {
        "batch": draw.randint(1, 2),
        "heads": draw.randint(1, 2),
        "queries": draw.randint(1, 40),
        "width": draw.choice([4, 5, 8, 16, 33, 64, 128]),
        "before": draw.choice([0, 1, 2, 5, 17]),
        "after": draw.choice([0, 1, 2, 5, 17]),
        "dilation": draw.choice([1, 1, 2, 3]),
        "few": draw.choice([0, 0, 1, 3]),
        "own": draw.random() < 0.5,
        "is_masked": draw.random() < 0.5,
        "dtype": draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_shapes_equal_a_dense_softmax(seed):
    assert_equals_dense(random_case(seed), seed)


@pytest.mark.slow
def test_128_wide_heads_and_long_windows_equal_a_dense_softmax():
    assert_equals_dense({"queries": 150, "width": 128, "before": 40, "after": 40, "few": 1})


def test_gradcheck():
    inputs, present, _, settings = drawn(
        {"queries": 3, "width": 2, "few": 1, "is_masked": True, "dtype": torch.float64}
    )
    leaves = [each.contiguous().requires_grad_() for each in inputs]
    call = lambda *leaves: band_attention.band_attention(*leaves, present, **settings)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@triton.jit
def sees_one_less(query, key, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    return (key - query >= -BEFORE) & (key - query < AFTER)


@triton.jit
def valid_without_mask(present, position, inside, MASKED: tl.constexpr):
    return inside


@triton.jit
def places_without_halo(first, residue, limit, num_queries, COUNT: tl.constexpr, DILATION: tl.constexpr):
    place = first + tl.arange(0, COUNT)
    n = residue + place * DILATION
    return place, n, (place >= 0) & (n < num_queries) & (place < limit - 1)


PLANTED = [
    (_band_tiles, "sees", sees_one_less, CASES["beyond a block, causal"]),
    (_band_backward, "sees", sees_one_less, CASES["padding"]),
    (_band_tiles, "valid", valid_without_mask, CASES["padding"]),
    (_band_backward, "valid", valid_without_mask, CASES["padding"]),
    (_band_tiles, "places", places_without_halo, {"queries": 17, "before": 0}),
    (_band_backward, "places", places_without_halo, CASES["a whole block"]),
]


@interpreted
@pytest.mark.parametrize(("module", "name", "wrong", "case"), PLANTED)
def test_a_planted_fault_is_caught(monkeypatch, module, name, wrong, case):
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        assert_equals_dense(case)


def test_nothing_written_or_written_beside_is_caught():
    with pytest.raises(AssertionError, match="not written"), guards():
        torch.empty(3)
    with pytest.raises(AssertionError, match="written beside"), guards():
        torch.empty(3).zero_().as_strided((5,), (1,), 64).zero_()


def test_twice_gives_the_same_bits():
    inputs, present, gradient, settings = drawn({"queries": 18, "few": 2, "is_masked": True})
    leaves = [each.requires_grad_() for each in inputs]
    call = lambda: band_attention.band_attention(*leaves, present, **settings)  # noqa: E731
    first, second = (torch.autograd.grad(call(), leaves, gradient) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def curve(case, seed=0):
    """A loss of the attention of three moving tensors, by the operation or the dense softmax."""
    inputs, present, weight, settings = drawn(case, seed)
    params = dict(zip("qkv", inputs, strict=True))
    generator = torch.Generator().manual_seed(seed + 1)
    direction = {name: torch.randn(each.shape, generator=generator).to(each.dtype) for name, each in params.items()}

    def loss_by(attention):
        def loss(params):
            q, k, v = torch.sin(params["q"]), params["k"] * params["k"], torch.tanh(params["v"])
            return (attention(q, k, v, present, **settings) * weight.to(v.dtype)).sum()

        return loss

    return params, direction, loss_by


@pytest.mark.parametrize(
    "case",
    [CASES["beyond a block, causal"], {"queries": 9, "few": 2, "dilation": 2, "is_masked": True, "own": False}],
    ids=["causal", "global keys, dilation, padding"],
)
def test_second_order_along_a_line_equals_double_backward_of_the_dense_softmax(case):
    params, direction, loss_by = curve(case)
    with guards():
        found = directional(loss_by(band_attention.band_attention), params, direction, "taylor")
    params, direction = ({name: each.double() for name, each in of.items()} for of in (params, direction))
    truth = directional(loss_by(dense), params, direction, "double_backward")
    _, products = torch.autograd.functional.hvp(
        lambda *q_k_v: loss_by(dense)(dict(zip("qkv", q_k_v, strict=True))),
        tuple(params.values()),
        tuple(direction.values()),
    )
    u, hu = (math.sqrt(sum(float(each.square().sum()) for each in of)) for of in (direction.values(), products))
    assert_within(abs(found.curvature - truth.curvature), 1e-5 * u * hu)
    assert found.slope == pytest.approx(truth.slope, rel=1e-5)


@pytest.mark.parametrize("moving", ["q", "k", "v"])
def test_second_order_holds_where_one_tensor_alone_moves(moving):
    params, direction, loss_by = curve({"queries": 3, "dtype": torch.float64})
    one, held = {moving: params[moving]}, {name: each for name, each in params.items() if name != moving}
    by = lambda attention: lambda one: loss_by(attention)(held | one)  # noqa: E731
    found = directional(by(band_attention.band_attention), one, {moving: direction[moving]}, "taylor")
    truth = directional(by(dense), one, {moving: direction[moving]}, "double_backward")
    assert (found.slope, found.curvature) == pytest.approx((truth.slope, truth.curvature), rel=1e-10)


@interpreted
def test_a_fault_in_the_second_order_is_caught(monkeypatch):
    monkeypatch.setattr(_band_tiles, "sees", sees_one_less)
    with pytest.raises(AssertionError):
        test_second_order_along_a_line_equals_double_backward_of_the_dense_softmax(CASES["beyond a block, causal"])


def test_a_second_derivative_by_autograd_is_refused_by_name():
    params, direction, loss_by = curve({"queries": 2})
    with pytest.raises(NoSecondDerivative, match="band_attention has no second derivative by autograd"):
        directional(loss_by(band_attention.band_attention), params, direction, "double_backward")


@pytest.mark.parametrize("phase", ["forward", "backward", "second_order"])
@pytest.mark.parametrize(
    "case",
    [
        {"queries": 18, "before": 2, "after": 1, "heads": 2},
        {"queries": 33, "dilation": 2, "few": 2, "is_masked": True, "width": 5, "dtype": torch.bfloat16},
    ],
    ids=["plain", "global keys, dilation, padding, bf16"],
)
def test_traffic_is_what_the_interpreter_counts(case, phase):
    case = USUAL | case
    inputs, present, gradient, settings = drawn(case)
    leaves = [each.requires_grad_() for each in inputs]
    if phase == "second_order":
        with counting() as count:
            parts = [(each.detach(),) * 3 for each in leaves]
            operation.second_order(*parts, (present, None, None), **settings, scale=1.0, precision="ieee")
    else:
        with counting() as count:
            out = band_attention.band_attention(*leaves, present, **settings)
        if phase == "backward":
            with counting() as count:
                torch.autograd.grad(out, leaves, gradient)
    sizes = {name: case[name] for name in ("batch", "heads", "width", "before", "after", "dilation", "dtype")}
    found = traffic(
        **sizes,
        positions=case["queries"] + case["few"],
        global_keys=case["few"],
        masked=case["is_masked"],
        phase=phase,
    )
    assert found == count.traffic


def test_traffic_grows_linearly_with_the_length():
    sizes = {"batch": 1, "heads": 12, "width": 64, "before": 2, "after": 2}
    long, longer = (traffic(**sizes, positions=positions, phase="backward").bytes for positions in (4096, 8192))
    assert longer / long == pytest.approx(2, rel=1e-3)


ERRORS = [
    ({"width": 129}, {}, "head width 129 is not within 1 … 128; use impl=reference"),
    ({}, {"before": -1}, "before=-1"),
    ({}, {"global_keys": 1}, "do not fit queries"),
    ({"dtype": torch.float16}, {}, "float16"),
    ({}, {"precision": "bf16x3"}, "precision='bf16x3'; choices: ieee, tf32"),
]


@pytest.mark.parametrize(("case", "changes", "message"), ERRORS)
def test_what_it_does_not_take_is_refused_in_one_line(case, changes, message):
    inputs, present, _, settings = drawn(case)
    with pytest.raises(ValueError, match=message):
        band_attention.band_attention(*inputs, present, **settings | changes)


def test_a_mask_of_another_shape_is_refused():
    inputs, _, _, settings = drawn({})
    with pytest.raises(ValueError, match=r"expected bool \(B, N\)"):
        band_attention.band_attention(*inputs, torch.ones(1, 4, dtype=torch.bool), **settings)


MECHANISMS = [
    ("sw", {"window": 2}, "bidirectional"),
    ("sw", {"window": 1}, "causal"),
    ("longformer", {"window": 1, "dilation": 2, "global_tokens": 2}, "bidirectional"),
    ("longformer", {"window": 2, "global_tokens": 1}, "causal"),
    ("longformer", {"window": 1, "global_tokens": 0}, "bidirectional"),
]


@pytest.mark.parametrize(("name", "settings", "direction"), MECHANISMS)
def test_mechanisms_equal_their_reference_under_padding(name, settings, direction):
    """Every output and gradient, those of padding among them."""
    found = []
    mask_BN = torch.ones(2, 9, dtype=torch.bool)
    mask_BN[0, 6:] = mask_BN[1, 0] = False
    x_BND = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    for impl in ("reference", "triton"):
        torch.manual_seed(1)
        layer = build(name, width=8, heads=1, direction=direction, impl=impl, **settings)
        leaf = x_BND.clone().requires_grad_()
        y_BND = layer(leaf, mask_BN=mask_BN)
        gradients = torch.autograd.grad(y_BND.square().sum(), [leaf, *layer.parameters()])
        found.append([y_BND, *gradients])
    for reference, by_kernel in zip(*found, strict=True):
        assert_within((by_kernel - reference).norm(), 1e-5 * reference.norm() + 1e-6)


COMPILED = """
from kernels.band_attention import band_attention, operation

def call(dtype, window, width, few, dilation, precision):
    drawn = lambda length: torch.randn(1, 2, length, width, dtype=dtype)
    q, k, v = (drawn(length).requires_grad_() for length in (256, 256 + few, 256 + few))
    mask = torch.ones(1, 256 + few, dtype=torch.bool)
    settings = dict(before=window, after=window, dilation=dilation, global_keys=few, own=True, precision=precision)
    out = band_attention(q, k, v, mask, **settings)
    out.backward(torch.ones_like(out))
    parts = [(each.detach(),) * 3 for each in (q, k, v)]
    operation.second_order(*parts, (mask, None, None), scale=0.1, **settings)

call({})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        "torch.float32, 2, 64, 1, 1, 'ieee'",
        "torch.float32, 128, 64, 0, 2, 'tf32'",
        "torch.bfloat16, 2, 64, 0, 1, 'ieee'",
        "torch.bfloat16, 128, 128, 1, 1, 'ieee'",
    ],
)
def test_compiles_for_an_h100_and_fits_it(sizes):
    found = compiled(COMPILED.format(sizes))
    assert [each.name for each in found] == ["forward_kernel", "query_kernel", "key_kernel", "taylor_kernel"]
    for each in found:
        each.assert_fits()
