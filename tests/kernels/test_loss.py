"""Sums over a vocabulary by kernels against dense logits in float64: values, gradients, second derivatives along a
line, what is allocated, and what is loaded and stored."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_cases.loss import traffic
from kernels import _loss_plan, loss
from kernels.loss import Blocks, vocabulary_sums
from stability.curvature import NoSecondDerivative, directional
from tests.kernels import ahead
from tests.kernels.counting import counting
from tests.kernels.guards import guarded, guards
from tests.kernels.interpreted import interpreted, interpreter_is_prepared_once  # noqa: F401, a fixture of every test here
from tests.within import assert_within, relative_error, rounding_floor

# of the interpreter, about rows that hold NaN on purpose
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")
SMALL = Blocks(16, 16, 16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Case(NamedTuple):
    rows: int
    columns: int
    width: int
    dtype: torch.dtype = torch.float32
    bias: bool = True
    left_out: bool = False
    blocks: Blocks | None = SMALL
    seed: int = 0

    def inputs(self):
        """(hidden states, weights, biases, targets, columns left out); some rows leave none out, some their target."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, self.dtype)

        def choose(lowest):
            return torch.randint(lowest, self.columns, (self.rows,), generator=generator).to(DEVICE)

        # a large bias: logits of several tens, whose exponentials no sum without a maximum survives in bfloat16
        bias = 20 * draw(self.columns) if self.bias else None
        targets, left_out = choose(0), choose(-1) if self.left_out else None
        if left_out is not None:
            left_out[::5] = targets[::5]
        return draw(self.rows, self.width), draw(self.columns, self.width), bias, targets, left_out


def dense(hidden, weight, bias, targets, left_out):
    """The sums from all logits, as torch has them."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    at_target = logits.gather(1, targets[:, None]).squeeze(1)
    if left_out is None:
        return torch.stack([logits.logsumexp(1), at_target])
    own = left_out[:, None] == torch.arange(len(weight), device=weight.device)
    return torch.stack(
        [logits.masked_fill(own, -torch.inf).logsumexp(1), at_target, logits.masked_fill(own, 0.0).sum(1)]
    )


def check(case):
    """Compare sums and gradients with the dense ones, in guarded buffers that hold NaN before."""
    with guards():
        *factors, targets, left_out = case.inputs()
        factors = [None if each is None else guarded(each).requires_grad_() for each in factors]
        leaves = [each for each in factors if each is not None]
        found = vocabulary_sums(*factors, targets, left_out, blocks=case.blocks)
        towards = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        towards = towards.to(found)
        gradients = torch.autograd.grad(found, leaves, towards)
        wide = [None if each is None else each.detach().double().requires_grad_() for each in factors]
        truth = dense(*wide, targets, left_out)
        true_gradients = torch.autograd.grad(truth, [each for each in wide if each is not None], towards.double())
        assert found.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
        tolerance = min(TOLERANCES[case.dtype], 1e-5)
        assert_within(relative_error(found, truth, rounding_floor(tolerance, case.dtype, truth)), tolerance)
        floor = rounding_floor(TOLERANCES[case.dtype], case.dtype, *true_gradients)
        for gradient, true in zip(gradients, true_gradients, strict=True):
            assert gradient.dtype == case.dtype
            assert_within(relative_error(gradient, true, floor), TOLERANCES[case.dtype])


CASES = [
    Case(19, 37, 21),
    Case(5, 40, 33, bias=False, left_out=True),
    Case(17, 16, 16, torch.bfloat16, left_out=True),
    Case(33, 18, 7, torch.bfloat16, bias=False),
    Case(1, 33, 1, torch.float64, left_out=True),
    Case(20, 70, 40, blocks=None),
    Case(18, 5, 20),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_and_gradients_are_those_of_dense_logits(case):
    check(case)


def test_inputs_may_lie_in_memory_in_any_way():
    hidden, weight, bias, targets, left_out = Case(9, 21, 8, left_out=True).inputs()
    plain = (hidden, weight, bias, targets, left_out)
    strided = (hidden.T.contiguous().T, weight.repeat_interleave(3, 0)[::3], bias.repeat_interleave(2)[::2])
    strided += (targets.repeat_interleave(2)[::2], left_out.repeat_interleave(2)[::2])
    assert all(torch.equal(one, other) for one, other in zip(plain, strided, strict=True))
    one = bias[:1].expand(21)  # as a derivative that is the same for all columns comes from taylor
    found = []
    for *factors, target, own in (strided, plain):
        factors = [each.detach().requires_grad_() for each in factors]
        sums = vocabulary_sums(*factors, target, own)
        gradients = torch.autograd.grad(sums, factors, torch.ones_like(sums).T.contiguous().T)
        line = [(each.detach(), each.detach(), None) for each in factors[:2]]
        constant = [(each, None, None) for each in (target, own)]
        settings = {"precision": "ieee", "blocks": None}
        found.append([sums, *gradients, *loss._sums.second_order(*line, (bias, one, None), *constant, **settings)])
        one = one.contiguous()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def random_case(seed):
    generator = torch.Generator().manual_seed(100 + seed)

    def draw(most):
        return int(torch.randint(1, most + 1, (1,), generator=generator))

    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 3]
    return Case(draw(40), 1 + draw(80), draw(40), dtype, draw(2) == 1, draw(2) == 1, SMALL, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_sums_and_gradients_of_random_shapes_are_those_of_dense_logits(seed):
    check(random_case(seed))


def test_where_all_is_left_out_the_sum_is_empty_and_its_gradient_zero():
    hidden, weight = torch.ones(2, 3, requires_grad=True, device=DEVICE), torch.ones(1, 3, device=DEVICE)
    zeros = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = vocabulary_sums(hidden, weight, None, zeros, zeros)
    assert found.tolist() == [[-torch.inf] * 2, [3.0] * 2, [0.0] * 2]
    (gradient,) = torch.autograd.grad(found[0].exp().sum() + found[2].sum(), hidden)
    assert not gradient.any()


def test_no_positions_have_no_sums_and_move_nothing():
    weight = torch.ones(4, 3, requires_grad=True, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    found = vocabulary_sums(torch.ones(0, 3, device=DEVICE), weight, None, none)
    assert found.shape == (2, 0)
    found.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("order", [0, 2])
def test_nan_in_a_hidden_state_is_nan_in_the_sums_of_its_position(order):
    hidden, weight, bias, targets, left_out = Case(3, 20, 4, left_out=True).inputs()
    hidden[1, 2] = torch.nan
    if order == 0:
        found = vocabulary_sums(hidden, weight, bias, targets, left_out)
    else:
        moving = ((hidden, weight[:3], None), (weight, None, None), (bias, None, None))
        constant = ((targets, None, None), (left_out, None, None))
        *_, found = loss._sums.second_order(*moving, *constant, precision="ieee", blocks=SMALL)
    assert found.isnan().any(0).tolist() == [False, True, False]
    assert found[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("target", [-100, 5])
def test_a_target_that_is_no_column_makes_nan(target):
    targets = torch.tensor([0, target, 4], device=DEVICE)
    found = vocabulary_sums(torch.ones(3, 2, device=DEVICE), torch.ones(5, 2, device=DEVICE), None, targets)
    assert found.isnan().tolist() == [[False] * 3, [False, True, False]]


def test_other_dtypes_are_refused_by_name():
    numbers, targets = torch.ones(3, 3, dtype=torch.float16), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"takes one of float32, bfloat16 and float64, and was given float16$"):
        vocabulary_sums(numbers, numbers, None, targets)
    with pytest.raises(ValueError, match="was given float16, float32$"):
        vocabulary_sums(numbers, numbers.float(), None, targets)


def test_gradients_agree_with_differences_in_float64():
    hidden, weight, bias, targets, left_out = Case(2, 3, 2, torch.float64, left_out=True).inputs()
    leaves = [each.requires_grad_() for each in (hidden, weight, 0.1 * bias)]
    assert torch.autograd.gradcheck(lambda *factors: vocabulary_sums(*factors, targets, left_out), leaves)


class Changed:
    """A kernel that is launched with one of its arguments changed."""

    def __init__(self, kernel, index, change):
        self.kernel, self.index, self.change = kernel, index, change

    def __getitem__(self, grid):
        def launch(*args, **constants):
            args = list(args)
            args[self.index] = self.change(args[self.index])
            self.kernel[grid](*args, **constants)

        return launch


def argument(kernel, name):
    return kernel.arg_names.index(name)


FAULTS = {  # a kernel, its argument, and what is wrong with it
    "a column too few": ("sums_kernel", "V", lambda columns: columns - 1),
    "a column too many": ("sums_kernel", "V", lambda columns: columns + 1),
    "a row beyond the buffer": ("sums_kernel", "R", lambda rows: rows + 1),
    "a strip too short": ("logit_gradient_kernel", "last", lambda last: last - 1),
    "a column not carried back": ("hidden_gradient_kernel", "last", lambda last: last - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    name, parameter, change = FAULTS[fault]
    kernel = getattr(loss, name)
    monkeypatch.setattr(loss, name, Changed(kernel, argument(kernel, parameter), change))
    with pytest.raises(AssertionError):
        check(Case(9, 21, 8))


def test_a_gradient_by_the_weights_of_a_position_too_few_is_caught(monkeypatch):
    multiply = loss.multiply
    monkeypatch.setattr(loss, "multiply", lambda left, right: multiply(left[..., 1:], right[:, 1:]))
    with pytest.raises(AssertionError):
        check(Case(9, 21, 8))


def along_a_line(left_out, dtype):
    """(losses by kernels and by dense logits as functions of parameters, parameters, direction). Hidden states bend."""
    hidden, weight, bias, targets, own = Case(9, 37, 18, torch.float64, left_out=left_out).inputs()
    params = {"inputs": hidden, "weight": 0.3 * weight, "bias": 0.05 * bias}
    direction = {name: each.roll(1, 0).flip(-1) for name, each in params.items()}

    def mean(sums):
        return (sums[0] - sums[1]).square().mean() + (0.01 * sums[2].mean() if left_out else 0.0)

    def by_kernels(at):
        return mean(vocabulary_sums(at["inputs"].sin(), at["weight"], at["bias"], targets, own, blocks=SMALL))

    def by_logits(at):
        return mean(dense(at["inputs"].sin(), at["weight"], at["bias"], targets, own))

    narrow = [{name: each.to(dtype) for name, each in values.items()} for values in (params, direction)]
    return by_kernels, by_logits, narrow, (params, direction)


def bounds(function, params, direction):
    """(|u||g|, |u||Hu|), which slope and curvature along u cannot exceed."""
    leaves = {name: each.detach().requires_grad_() for name, each in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        value = function(leaves)
    gradient = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
    slope = sum((part * direction[name]).sum() for name, part in zip(leaves, gradient, strict=True))
    product = torch.autograd.grad(slope, list(leaves.values()))
    norm = lambda parts: torch.cat([part.flatten() for part in parts]).norm().item()  # noqa: E731
    return norm(direction.values()) * norm(gradient), norm(direction.values()) * norm(product)


@pytest.mark.parametrize(
    ("left_out", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.float64), (False, torch.bfloat16)],
)
def test_taylor_carries_them_to_second_order(left_out, dtype):
    by_kernels, by_logits, narrow, whole = along_a_line(left_out, dtype)
    truth = directional(by_logits, *whole, "double_backward")
    with guards():
        found = directional(by_kernels, *narrow, "taylor")
    rel, (of_slope, of_curvature) = TOLERANCES[dtype], bounds(by_logits, *whole)
    assert found.method == "taylor"
    assert found.loss == pytest.approx(truth.loss, rel=rel)
    assert found.slope == pytest.approx(truth.slope, abs=rel * of_slope)
    assert found.curvature == pytest.approx(truth.curvature, abs=rel * of_curvature)


def test_a_variance_of_the_logits_slope_that_is_small_beside_its_mean_is_not_lost():
    """z′ of all columns is 1,000 and a little: its square less the square of its mean would be noise in float32."""
    hidden, weight, _, targets, _ = Case(7, 50, 12).inputs()
    bias = (torch.zeros(50, device=DEVICE), torch.full((50,), 1000.0, device=DEVICE), None)
    line = (hidden, 0.1 * hidden.flip(0), None)
    whole = {"precision": "ieee", "blocks": SMALL}
    none = (None, None, None)
    with_shift = loss._sums.second_order(line, (weight, None, None), bias, (targets, None, None), none, **whole)
    without = loss._sums.second_order(line, (weight, None, None), none, (targets, None, None), none, **whole)
    floor = rounding_floor(1e-3, torch.float32, without[2])
    assert_within(relative_error(with_shift[2], without[2], floor), 1e-3)


def test_a_second_derivative_by_autograd_is_refused_by_name():
    by_kernels, _, narrow, _ = along_a_line(False, torch.float32)
    with pytest.raises(NoSecondDerivative, match="vocabulary_sums has no second derivative"):
        directional(by_kernels, *narrow, "double_backward")


class Largest(TorchDispatchMode):
    """Record the most elements that a tensor of numbers has which torch makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():  # the interpreter copies bytes
                self.elements = max(self.elements, each.numel())
        return found


def test_no_tensor_of_positions_by_vocabulary_is_made():
    rows, columns, width = 24, 256, 3
    hidden, weight, bias, targets, _ = Case(rows, columns, width).inputs()
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    with Largest() as largest:
        sums = vocabulary_sums(*leaves, targets, blocks=Blocks(32, 32, 16))
        (sums[0] - sums[1]).sum().backward()
    strip = rows * columns // _loss_plan.STRIP_SHARE
    assert largest.elements == max(strip, columns * width), "of the head's gradient or a strip of the logits'"
    with Largest() as plain:
        torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), targets).backward()
    assert plain.elements == rows * columns, "what this test looks for is seen where it is"


def test_a_strip_holds_to_its_bytes_and_to_its_share_and_is_never_empty():
    half = Blocks(128, 128, 64)
    assert _loss_plan.strip_of(8192, 50_258, 2, half) == 4096  # 64 MiB of bfloat16
    assert _loss_plan.strip_of(64, 50_258, 2, half) == 6272  # an eighth of the vocabulary
    assert _loss_plan.strip_of(2**20, 300, 4, half) == 128
    assert _loss_plan.strip_of(2**20, 30, 4, half) == 30
    for rows, columns in ((1, 1), (8192, 50_258), (100, 5000), (10**6, 128)):
        ranges, wide = _loss_plan.ranges_of(rows, columns, half)
        assert (ranges - 1) * wide < columns <= ranges * wide


@interpreted
@pytest.mark.parametrize(("bias", "left_out"), [(True, False), (False, True)])
def test_traffic_is_what_the_interpreter_counts(bias, left_out):
    sizes = {"rows": 19, "columns": 170, "width": 21, "dtype": torch.float32, "bias": bias, "left_out": left_out}
    case = Case(19, 170, 21, bias=bias, left_out=left_out, blocks=Blocks(16, 32, 16))
    *factors, targets, own = case.inputs()
    leaves = [each.requires_grad_() for each in factors if each is not None]
    with counting() as forward:
        sums = vocabulary_sums(*factors, targets, own, blocks=case.blocks)
    with counting() as backward:
        torch.autograd.grad(sums, leaves, torch.ones_like(sums))
    hidden, weight, bias_V = (None if each is None else each.detach() for each in factors)
    parts = ((hidden,) * 3, (weight, weight, None), (bias_V, bias_V, None), (targets, None, None), (own, None, None))
    with counting() as second:
        loss._sums.second_order(*parts, precision="ieee", blocks=case.blocks)
    for of, counted in (("forward", forward), ("backward", backward), ("second_order", second)):
        said = traffic(**sizes, of=of, blocks=case.blocks)
        assert (counted.read, counted.written) == (said.read, said.written), of
        own = said.flops - (2 * 19 * 170 * 21 if of == "backward" else 0)  # without torch's product
        assert counted.flops >= own > 0.2 * counted.flops, "blocks are padded with zeros, which it leaves out"


def test_operations_are_those_of_the_matrix_products():
    product = 2 * 8192 * 50_258 * 768
    passes = {of: traffic(8192, 50_258, 768, of=of).flops for of in ("forward", "backward", "second_order")}
    assert passes == {"forward": product, "backward": 3 * product, "second_order": 5 * product}


AHEAD = """
    from kernels.loss import vocabulary_sums, _sums
    for dtype, precision in ((torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")):
        hidden, weight, bias = (torch.ones(*shape, dtype=dtype) for shape in ((256, 768), (512, 768), (512,)))
        targets = torch.zeros(256, dtype=torch.int64)
        settings = {"precision": precision, "blocks": None}
        given = (hidden, weight, bias, targets, targets)
        out, saved = _sums.forward(*given, **settings)
        _sums.backward(out, (True, True, True, False, False), saved, *given, **settings)
        parts = ((hidden,) * 3, (weight, weight, None), (bias, bias, None), (targets, None, None), (targets, None, None))
        _sums.second_order(*parts, **settings)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100_and_fit_into_it():
    launched = ahead.compiled(AHEAD)
    assert {each.name for each in launched} >= {"sums_kernel", "hidden_gradient_kernel", "second_order_kernel"}
    for each in launched:
        each.assert_fits()
    assert not [each for each in launched if each.stack > 16], "numbers are kept outside of registers"
