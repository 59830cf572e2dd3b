"""The chunked scan equals the recurrence as it is written, in float64 and position by position: outputs, gradients and
derivatives along a line."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from benchmarks.kernel_cases.recurrent import traffic
from kernels import _recurrent_backward, _recurrent_chunk, _recurrent_forward, recurrent
from stability.curvature import NoSecondDerivative, directional
from tests.kernels.counting import counting
from tests.kernels.guards import guarded, guards
from tests.kernels.interpreted import interpreted, interpreter_is_prepared_once
from tests.kernels.recurrence_loops import NAMES, RULES, by_loop, drawn
from tests.within import assert_within, relative_error, rounding_floor

__all__ = ["interpreter_is_prepared_once"]
FLOAT32, FLOAT64, BF16 = 1e-5, 1e-12, 1e-2


def scan(inputs, precision="ieee"):
    given = {"beta": None, "log_decay": None, **inputs}
    q, k, v, beta, log_decay = (given[name] for name in NAMES)
    if beta is None:
        return recurrent.gated_linear_attention(q, k, v, log_decay, precision=precision)
    return recurrent.delta_rule(q, k, v, beta, log_decay, precision=precision)


def leaves_of(inputs, dtype=None):
    return {name: each.detach().to(dtype or each.dtype).requires_grad_() for name, each in inputs.items()}


def errors(inputs):
    """Return what is wrong with the output and each gradient, every buffer between bands of NaN."""
    exact = leaves_of(inputs, torch.float64)
    expected = by_loop(**exact)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weight).sum(), list(exact.values()))
    with guards():
        leaves = {name: guarded(each) for name, each in leaves_of(inputs).items()}
        found = scan(leaves)
        assert found.dtype == torch.promote_types(inputs["v"].dtype, torch.float32)
        ours = torch.autograd.grad(found, list(leaves.values()), weight.to(found.dtype))
    dtype = found.dtype
    floor = rounding_floor(FLOAT64 if dtype == torch.float64 else FLOAT32, dtype, expected, *gradients)
    wrong = {"y": relative_error(found, expected, floor)}
    for name, mine, theirs in zip(inputs, ours, gradients, strict=True):
        assert mine.dtype == inputs[name].dtype
        wrong[name] = relative_error(mine, theirs, floor)
    return wrong


def shape_of(seed):
    """Return sizes of which none has to be a multiple of a block, and whether there is padding."""
    generator = torch.Generator().manual_seed(seed)
    below = lambda limit: int(torch.randint(1, limit + 1, (), generator=generator))  # noqa: E731
    sizes = {"batch": below(2), "heads": below(2), "num": below(50), "keys": below(20), "values": below(20)}
    return {**sizes, "padding": bool(below(2) - 1)}


SMALL = [
    ("scalar", {"num": 33, "keys": 3, "values": 17}),  # three chunks, of which the last has one position
    ("features", {"num": 18, "keys": 17, "values": 2, "padding": True}),
    ("delta", {"num": 16, "keys": 16, "values": 1, "heads": 2}),
    ("delta_scalar", {"num": 20, "keys": 5, "values": 6, "batch": 2, "padding": True}),
    ("delta_features", {"num": 19, "keys": 2, "values": 3}),
    ("scalar", {"num": 1, "keys": 1, "values": 1}),
]
MANY = [pytest.param(RULES[seed % 5], shape_of(seed), marks=pytest.mark.slow) for seed in range(45)]


@pytest.mark.parametrize(("rule", "sizes"), SMALL + MANY)
def test_outputs_and_gradients_are_the_recurrences(rule, sizes):
    wrong = errors(drawn(rule, 1, **sizes))
    assert_within(max(wrong.values()), FLOAT32, wrong)


def test_in_float64_it_is_exact_to_the_last_digits():
    wrong = errors(drawn("delta_scalar", 2, dtype=torch.float64))
    assert_within(max(wrong.values()), FLOAT64, wrong)


@pytest.mark.slow
def test_gradients_are_those_of_its_own_differences():
    inputs = leaves_of(drawn("delta_scalar", 3, num=18, keys=2, values=2, dtype=torch.float64))
    assert torch.autograd.gradcheck(
        lambda *given: scan(dict(zip(inputs, given, strict=True))), list(inputs.values()), fast_mode=True
    )


def test_inputs_of_bfloat16_are_computed_in_float32_and_their_gradients_are_rounded_once():
    wrong = errors(drawn("delta_scalar", 4, dtype=torch.bfloat16))
    assert_within(max(wrong[name] for name in ("y", "beta", "log_decay")), FLOAT32, wrong)
    assert max(wrong.values()) > 1e-4, wrong
    assert_within(max(wrong.values()), BF16, wrong)


def test_values_wider_than_a_block_are_divided_among_programs(monkeypatch):
    monkeypatch.setattr(recurrent, "STATE_SIZE", 1)
    wrong = errors(drawn("delta_scalar", 5, num=9, keys=3, values=18))
    assert_within(max(wrong.values()), FLOAT32, wrong)


def test_keys_that_are_all_alike_lose_no_digits():
    """The inverse of the chunk's system then has entries of 1, and the powers of its matrix some of 6,435."""
    inputs = drawn("delta", 6, num=16)
    inputs["k"] = inputs["k"][:, :, :1].expand(-1, -1, 16, -1).clone()
    inputs["beta"] = torch.ones_like(inputs["beta"])
    wrong = errors(inputs)
    assert_within(max(wrong.values()), FLOAT32, wrong)


@pytest.mark.parametrize("rule", ["scalar", "features"])
def test_however_much_is_forgotten_nothing_overflows_and_small_decays_keep_their_digits(rule):
    """ln a of −5,000 beside ln a of −0.01: as differences of running sums the small ones would be lost."""
    inputs = drawn(rule, 7, num=18, padding=True)
    inputs["log_decay"] = -0.01 * torch.rand(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(1))
    inputs["log_decay"][:, :, [3, 4]] = -5000.0
    wrong = errors(inputs)
    assert_within(max(wrong.values()), FLOAT32, wrong)


def test_what_heads_share_is_read_from_one_place_and_its_gradients_are_summed():
    inputs = drawn("scalar", 8, heads=2, num=5)
    inputs = {name: each if name == "v" else each[:, :1] for name, each in inputs.items()}
    exact = leaves_of(inputs, torch.float64)
    whole = {name: each.expand(-1, 2, -1, -1) for name, each in exact.items()}
    expected = torch.autograd.grad(by_loop(**whole).square().sum(), list(exact.values()))
    leaves, floor = leaves_of(inputs), rounding_floor(FLOAT32, torch.float32, *expected)
    for mine, theirs in zip(
        torch.autograd.grad(scan(leaves).square().sum(), list(leaves.values())), expected, strict=True
    ):
        assert mine.shape == theirs.shape
        assert_within(relative_error(mine, theirs, floor), FLOAT32)


def test_the_same_inputs_give_the_same_bits():
    leaves = leaves_of(drawn("delta_scalar", 9, num=18))
    first, second = (
        (found := scan(leaves), *torch.autograd.grad(found.sum(), list(leaves.values()))) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_keys_wider_than_the_state_may_be_are_refused_by_name():
    x = torch.zeros(1, 1, 2, 257)
    with pytest.raises(ValueError, match=r"^impl=triton takes keys of up to 256 features in a head, not 257$"):
        recurrent.gated_linear_attention(x, x, x, x[..., :1])


# Faults that the comparison above has to see: (module that the name is looked up in, name, what stands for it).
def _is_later_or_same(CHUNK: tl.constexpr):
    place_C = tl.arange(0, CHUNK)
    return place_C[:, None] >= place_C[None, :]


def _without_the_mask_of_rows(load):
    def faulty(pointer, strides, batch, head, row_C, num_rows, feature_F, num_features, DTYPE):
        return load(pointer, strides, batch, head, row_C, num_rows + 1, feature_F, num_features, DTYPE)

    return faulty


def _one_row_late(store):
    def faulty(pointer, value_CF, first_row, row_C, num_rows, feature_F, num_features):
        store(pointer, value_CF, first_row + 1, row_C, num_rows, feature_F, num_features)

    return faulty


FAULTS = {
    "the decays of a pair begin with the earlier one's own": (
        (_recurrent_chunk, "is_later", lambda _: _is_later_or_same),
    ),
    "a position past the end is read": ((_recurrent_forward, "load_rows", _without_the_mask_of_rows),),
    "a gradient is written one row late": ((_recurrent_backward, "store_rows", _one_row_late),),
    "the system of the delta rule is not solved": (
        (_recurrent_forward, "unit_lower_inverse", lambda _: lambda below, *_: below * 0.0 + 1.0),
    ),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, fault):
    inputs = drawn("delta_scalar", 1, num=17)
    for module, name, faulty in FAULTS[fault]:
        monkeypatch.setattr(module, name, faulty(getattr(module, name)))
    with pytest.raises(AssertionError):
        wrong = errors(inputs)
        assert_within(max(wrong.values()), FLOAT32, wrong)


@pytest.mark.parametrize("rule", RULES)
def test_derivatives_along_a_line_are_the_recurrences(rule):
    """Slope and curvature of a loss of the output, every input moving along a curve: relative to |u| |Hu|."""
    params = drawn(rule, 10, num=6, keys=3, values=4)
    direction = {name: each / 3 for name, each in drawn(rule, 11, num=6, keys=3, values=4).items()}

    def moved(params):  # ln a stays below 0, and has a second derivative, as all others
        return {name: -each.square() if name == "log_decay" else torch.sin(each) for name, each in params.items()}

    def loss_by(rule):
        return lambda params: rule(moved(params)).square().sum()

    exact = lambda given: {name: each.double() for name, each in given.items()}  # noqa: E731
    leaves = leaves_of(exact(params))
    loss = loss_by(lambda given: by_loop(**given))
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    along = sum((each * exact(direction)[name]).sum() for name, each in zip(leaves, gradients, strict=True))
    products = torch.autograd.grad(along, list(leaves.values()))
    size = lambda tensors: torch.cat([each.detach().flatten() for each in tensors]).norm()  # noqa: E731
    curvature = sum((each * exact(direction)[name]).sum() for name, each in zip(leaves, products, strict=True))
    with guards():
        found = directional(loss_by(scan), params, direction, method="taylor")
    length = size(exact(direction).values())
    assert_within(abs(found.slope - float(along.detach())), FLOAT32 * float(size(gradients) * length))
    assert_within(abs(found.curvature - float(curvature)), FLOAT32 * float(size(products) * length))


def test_a_second_derivative_by_autograd_is_refused_by_name():
    with pytest.raises(NoSecondDerivative, match=r"kernels\.recurrent\.scan has no second derivative by autograd"):
        directional(
            lambda params: scan(params).square().sum(), drawn("scalar", 12, num=3), drawn("scalar", 13, num=3),
            "double_backward",
        )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_bytes_and_operations_are_those_that_it_says(rule):
    sizes = {"batch": 1, "heads": 1, "num": 17, "keys": 17, "values": 3}
    inputs = drawn(rule, 14, **sizes)
    decays = inputs["log_decay"].shape[-1] if "log_decay" in inputs else 0
    told = {"positions": sizes.pop("num"), **sizes, "delta": "delta" in rule, "decays": decays}
    with counting() as forward:
        found = scan(leaves := leaves_of(inputs))
    assert forward.traffic == traffic(**told)
    with counting() as backward:
        torch.autograd.grad(found.sum(), list(leaves.values()))
    assert backward.traffic == traffic(**told, part="backward")


def test_bytes_of_the_second_order_are_those_that_it_says():
    inputs = drawn("delta_scalar", 15, num=2)
    parts = [(inputs[name][..., None] if name == "beta" else inputs[name],) * 3 for name in inputs]
    with counting() as counted:
        recurrent.SCAN.second_order(*parts, precision="ieee")
    told = traffic(batch=1, heads=1, positions=2, keys=5, values=6, delta=True, decays=1, part="second_order")
    assert (counted.read, counted.written) == (told.read, told.written)
