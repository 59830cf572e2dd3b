"""Hutchinson's estimate against the dense Hessian: z ⊙ Hz by the very z, and its mean over many of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stability.curvature import hutchinson_diagonal

from .nets import dense_hessian, flatten, tiny, token_loss, unflatten


def drawn(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}


@pytest.mark.redraws
def test_estimate_is_the_probe_times_the_dense_hessians_product_with_it():
    net, params, tokens = tiny()
    loss = token_loss(net, tokens)
    found = hutchinson_diagonal(loss, params, generator=torch.Generator().manual_seed(3))
    z = flatten(drawn(params, 3))
    hessian: Any = dense_hessian(loss, params)
    expected = unflatten(z * (hessian @ z), params)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


def test_estimate_does_not_depend_on_how_the_batch_is_cut():
    net, params, tokens = tiny()

    def summed(own, part):
        return token_loss(net, part, "sum")(own), torch.tensor(float(part[:, 1:].numel()))

    whole, cut = (
        hutchinson_diagonal(summed, params, generator=torch.Generator().manual_seed(1), batches=parts)
        for parts in ([tokens], [tokens[:1], tokens[1:]])
    )
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-9, atol=1e-12)


def test_mean_of_many_estimates_is_the_diagonal():
    """Of ½θᵀAθ; the standard error of an entry is √(Σ_j A_ij² + A_ii²)/√n, as z is Gaussian."""
    matrix = torch.tensor([[2.0, 0.5, -1.0], [0.5, -3.0, 0.25], [-1.0, 0.25, 1.0]], dtype=torch.float64)
    params, generator = {"w": torch.ones(3, dtype=torch.float64)}, torch.Generator().manual_seed(0)
    found = torch.stack([
        hutchinson_diagonal(lambda own: own["w"] @ matrix @ own["w"] / 2, params, generator=generator)["w"]
        for _ in range(2000)
    ])  # fmt: skip
    deviation = (matrix.square().sum(1) + matrix.diagonal().square()).sqrt()
    assert ((found.mean(0) - matrix.diagonal()).abs() < 4 * deviation / 2000**0.5).all()
    assert found.std(0).tolist() == pytest.approx(deviation.tolist(), rel=0.1)
