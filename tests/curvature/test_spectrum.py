"""Largest eigenvalue, density and trace against closed forms and the dense float64 Hessian of a small transformer."""

import math

import pytest
import torch

from stability.curvature.adam import adam_preconditioner, adam_threshold, preconditioned_sharpness
from stability.curvature.spectrum import spectral_density, top_eigenvalue
from stability.curvature.traces import trace
from tests.curvature.nets import dense_hessian, flatten, tiny, token_loss
from tests.within import assert_within


def quadratic(matrix):
    """(loss, params) with the Hessian ``matrix``, spread over two tensors, and a linear part that must not matter."""
    half = len(matrix) // 2
    params = {"a": torch.ones(half, dtype=matrix.dtype), "b": torch.ones(len(matrix) - half, dtype=matrix.dtype)}

    def loss(at):
        x = torch.cat([at["a"], at["b"]])
        return 0.5 * x @ matrix @ x - x.sum()

    return loss, params


def symmetric(values, seed=0):
    q, _ = torch.linalg.qr(
        torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    return q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.T


@pytest.fixture(scope="module")
def transformer():
    net, params, tokens = tiny(width=4)
    loss = token_loss(net, tokens)
    return loss, params, dense_hessian(loss, params)


def test_the_top_eigenvalue_is_the_dense_hessians_and_its_vector_an_eigenvector(transformer):
    loss, params, dense = transformer
    found = top_eigenvalue(loss, params, tolerance=1e-8, iterations=150)
    assert found.converged
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-9)
    vector = flatten(found.vector)
    assert vector.norm() == pytest.approx(1, rel=1e-9)
    assert float((dense @ vector - found.value * vector).norm()) == pytest.approx(found.residual, rel=0.2, abs=1e-10)


def test_the_residual_bound_holds_after_every_number_of_products(transformer):
    loss, params, dense = transformer
    exact = torch.linalg.eigvalsh(dense)
    for iterations in (1, 2, 4, 8, 16):
        found = top_eigenvalue(loss, params, tolerance=0.0, iterations=iterations)
        assert found.products == iterations
        assert_within(float((exact - found.value).abs().min()), found.residual * (1 + 1e-9))
        assert found.value <= float(exact[-1]) * (1 + 1e-12)


def test_the_largest_eigenvalue_is_the_algebraically_largest_one():
    loss, params = quadratic(symmetric([-9.0, -1.0, 0.5, 2.0]))
    assert top_eigenvalue(loss, params, tolerance=1e-10).value == pytest.approx(2, rel=1e-9)


def test_reorthogonalisation_keeps_eigenvalues_from_appearing_twice():
    """Without it the outlier converges, comes back after some 10 more products, and takes its weight twice."""
    values = [1000.0, *torch.linspace(0, 1, 79).tolist()]
    loss, params = quadratic(symmetric(values))
    density = spectral_density(loss, params, probes=1, iterations=60)
    assert int((density.nodes > 500).sum()) == 1


def test_a_low_rank_hessian_ends_the_recurrence_early():
    loss, params = quadratic(symmetric([3.0, 2.0, *[0.0] * 10]))
    found = top_eigenvalue(loss, params, tolerance=0.0, iterations=12)
    assert found.products <= 4
    assert found.residual == 0
    assert found.value == pytest.approx(3, rel=1e-9)


def test_microbatches_give_the_same_eigenvalue_as_the_whole_batch(transformer):
    loss, params, _ = transformer
    net, _, tokens = tiny(width=4)

    def by_rows(at, row):
        return token_loss(net, tokens[row : row + 1], reduction="sum")(at), tokens.shape[1] - 1

    whole, parts = (
        top_eigenvalue(loss, params, iterations=8),
        top_eigenvalue(by_rows, params, batches=iter(range(3)), iterations=8),
    )
    assert parts.value == pytest.approx(whole.value, rel=1e-9)


def test_a_loss_of_nan_gives_nan_and_no_loop():
    params = {"w": torch.ones(3)}
    found = top_eigenvalue(lambda at: (at["w"] ** 2).sum() * float("nan"), params)
    assert math.isnan(found.value)
    assert not found.converged
    assert math.isnan(trace(lambda at: (at["w"] ** 2).sum() * float("nan"), params).value)


def test_moments_of_the_density_of_a_diagonal_hessian_are_exact_for_any_probe():
    """Rademacher: vᵀ Dᵏ v = tr Dᵏ whatever the signs, and Gauss quadrature is exact for k < 2·iterations."""
    values = torch.linspace(-1, 3, 11, dtype=torch.float64)
    loss, params = quadratic(torch.diag(values))
    density = spectral_density(loss, params, probes=2, iterations=4, seed=5)
    assert float(density.weights.sum()) == pytest.approx(1, rel=1e-12)
    for power in range(8):
        mean, error = density.moment(power)
        assert mean == pytest.approx(float((values**power).mean()), rel=1e-9)
        assert error == pytest.approx(0, abs=1e-9)
    assert density.moment(8)[0] != pytest.approx(float((values**8).mean()), rel=1e-6)


def test_moments_of_the_density_agree_with_the_dense_hessian_within_their_errors(transformer):
    loss, params, dense = transformer
    density = spectral_density(loss, params, probes=12, iterations=10)
    for power in (1, 2, 3):
        mean, error = density.moment(power)
        exact = float(torch.linalg.matrix_power(dense, power).trace()) / len(dense)
        assert abs(mean - exact) < 4 * error
        assert error < 0.5 * abs(exact)


def test_the_smoothed_density_is_a_sum_of_bells_that_integrates_to_one():
    loss, params = quadratic(torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)))
    density = spectral_density(loss, params, probes=1, iterations=4)
    grid = torch.linspace(-2, 3, 2001, dtype=torch.float64)
    curve = density.smoothed(grid, 0.1)
    assert float(curve.sum() * (grid[1] - grid[0])) == pytest.approx(1, rel=1e-6)
    assert float(curve[800]) == pytest.approx(0.5 / (0.1 * math.sqrt(2 * math.pi)), rel=1e-6)


def test_the_trace_is_exact_for_a_low_rank():
    loss, params = quadratic(symmetric([5.0, -2.0, 1.0, *[0.0] * 17]))
    found = trace(loss, params, products=15)
    assert found.value == pytest.approx(4, rel=1e-9)
    assert found.standard_error == pytest.approx(0, abs=1e-9)


def test_the_trace_of_the_transformer_lies_within_its_error(transformer):
    loss, params, dense = transformer
    exact = float(dense.trace())
    found = trace(loss, params, products=60)
    assert abs(found.value - exact) < 4 * found.standard_error
    assert found.standard_error < 0.2 * abs(exact)
    # Unbiased: the mean over seeds comes closer than one.
    rough = torch.tensor([trace(loss, params, products=9, seed=seed).value for seed in range(24)])
    assert abs(float(rough.mean()) - exact) < 4 * float(rough.std()) / math.sqrt(24)


@pytest.mark.parametrize(("call", "text"), [
    (lambda loss, params: trace(loss, params, products=2), "products is 2"),
    (lambda loss, params: spectral_density(loss, params, probes=0), "probes=0"),
    (lambda loss, params: top_eigenvalue(loss, params, iterations=0), "iterations is 0"),
])  # fmt: skip
def test_too_few_products_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call(*quadratic(symmetric([1.0, 2.0])))


def test_probes_come_from_the_seed_and_leave_the_global_random_state_alone(transformer):
    loss, params, _ = transformer
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again = (spectral_density(loss, params, probes=1, iterations=3, seed=7) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first.nodes, again.nodes)
    assert not torch.equal(first.nodes, spectral_density(loss, params, probes=1, iterations=3, seed=8).nodes)


def stepped(betas=(0.9, 0.99), steps=3, amsgrad=False):
    net, params, tokens = tiny(width=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=betas, amsgrad=amsgrad)
    for _ in range(steps):
        optimizer.zero_grad()
        token_loss(net, tokens)(params).backward()
        optimizer.step()
    return token_loss(net, tokens), params, optimizer


@pytest.mark.parametrize("amsgrad", [False, True])
def test_preconditioned_sharpness_is_the_dense_products_largest_eigenvalue(amsgrad):
    loss, params, optimizer = stepped(amsgrad=amsgrad)
    second = flatten(
        {name: optimizer.state[p]["max_exp_avg_sq" if amsgrad else "exp_avg_sq"] for name, p in params.items()}
    )
    p = (second / (1 - 0.99**3)).sqrt() + 1e-8
    dense = dense_hessian(loss, params) / p.sqrt() / p.sqrt()[:, None]
    found = preconditioned_sharpness(loss, params, optimizer, tolerance=1e-8, iterations=200)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-8)
    assert found.threshold == pytest.approx(38 / 3e-3)
    assert found.ratio == pytest.approx(found.value * 3e-3 / 38)


def test_the_preconditioner_is_what_adam_divides_by():
    """One more step with a zero gradient moves by −lr·m̂ / (sqrt(v̂) + eps) with the decayed moments."""
    _, params, optimizer = stepped(betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    divisor = adam_preconditioner(optimizer, params)
    for name, param in params.items():
        mean = optimizer.state[param]["exp_avg"] / (1 - 0.9**4)
        torch.testing.assert_close(param.detach(), before[name] - 3e-3 * mean / divisor[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("eta_times_sharpness", "diverges"), [(37.9, False), (38.1, True)])
def test_adam_with_a_frozen_preconditioner_loses_stability_at_38_over_lr(eta_times_sharpness, diverges):
    """The recurrence x ← x − η m, m ← 0.9 m + 0.1 λ x, iterated, explodes just above the threshold and dies out just
    below."""
    assert adam_threshold(1.0, 0.9) == pytest.approx(38)
    x, m = 1.0, 0.0
    for _ in range(20_000):
        m = 0.9 * m + 0.1 * eta_times_sharpness * x
        x -= m
        if abs(x) > 1e6:
            break
    assert (abs(x) > 1e6) == diverges
    assert diverges or abs(x) < 1e-6


def test_an_optimizer_without_adams_state_is_refused():
    net, params, _ = tiny(width=4)
    with pytest.raises(ValueError, match="not from SGD's"):
        adam_preconditioner(torch.optim.SGD(net.parameters(), lr=1.0), params)
    with pytest.raises(ValueError, match="take a step first"):
        adam_preconditioner(torch.optim.Adam(net.parameters()), params)
    with pytest.raises(ValueError, match="lr=0"):
        adam_threshold(0.0, 0.9)
