"""The contract of parts that map every position by itself, (B, N, D) to (B, N, D), feed-forward networks and norms, as
plain functions that raise AssertionError: shape and dtype, saved parameters, second derivatives, settings that are
read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stability.ffns import WithLoss
from tests.changes import other_values

WIDTH = 8


@dataclass(frozen=True)
class Family:
    """``build(name, width=…, **settings)`` makes the parts of the registry's family ``name``, all of them a ``base``."""

    name: str
    base: type
    build: Callable[..., nn.Module]

    def built(self, name: str) -> nn.Module:
        return self.build(name, width=WIDTH)

    def shaken(self, name: str, **settings) -> nn.Module:
        """Return the part with parameters that are none of their initial values; the same ones every time."""
        torch.manual_seed(0)
        module = self.build(name, width=WIDTH, **settings)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return module


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def output(module: nn.Module, x_BND: Tensor) -> Tensor:
    """Return what a part gives for each position, (B, N, D), without the loss that it may have beside it."""
    given = module(x_BND)
    return given.output if isinstance(given, WithLoss) else given


def all_given(module: nn.Module, x_BND: Tensor) -> Tensor:
    """Return every number that a part gives, its own loss's among them, in one row."""
    given = module(x_BND)
    parts = given if isinstance(given, WithLoss) else (given,)
    return torch.cat([part.flatten() for part in parts])


def check_is_of_the_family(family: Family, name: str) -> None:
    assert isinstance(family.built(name), family.base)


def check_shape_and_dtype_stay(family: Family, name: str) -> None:
    for dtype, limit in {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 0.0}.items():
        module = family.shaken(name)
        y_BND = output(module.to(dtype), inputs(dtype))
        assert (y_BND.shape, y_BND.dtype) == ((2, 5, WIDTH), dtype), dtype
        exact_BND = output(module.double(), inputs())
        assert (y_BND.double() - exact_BND).norm() <= limit * exact_BND.norm(), dtype


def check_saved_parameters_are_all_there_is(family: Family, name: str) -> None:
    one, two = family.shaken(name).double(), family.built(name).double()
    assert not torch.equal(all_given(one, inputs()), all_given(two, inputs()))
    two.load_state_dict(one.state_dict())
    assert torch.equal(all_given(one, inputs()), all_given(two, inputs()))


def check_no_position_reads_another(family: Family, name: str) -> None:
    x_BND = inputs().requires_grad_()
    y_BND = output(family.shaken(name).double(), x_BND)
    (gradient_BND,) = torch.autograd.grad(y_BND[:, 2].sin().sum(), x_BND)
    assert gradient_BND[:, 2].abs().min() > 0
    assert gradient_BND.count_nonzero() == 2 * WIDTH


def check_an_input_of_zeros_has_finite_second_derivatives(family: Family, name: str) -> None:
    x_BND = torch.zeros(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    given = all_given(family.shaken(name).double(), x_BND)
    (gradient_BND,) = torch.autograd.grad(given.square().sum(), x_BND, create_graph=True)
    (curvature_BND,) = torch.autograd.grad(gradient_BND.square().sum(), x_BND)
    assert gradient_BND.isfinite().all()
    assert curvature_BND.isfinite().all()


def check_setting_shows(family: Family, name: str, key: str) -> None:
    usual = all_given(family.shaken(name).double(), inputs())
    for value in other_values(family.name, name, key):
        other = all_given(family.shaken(name, **{key: value}).double(), inputs())
        assert not torch.equal(other, usual), (key, value)


CHECKS = (
    check_is_of_the_family,
    check_shape_and_dtype_stay,
    check_saved_parameters_are_all_there_is,
    check_no_position_reads_another,
    check_an_input_of_zeros_has_finite_second_derivatives,
)
