"""Every registered feed-forward network keeps the contract: shape and dtype, equal builds, saved parameters, second
derivatives, and settings that are read."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model
from stability.ffns import AbstractFeedForward, build
from stability.registry import Registry
from tests.changes import other_values, settings_of_family

NAMES = Registry("ffns").names()
WIDTH = 8


def shaken(name: str, **settings) -> torch.nn.Module:
    torch.manual_seed(0)
    module = build(name, width=WIDTH, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def inputs(dtype=torch.float64):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_module_of_the_family(name):
    assert isinstance(build(name, width=WIDTH), AbstractFeedForward)


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
def test_the_same_seed_builds_the_same_network(name):
    one, two = shaken(name), shaken(name)
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
    (gradient_BND,) = torch.autograd.grad(shaken(name).double()(x_BND)[:, 2].sin().sum(), x_BND)
    assert gradient_BND[:, 2].abs().min() > 0
    assert gradient_BND.count_nonzero() == 2 * WIDTH


@pytest.mark.parametrize("name", NAMES)
def test_an_input_of_zeros_has_finite_second_derivatives(name):
    x_BND = torch.zeros(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient_BND,) = torch.autograd.grad(shaken(name).double()(x_BND).square().sum(), x_BND, create_graph=True)
    (curvature_BND,) = torch.autograd.grad(gradient_BND.square().sum(), x_BND)
    assert gradient_BND.isfinite().all()
    assert curvature_BND.isfinite().all()


@pytest.mark.parametrize(("name", "key"), settings_of_family("ffns"))
def test_every_setting_changes_what_the_network_gives(name, key):
    usual = shaken(name).double()(inputs())
    for value in other_values("ffns", name, key):
        assert not torch.equal(shaken(name, **{key: value}).double()(inputs()), usual), (key, value)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_it_in_every_block_at_the_model_s_multiple(lab, name):
    spec = lab.spec(ffn=name)
    wide = spec.model_copy(update={"model": spec.model.model_copy(update={"ffn_multiple": 6.0})})
    model, wider = (build_model(each, 8) for each in (spec, wide))
    for block, other in zip(model.blocks, wider.blocks, strict=True):
        assert isinstance(block.ffn, Registry("ffns").load(name))
        assert sum(p.numel() for p in block.ffn.parameters()) < sum(p.numel() for p in other.ffn.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_its_last_projection_is_scaled_down_with_the_depth(lab, name):
    """What the initialisation knows a branch's end by is the name ``out``."""
    assert isinstance(build(name, width=WIDTH).out, torch.nn.Linear)
    spec = lab.spec(ffn=name)
    deep = spec.model_copy(update={"model": spec.model.model_copy(update={"layers": 4 * spec.model.layers})})
    first, other = (build_model(each, 8).blocks[0].ffn.out.weight for each in (spec, deep))
    torch.testing.assert_close(other, first / 2)
