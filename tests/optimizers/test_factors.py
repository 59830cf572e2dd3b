"""Shampoo beside pytorch_optimizer's, its sides that have no factor, and GaLore's projection."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from stability.optimizers import build
from stability.optimizers._base import library_class
from stability.optimizers.galore_adamw import first_directions
from stability.optimizers.shampoo import inverse_root


class SVD(NamedTuple):
    U: torch.Tensor
    S: torch.Tensor
    Vh: torch.Tensor


def pair_of(shape: tuple[int, int]) -> tuple[nn.ParameterList, nn.ParameterList]:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = (nn.ParameterList([nn.Parameter(value.clone())]) for _ in range(2))
    return ours, theirs


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
def test_shampoos_steps_are_those_of_pytorch_optimizer(shape):
    ours, theirs = pair_of(shape)
    settings = {"lr": 0.05, "weight_decay": 0.2}
    one = build("shampoo", ours, epsilon=1e-3, **settings)
    other = library_class("Shampoo")(theirs.parameters(), weight_decouple=True, matrix_eps=1e-3, **settings)
    for step in range(8):
        ours[0].grad, theirs[0].grad = drawn(shape, step), drawn(shape, step)
        one.step()
        other.step()
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_a_first_step_without_the_long_sides_factor_is_the_orthogonal_matrix_all_the_same(shape):
    """L^(−½)G of one gradient G = USVᵀ is UVᵀ but for ε, as L^(−¼)GR^(−¼) is: the step keeps its unit."""
    value, gradient = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=torch.float64))]), drawn(shape, 1)
    left, _, right = np.linalg.svd(gradient.numpy(), full_matrices=False)
    for longest in (4, 7):
        optimizer = build("shampoo", value, lr=1.0, epsilon=1e-12, max_dimension=longest)
        value[0].data.zero_()
        value[0].grad = gradient.clone()
        optimizer.step()
        assert np.allclose(-value[0].detach().numpy(), left @ right, atol=1e-5)
        assert len(optimizer.state[value[0]][0]) == (
            2 if longest == 4 else 3
        )  # a count, and a factor of a side or both
    optimizer = build("shampoo", value, lr=1.0, max_dimension=3)
    before = value[0].detach().clone()
    optimizer.step()
    assert torch.equal(value[0].detach(), before - gradient), "with neither factor the step is the gradient's"


def test_an_inverse_root_takes_what_rounding_made_negative_for_the_smallest_eigenvalue():
    vectors = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    symmetric = torch.from_numpy(vectors @ np.diag([16.0, 81.0, 1e-4, -1e-9]) @ vectors.T)
    expected = vectors @ np.diag([1 / 2, 1 / 3, 10.0, 10.0]) @ vectors.T
    assert np.allclose(inverse_root(symmetric, 4, 1e-4).numpy(), expected, atol=1e-8)


def test_the_signs_that_a_library_gives_singular_vectors_do_not_count(monkeypatch):
    """Two CPUs may give UΣVᵀ with other signs; the means go on across a new projection."""
    ends, signs = [], torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    svd = torch.linalg.svd
    for turned in (signs.abs(), signs):

        def other_signs(matrix, full_matrices=True, turned=turned):
            left, values, right = svd(matrix, full_matrices=full_matrices)
            return SVD(left * turned, values, turned[:, None] * right)

        monkeypatch.setattr(torch.linalg, "svd", other_signs)
        module = pair_of((4, 6))[0]
        optimizer = build("galore_adamw", module, lr=0.1, rank_share=0.75, every=2)
        for step in range(5):
            module[0].grad = drawn((4, 6), step)
            optimizer.step()
        ends.append(module[0].detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_galores_projection_holds_for_its_steps_and_spans_the_gradients_first_directions(shape):
    module = pair_of(shape)[0]
    optimizer = build("galore_adamw", module, lr=0.1, rank_share=0.5, every=3)
    held = []
    for step in range(4):
        module[0].grad = drawn(shape, step)
        optimizer.step()
        held.append(optimizer.state[module[0]][0]["projection"].clone())
    assert torch.equal(held[0], held[1]) and torch.equal(held[0], held[2]) and not torch.equal(held[0], held[3])
    for step in (0, 3):
        gradient = drawn(shape, step).numpy()
        left = np.linalg.svd(gradient if shape == (4, 6) else gradient.T)[0][:, :2]
        assert np.allclose(held[step] @ held[step].T, left @ left.T, atol=1e-12)
    assert (first_directions(drawn((4, 6), 9), 3).abs().amax(0) == first_directions(drawn((4, 6), 9), 3).amax(0)).all()
