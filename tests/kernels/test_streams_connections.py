"""Residual schemes of several streams with ``impl=triton`` are what they are with ``impl=reference``: alone, in a model,
along a line to second order, in training."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from stability.build import build_model
from stability.config.parts import validate_settings
from stability.curvature import NoSecondDerivative, directional
from stability.models.passes import computing_in
from stability.residuals import build
from tests.kernels.interpreted import interpreter_is_prepared_once
from tests.kernels.streams_reference import assert_each_close
from tests.within import assert_within

__all__ = ["interpreter_is_prepared_once"]

NAMES = ("hc", "mhc", "mhc_lite")
WIDTH = 8


def shaken(module, size=0.3):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return module


def both(name, **settings):
    """The same connection by kernels and by torch's own operations."""
    return [shaken(build(name, width=WIDTH, layer=1, impl=impl, **settings)) for impl in ("triton", "reference")]


def some_streams(streams=4):
    return torch.randn(2, 3, streams, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hc", {}),
        ("mhc", {"iterations": 4}),
        ("mhc_lite", {}),
        ("mhc", {"streams": 3, "iterations": 2}),
        ("mhc_lite", {"streams": 8, "permutations": 9}),
    ],
)
def test_a_connection_and_its_gradients_equal_the_reference(name, settings):
    kernels, reference = both(name, **settings)
    found = []
    for module in (kernels, reference.double()):  # in float32 the reference's own gradient of 9 biases is 2e-5 off
        x_BNSD = some_streams(module.config.streams).to(next(module.parameters()).dtype).requires_grad_()
        out = module(x_BNSD, torch.sin)
        leaves = [x_BNSD, *module.parameters()]
        found.append((out, *torch.autograd.grad((out * torch.cos(3 * out.detach())).sum(), leaves)))
    assert_each_close(*found, 1e-5, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_a_connection_keeps_its_state_and_coefficients_in_float32(name):
    by_kernels, reference = both(name)
    with torch.no_grad():
        with computing_in("bf16", "cpu"):
            out = by_kernels(some_streams(), torch.sin)
        assert out.dtype == torch.float32
        truth = reference(some_streams(), torch.sin)
        assert_each_close([out], [truth], 1e-5, torch.float32)
        narrow = by_kernels.bfloat16()(some_streams().bfloat16(), torch.sin)
    assert narrow.dtype == torch.bfloat16
    assert_each_close([narrow], [truth], 1e-2, torch.bfloat16)


@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
def test_padding_of_nan_changes_no_other_token(name):
    (by_kernels, _), state = both(name), some_streams()
    state[1, 2:] = math.nan
    clean = torch.where(state.isnan(), 0.0, state)
    with torch.no_grad():
        found, expected = by_kernels(state, torch.sin), by_kernels(clean, torch.sin)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1, :2], expected[1, :2])


def model_and_loss(lab, name, impl):
    """A model of one block, two connections, and its loss of a few tokens."""
    model = {"name": "tiny", "layers": 1, "width": 16, "heads": 2, "positions": 8}
    spec = lab.spec(residual={"name": name, "impl": impl}, model=model)
    built = shaken(build_model(spec, 40), 0.1)
    draws = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(40, (1, 8), generator=draws) for _ in range(2))

    def loss(params):
        return cross_entropy(functional_call(built, params, (tokens,)).flatten(0, 1), targets.flatten())

    return {key: value.detach() for key, value in built.named_parameters()}, loss


@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
def test_second_order_of_a_model_equals_double_backward_of_the_reference(lab, name):
    (params, fused), (_, plain) = (model_and_loss(lab, name, impl) for impl in ("triton", "reference"))
    generator = torch.Generator().manual_seed(3)
    direction = {key: torch.randn(value.shape, generator=generator) for key, value in params.items()}
    found = directional(fused, params, direction, "taylor")
    truth = directional(plain, params, direction, "double_backward")
    call = lambda *values: plain(dict(zip(params, values, strict=True)))  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        _, products = torch.autograd.functional.hvp(call, tuple(params.values()), tuple(direction.values()))
    u, hu = (math.sqrt(sum(float(each.square().sum()) for each in of)) for of in (direction.values(), products))
    assert_within(abs(found.curvature - truth.curvature), 1e-5 * u * hu)
    assert found.slope == pytest.approx(truth.slope, rel=1e-4)
    assert found.loss == pytest.approx(truth.loss, rel=1e-6)
    with pytest.raises(NoSecondDerivative, match=r"(join|read_gated) has no second derivative"):
        directional(fused, params, direction, "double_backward")


def test_a_constant_signal_keeps_its_size_through_48_connections_in_bf16():
    """Of mhc-lite with any parameters. The state itself is in bfloat16, and no weight is 0."""
    draws = torch.Generator().manual_seed(5)
    begun = torch.randn(1, 1, 1, WIDTH, generator=draws).bfloat16().expand(-1, -1, 4, -1).contiguous()
    state = begun
    with torch.no_grad():
        for layer in range(48):
            module = build("mhc_lite", width=WIDTH, layer=layer, impl="triton")
            for value in module.parameters():
                value.add_(torch.randn(value.shape, generator=draws))
            state = module(state, torch.zeros_like)
    assert_within((state.double() / begun.double() - 1).abs().max(), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_of_training_equal_those_of_the_reference(lab, name):
    model = {"name": "tiny", "layers": 1, "width": 16, "heads": 2, "positions": 8}
    losses = []
    for impl in ("triton", "reference"):
        directory = lab.train(lab.spec(residual={"name": name, "impl": impl}, model=model, steps=3, batch=2))
        lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
        logged = [(line["step"], key, value) for line in lines for key, value in sorted(line.items())]
        losses.append([each for each in logged if ("loss" in each[1] or "nll" in each[1]) and each[2] is not None])
    found, expected = ([value for *_, value in each] for each in losses)
    assert [each[:2] for each in losses[0]] == [each[:2] for each in losses[1]]
    assert len({step for step, *_ in losses[0]}) >= 3
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mhc", {"streams": 9, "impl": "triton"}, r"residual.mhc.impl=triton .*streams=9"),
        (
            "mhc_lite",
            {"streams": 6, "permutations": 129, "impl": "triton"},
            r"residual.mhc_lite.impl=triton .*permutations=129",
        ),
        ("hc", {"impl": "auto"}, r"residual.hc.impl=auto: auto is resolved in a sweep only"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_when_a_connection_is_built(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build(name, width=WIDTH, **settings)


def test_a_scheme_is_computed_by_torch_unless_it_is_told_otherwise():
    assert validate_settings("residuals", "mhc", {}).impl == "reference"
