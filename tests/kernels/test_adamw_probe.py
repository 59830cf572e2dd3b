"""The fused AdamW steps as torch's does, from whose state it goes on, and adds up what the step did."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from benchmarks.kernel_cases.adamw_probe import traffic
from kernels import adamw_probe
from stability.curvature import step_direction, step_without_decay
from stability.curvature.alpha_max import has_paper_state
from stability.optimizers import Probing, build
from tests.kernels.ahead import compiled
from tests.kernels.counting import counting
from tests.kernels.guards import BAND, between_bands, guards
from tests.kernels.interpreted import interpreted
from tests.within import assert_within

SHAPES = [(3, 5), (7,), (1,), (2, 1, 3)]
HYPER = {"lr": 3e-2, "betas": (0.9, 0.999), "epsilon": 1e-6, "weight_decay": 0.1}


def tensors(shapes, dtype=torch.float32, seed=0):
    """Parameters, gradients and the two means of tensors between bands of NaN, and those buffers."""
    generator = torch.Generator().manual_seed(seed)
    columns, buffers = [], []
    for column in range(4):
        columns.append([])
        for shape in shapes:
            view, buffer = between_bands(shape, dtype)
            values = torch.randn(shape, generator=generator)
            view.copy_(0.1 * values.square() if column == 3 else values)
            columns[-1].append(view)
            buffers.append(buffer)
    return columns, buffers


def by_hand(theta, g, m, v, step, *, lr, betas, epsilon, weight_decay):
    """Algorithm 2 in float64: θ⁺, m, v."""
    theta, g, m, v = (each.double() for each in (theta, g, m, v))
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    direction = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + epsilon)
    return theta * (1 - lr * weight_decay) - lr * direction, m, v


def assert_near(found, truth, tolerance):
    assert_within((found.double() - truth).norm(), tolerance * truth.norm())


def assert_steps_by_hand(shapes=SHAPES, dtype=torch.float32, seed=0, first=3):
    """One step of tensors that have taken different numbers of steps, every buffer guarded; the sums are those of the
    step that the parameters took."""
    (params, gradients, means, squares), buffers = tensors(shapes, dtype, seed)
    steps = [torch.tensor(float(first + index)) for index in range(len(shapes))]
    before = [each.clone() for each in (*params, *gradients)]
    expected = [
        by_hand(*each, **HYPER) for each in zip(params, gradients, means, squares, map(float, steps), strict=True)
    ]
    without = [
        by_hand(*each, **HYPER | {"weight_decay": 0.0})[0]
        for each in zip(params, gradients, means, squares, map(float, steps), strict=True)
    ]
    with guards():
        probe = adamw_probe.adamw_probe(params, gradients, means, squares, steps, **HYPER)
    # bf16: computed in float32 and rounded once, by half a unit in the last place or less
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps}[dtype]
    for index, (theta, m, v) in enumerate(expected):
        assert_near(params[index], theta, tolerance)
        assert_near(means[index], m, tolerance)
        assert_near(squares[index], v, tolerance)
        assert torch.equal(gradients[index], before[len(shapes) + index])
    for buffer in buffers:
        assert buffer[:BAND].isnan().all() and buffer[-BAND:].isnan().all()
    assert_sums(probe, before[: len(shapes)], gradients, params, without, dtype)


def assert_sums(probe, before, gradients, after, without, dtype):
    flat = lambda of: torch.cat([each.double().flatten() for each in of])  # noqa: E731
    g, moved, alone = (
        flat(gradients),
        flat(after) - flat(before),
        flat([each.to(dtype) for each in without]) - flat(before),
    )
    assert probe.sums[0].sqrt().item() == pytest.approx(g.norm().item(), rel=1e-6)
    assert probe.step_norm() == pytest.approx(moved.norm().item(), rel=1e-6)
    lr, loose = HYPER["lr"], 2e-2 if dtype == torch.bfloat16 else 1e-5
    # θ less its decay is rounded to its dtype from float64 here, from float32 there: where the two lie on either side of
    # a half, an entry is a unit apart, in bf16 one of 2¹⁶, in float32 any
    unit = 0.0 if dtype == torch.bfloat16 else torch.finfo(dtype).eps
    room = unit * flat(before)
    assert probe.step_norm() / lr == pytest.approx(moved.norm().item() / lr, rel=1e-6)
    assert probe.slope(lr) == pytest.approx((g @ moved).item() / lr, rel=1e-5)
    assert_within(abs(probe.step_norm(decay=False) - alone.norm().item()), loose * alone.norm() + room.norm())
    slope = (g @ alone).item() / lr
    assert_within(abs(probe.slope(lr, decay=False) - slope), loose * (1 + abs(slope)) + (g * room).norm() / lr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first", [1, 1000])
def test_a_step_is_algorithm_2_and_the_sums_are_its_own(dtype, first):
    assert_steps_by_hand(dtype=dtype, first=first)


def test_a_tensor_of_several_blocks_counts_every_entry_once():
    assert_steps_by_hand([(2, adamw_probe.BLOCK + 5), (3,)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_shapes_are_stepped_by_hand(seed):
    draw = torch.Generator().manual_seed(seed)
    number = lambda high: int(torch.randint(1, high, (), generator=draw))  # noqa: E731
    shapes = [tuple(number(60) for _ in range(number(4))) for _ in range(number(6))]
    assert_steps_by_hand(shapes, torch.bfloat16 if seed % 4 == 0 else torch.float32, seed, number(50))


def test_a_planted_fault_is_caught(monkeypatch):
    real = adamw_probe._blocks
    adamw_probe._blocks.cache_clear()
    monkeypatch.setattr(adamw_probe, "_blocks", lambda lengths, device: real(lengths, device)[:-1])
    with pytest.raises(AssertionError):  # the last block is never stepped
        assert_steps_by_hand()
    monkeypatch.setattr(adamw_probe, "_blocks", lambda lengths, device: real(lengths, device)[[0, 0, 1, 2, 3]])
    with pytest.raises(AssertionError):  # one is stepped twice
        assert_steps_by_hand()


def test_a_length_beyond_the_tensor_is_caught(monkeypatch):
    real = adamw_probe._copy_to_device

    def one_more(addresses, lengths, device):
        return real(addresses, tuple(length + 1 for length in lengths), device)

    monkeypatch.setattr(adamw_probe, "_copy_to_device", one_more)
    with pytest.raises(AssertionError):
        assert_steps_by_hand()


class Toy(nn.Module):
    """A matrix that lies transposed in memory, a vector, and one that gets no gradient at some steps."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=draws).t())
        self.vector = nn.Parameter(torch.randn(5, generator=draws))
        self.seldom = nn.Parameter(torch.randn(2, 2, generator=draws))


def set_gradients(model, step):
    draws = torch.Generator().manual_seed(100 + step)
    for name, param in model.named_parameters():
        # laid as the parameter, as autograd leaves it: torch's fused AdamW takes any other in the wrong order
        gradient = torch.empty_like(param).copy_(torch.randn(param.shape, generator=draws))
        param.grad = None if name == "seldom" and step % 2 else gradient


# On CUDA torch's fused AdamW has 1 − β₂ from β₂ in float32, 1.3e-5 too small for 0.999: these are exact
BETAS = {"beta1": 0.875, "beta2": 1 - 2**-10}


def optimizers(**settings):
    settings = {"lr": 1e-2, "decay": "matrices", "weight_decay": 0.1} | BETAS | settings
    models = Toy(), Toy()
    return models, [
        build("adamw", model, impl=impl, **settings)
        for model, impl in zip(models, ("reference", "triton"), strict=True)
    ]


def assert_equal_states(found, truth):
    assert found["param_groups"] == truth["param_groups"]
    assert found["state"].keys() == truth["state"].keys()
    for index, state in truth["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            other = found["state"][index][key]
            assert other.dtype == value.dtype and other.stride() == value.stride() and other.device == value.device
            torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-8)


def test_it_steps_as_torchs_adamw_and_leaves_the_same_state():
    models, (reference, fused) = optimizers()
    assert isinstance(fused, Probing) and has_paper_state(fused) and not isinstance(reference, Probing)
    for step in range(1, 5):
        for model, optimizer in zip(models, (reference, fused), strict=True):
            set_gradients(model, step)
            optimizer.step()
    for truth, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-7)
    assert_equal_states(fused.state_dict(), reference.state_dict())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["reference to triton", "triton to reference"])
def test_either_goes_on_from_the_others_state(order):
    models, both = optimizers()
    first, second = (both[index] for index in order)
    first_model, second_model = (models[index] for index in order)
    for step in (1, 2):
        set_gradients(first_model, step)
        first.step()
    second_model.load_state_dict(first_model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in (3, 4):
        for model, optimizer in ((first_model, first), (second_model, second)):
            set_gradients(model, step)
            optimizer.step()
    assert_equal_states(second.state_dict(), first.state_dict())
    for truth, found in zip(first_model.parameters(), second_model.parameters(), strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-7)


def test_the_probe_is_of_the_direction_that_alpha_max_takes():
    """u as `step_direction` and `step_without_decay` have it, which copy the parameters and subtract."""
    (_, model), (_, fused) = optimizers()
    set_gradients(model, 2)
    params = dict(model.named_parameters())
    g = torch.cat([param.grad.double().flatten() for param in params.values()])
    without = step_without_decay(fused, params, 1e-2)
    assert fused.probed() is None, "a twin took that step"
    with_decay = step_direction(fused, params, 1e-2)
    probe = fused.probed()
    for direction, decay in ((with_decay, True), (without, False)):
        u = torch.cat([each.double().flatten() for each in direction.values()])
        assert probe.step_norm(decay=decay) / 1e-2 == pytest.approx(u.norm().item(), rel=1e-5)
        assert probe.slope(1e-2, decay=decay) == pytest.approx((g @ u).item(), rel=1e-5)
    assert probe.sums[0].sqrt().item() == pytest.approx(g.norm().item(), rel=1e-6)


def test_a_gradient_that_lies_otherwise_is_taken_in_the_parameters_order():
    (params, gradients, means, squares), _ = tensors([(4, 3)])
    turned = gradients[0].t().contiguous().t()
    assert turned.stride() != gradients[0].stride()
    found = []
    for gradient in (gradients[0], turned):
        copies = [[each.clone()] for each in (params[0], gradient, means[0], squares[0])]
        adamw_probe.adamw_probe(*copies, [torch.tensor(1.0)], **HYPER)
        found.append(copies[0][0])
    assert torch.equal(*found)


def test_without_gradients_there_is_no_step():
    (_, model), (_, fused) = optimizers()
    fused.step()
    assert fused.probed() is None and not fused.state_dict()["state"] and model.vector.grad is None


def test_twice_gives_the_same_bits():
    found = []
    for _ in range(2):
        (params, *rest), _ = tensors(SHAPES)
        probe = adamw_probe.adamw_probe(params, *rest, [torch.tensor(2.0)] * len(SHAPES), **HYPER)
        found.append([*params, probe.sums])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_traffic_is_what_the_interpreter_counts(dtype):
    shapes = [(adamw_probe.BLOCK + 3,), (5, 2)]
    columns, _ = tensors(shapes, dtype)
    with counting() as count:
        adamw_probe.adamw_probe(*columns, [torch.tensor(1.0)] * 2, **HYPER)
    found = traffic(lengths=[math.prod(shape) for shape in shapes], dtype=dtype)
    assert (found.read, found.written) == (count.read, count.written)


ERRORS = [
    (lambda column: [each.half() for each in column], "torch.float16 is not one of float32, bfloat16 and float64"),
    (lambda column: [column[0].expand(2, *column[0].shape)[:, 0], *column[1:]], "has gaps or repeats in memory"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_what_it_does_not_take_is_refused_in_one_line(change, message):
    columns, _ = tensors(SHAPES[:2])
    with pytest.raises(ValueError, match=message):
        adamw_probe.adamw_probe(*map(change, columns), [torch.tensor(1.0)] * 2, **HYPER)


def test_state_of_another_layout_is_refused():
    (params, gradients, means, squares), _ = tensors([(3, 4)])
    with pytest.raises(ValueError, match="differ in dtype, device or layout"):
        adamw_probe.adamw_probe(
            params, gradients, [means[0].t().contiguous().t()], squares, [torch.tensor(1.0)], **HYPER
        )


ROWS = ("loss", "grad_norm", "update_norm")


def test_a_run_equals_the_reference_and_resumes_it(lab):
    """Three steps of a run, with a checkpoint of either's kind; its norms of the step are from the pass."""
    from stability.runs.directory import read_jsonl

    settings = {"steps": 3, "optimizer": {"name": "adamw", "weight_decay": 0.1}}
    rows = []
    for impl in ("reference", "triton"):
        spec = lab.spec(**settings | {"optimizer": {**settings["optimizer"], "impl": impl}})
        rows.append([row for row in read_jsonl(lab.train(spec).metrics_file) if row["step"]])
    assert len(rows[0]) == 3
    for truth, found in zip(*rows, strict=True):
        assert [found[name] for name in ROWS] == pytest.approx([truth[name] for name in ROWS], rel=1e-5)
        assert found.keys() == truth.keys()


COMPILED = """
from kernels.adamw_probe import adamw_probe

for dtype in (torch.float32, torch.bfloat16):
    columns = [[torch.zeros(5000, dtype=dtype)] for _ in range(4)]
    adamw_probe(*columns, [torch.ones(())], lr=1e-3, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.1)
"""


@pytest.mark.slow
def test_compiles_for_an_h100_without_spilling():
    for found in compiled(COMPILED):
        found.assert_fits()
        assert found.stack == 0, found


@interpreted
def test_tensors_that_no_kernel_reaches_are_refused_in_a_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one = [torch.ones(3)]
    with pytest.raises(
        RuntimeError, match=r"^impl=triton needs .*, and tensors are on cpu; impl=reference computes the"
    ):
        adamw_probe.adamw_probe(one, one, one, one, [torch.tensor(1.0)], **HYPER)
