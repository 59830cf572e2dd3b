"""Every registered norm keeps the contract: shape and dtype, equal builds, saved parameters, second derivatives, and
settings that are read."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model
from stability.norms import AbstractNorm, build
from stability.registry import Registry
from tests.changes import other_values, settings_of_family

NAMES = Registry("norms").names()
WIDTH = 8


def shaken(name: str, **settings) -> torch.nn.Module:
    module, generator = build(name, width=WIDTH, **settings), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def inputs(dtype=torch.float64):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_module_of_the_family(name):
    assert isinstance(build(name, width=WIDTH), AbstractNorm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_shape_and_dtype_stay(name, dtype):
    module = shaken(name)
    y_BND = module.to(dtype)(inputs(dtype))
    assert (y_BND.shape, y_BND.dtype) == ((2, 5, WIDTH), dtype)
    exact_BND = module.double()(inputs())
    limit = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 0.0}[dtype]
    assert (y_BND.double() - exact_BND).norm() <= limit * exact_BND.norm()


@pytest.mark.parametrize("name", NAMES)
def test_equal_settings_build_equal_norms_and_draw_nothing(name):
    before = torch.random.get_rng_state()
    one, two = build(name, width=WIDTH), build(name, width=WIDTH)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one(inputs(torch.float32)), two(inputs(torch.float32)))


@pytest.mark.parametrize("name", NAMES)
def test_saved_parameters_are_all_there_is(name):
    one, two = shaken(name).double(), build(name, width=WIDTH).double()
    assert not torch.equal(one(inputs()), two(inputs()))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(inputs()), two(inputs()))


@pytest.mark.parametrize("name", NAMES)
def test_no_position_reads_another(name):
    x_BND = inputs().requires_grad_()
    y_BND = shaken(name).double()(x_BND)
    (gradient_BND,) = torch.autograd.grad(y_BND[:, 2].sin().sum(), x_BND)
    assert gradient_BND[:, 2].abs().min() > 0
    assert gradient_BND.count_nonzero() == 2 * WIDTH


@pytest.mark.parametrize("name", NAMES)
def test_an_input_of_zeros_has_finite_second_derivatives(name):
    x_BND = torch.zeros(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient_BND,) = torch.autograd.grad(shaken(name).double()(x_BND).square().sum(), x_BND, create_graph=True)
    (curvature_BND,) = torch.autograd.grad(gradient_BND.square().sum(), x_BND)
    assert gradient_BND.isfinite().all()
    assert curvature_BND.isfinite().all()


@pytest.mark.parametrize(("name", "key"), settings_of_family("norms"))
def test_every_setting_changes_what_the_norm_gives(name, key):
    usual = shaken(name).double()(inputs())
    for value in other_values("norms", name, key):
        assert not torch.equal(shaken(name, **{key: value}).double()(inputs()), usual), (key, value)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_it_before_every_branch_and_the_head(lab, name):
    model = build_model(lab.spec(norm=name), 8)
    found = {key for key, module in model.named_modules() if isinstance(module, Registry("norms").load(name))}
    blocks = {f"blocks.{layer}.{norm}" for layer in range(len(model.blocks)) for norm in ("mixer_norm", "ffn_norm")}
    assert found == blocks | {"final_norm"}
