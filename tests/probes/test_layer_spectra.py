"""Consensus and attention layers against dense float64 matrices: spectra, filters, energies, σ(W_qᵀW_k)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stability.mechanisms import build
from stability.mechanisms._attention import AbstractSoftmaxAttention
from stability.mechanisms._observed import AbstractConsensus
from stability.models.position import Rope
from stability.probes.layers import consensus as low_pass_module
from stability.probes.layers.attention import qk_singular_values
from stability.probes.layers.consensus import (
    consensus_spectra,
    filter_response,
    largest_factor,
    low_pass,
    ropes_of,
    step_sizes,
)
from tests.mechanisms.oracles import rotated
from tests.probes.test_laplacian import dense_laplacian
from tests.within import assert_within

N, WIDTH, HEADS = 10, 12, 2
K = WIDTH // HEADS


def layer_of(name, seed=0, **settings):
    torch.manual_seed(seed)
    layer = build(name, width=WIDTH, heads=HEADS, **settings).double()
    return layer, torch.randn(1, N, WIDTH, dtype=torch.float64)


def spectra_of(layer, x_BND, **options):
    return list(consensus_spectra(layer, x_BND, **({"probes": 3, "products": 8, "seed": 0} | options)))


def dense_of(layer, x_BND, head):
    """L̄ of one head, dense."""
    with torch.no_grad():
        source, target, weights = layer.edge_weights(x_BND)
    return dense_laplacian(source.numpy(), target.numpy(), weights[0, head].numpy(), N)


def signal(layer, x_BND, head):
    return (x_BND[0] @ layer.source.weight.T + layer.source.bias).detach()[:, head * K : (head + 1) * K]


@pytest.mark.parametrize("settings", [{}, {"rope": "none", "window": 3}, {"rank": 2, "step_size": 0.02}])
def test_numbers_of_a_head_are_those_of_its_dense_operator(settings):
    layer, x_BND = layer_of("sc", **settings)
    eta = settings.get("step_size", 0.1)
    for head, found in enumerate(spectra_of(layer, x_BND)):
        values = np.linalg.eigvalsh(dense_of(layer, x_BND, head))
        numbers = found.numbers
        assert numbers["largest"] == pytest.approx(values[-1], rel=1e-9)
        assert numbers["fiedler"] == pytest.approx(values[K], rel=1e-8)
        assert numbers["step_size"] == eta
        assert numbers["step_limit"] == pytest.approx(1 / (2 * values[-1]), rel=1e-9)
        assert numbers["non_oscillating"] == (1 - 2 * eta * values >= 0).mean()
        assert numbers["gain"] == pytest.approx(np.abs(1 - 2 * eta * values[K:]).max(), rel=1e-8)
        assert numbers["fiedler_low"] <= numbers["fiedler"] <= numbers["fiedler_high"]
        assert (numbers["num_positions"], numbers["head_width"], numbers["components"]) == (N, K, 1)


def test_unweighted_fiedler_value_is_the_window_paths():
    layer, x_BND = layer_of("sc", window=1)
    assert spectra_of(layer, x_BND)[0].numbers["graph_fiedler"] == pytest.approx(2 - 2 * np.cos(np.pi / N), rel=1e-9)


@pytest.mark.parametrize("rope", ["none", "absolute", "relative", "gradient"])
@pytest.mark.parametrize("base", [10_000.0, 50.0])
def test_energy_and_variance_before_and_after_are_slow_sums_over_edges(rope, base):
    layer, x_BND = layer_of("sc", rope=rope, step_size=0.03)
    layer.rope = Rope(base)
    with torch.no_grad():
        source, target, weights = layer.edge_weights(x_BND)
    basis = torch.eye(K, dtype=torch.float64)
    rho_NKK = torch.stack([rotated(row.expand(N, K), base=base) for row in basis], 2)  # ρ(j) in its columns
    for head, found in enumerate(spectra_of(layer, x_BND)):
        u_NK = signal(layer, x_BND, head)

        def disagreement(turned_NK, i, j):
            apart = turned_NK[i] - turned_NK[j]
            return (
                rho_NKK[j].T @ apart if rope == "relative" else apart
            )  # ρ(i − j)u_i − u_j = ρ(j)⁻¹(ρ(i)u_i − ρ(j)u_j)

        def turned(u_NK):
            return u_NK if rope == "none" else rotated(u_NK, base=base)

        edges = list(zip(source.tolist(), target.tolist(), weights[0, head], strict=True))

        def energy(u_NK, edges=edges):
            turned_NK = turned(u_NK)
            return 0.5 * sum(
                float(disagreement(turned_NK, i, j) @ r @ disagreement(turned_NK, i, j)) for i, j, r in edges
            )

        g_NK, turned_NK = torch.zeros_like(u_NK), turned(u_NK)
        for i, j, r in edges:
            flow = r @ disagreement(turned_NK, i, j)
            g_NK[i] += rho_NKK[i].T @ flow if rope == "gradient" else flow
            g_NK[j] -= rho_NKK[j].T @ flow if rope == "gradient" else flow
        after_NK = u_NK - 0.03 * g_NK
        assert found.numbers["energy_before"] == pytest.approx(energy(u_NK), rel=1e-9)
        assert found.numbers["energy_after"] == pytest.approx(energy(after_NK), rel=1e-9)
        assert found.numbers["variance_before"] == pytest.approx(float((u_NK - u_NK.mean(0)).square().sum()), rel=1e-9)
        assert found.numbers["variance_after"] == pytest.approx(
            float((after_NK - after_NK.mean(0)).square().sum()), rel=1e-9
        )


def test_without_rope_the_update_is_u_minus_two_eta_laplacian_u():
    layer, x_BND = layer_of("sc", rope="none")
    for head, found in enumerate(spectra_of(layer, x_BND)):
        u = signal(layer, x_BND, head).numpy().reshape(-1)
        after = (u - 2 * 0.1 * dense_of(layer, x_BND, head) @ u).reshape(N, K)
        assert found.numbers["variance_after"] == pytest.approx(((after - after.mean(0)) ** 2).sum(), rel=1e-9)


def test_with_gradient_the_update_is_the_filter_of_the_rotated_signal():
    layer, x_BND = layer_of("sc", rope="gradient", iterations=2)
    for head, found in enumerate(spectra_of(layer, x_BND)):
        turned, laplacian = rotated(signal(layer, x_BND, head)).numpy().reshape(-1), dense_of(layer, x_BND, head)
        filtered = np.linalg.matrix_power(np.eye(N * K) - 2 * 0.1 * laplacian, 2) @ turned
        assert found.numbers["energy_before"] == pytest.approx(turned @ laplacian @ turned, rel=1e-9)
        assert found.numbers["energy_after"] == pytest.approx(filtered @ laplacian @ filtered, rel=1e-9)


def test_iterations_multiply_and_the_largest_step_decides():
    layer, x_BND = layer_of("sc", rope="none", iterations=3, step_size=0.05)
    assert step_sizes(layer).tolist() == [0.05] * 3
    found = spectra_of(layer, x_BND)[0]
    assert np.allclose(found.response, (1 - 0.1 * found.density.nodes) ** 3)
    assert np.allclose(filter_response(np.array([1.0, 2.0]), np.array([0.1, 0.2])), [0.8 * 0.6, 0.6 * 0.2])
    learned, _ = layer_of("sc", iterations=2, step="learned", step_size=0.07)
    assert step_sizes(learned) == pytest.approx([0.07, 0.07], rel=1e-5)


def test_of_unequal_steps_the_largest_decides_what_oscillates():
    layer, x_BND = layer_of("sc", rope="none", iterations=3, step="learned")
    steps_T = torch.tensor([0.02, 0.2, 0.005], dtype=torch.float64)
    with torch.no_grad():
        layer.step_before_softplus.copy_(torch.log(torch.expm1(steps_T)))
    for head, found in enumerate(spectra_of(layer, x_BND)):
        values = np.linalg.eigvalsh(dense_of(layer, x_BND, head))
        share = np.mean([all(1 - 2 * eta * value >= 0 for eta in steps_T.tolist()) for value in values])
        assert 0 < share < 1
        assert found.numbers["step_size"] == pytest.approx(0.2, rel=1e-9)
        assert found.numbers["non_oscillating"] == share


def test_the_gain_of_several_steps_is_the_largest_over_the_interval_not_at_its_ends():
    """(1 − λ)(1 − λ/4) is 0 at 1 and 4, and largest between them at 2.5: −9/16."""
    steps_T = np.array([0.5, 0.125])
    assert largest_factor(1.0, 4.0, steps_T) == pytest.approx(9 / 16, rel=1e-12)
    assert largest_factor(3.0, 4.0, steps_T) == pytest.approx(0.5, rel=1e-12), "the critical point lies outside"
    assert largest_factor(0.0, 1.0, np.array([0.5])) == 1.0
    draws = np.random.default_rng(0)
    for count in (2, 3, 5):
        steps_T, high = draws.uniform(0.05, 0.4, count), 12.0
        grid = np.abs(filter_response(np.linspace(0.3, high, 200_001), steps_T)).max()
        assert largest_factor(0.3, high, steps_T) == pytest.approx(grid, rel=1e-8)
    assert largest_factor(0.2, 6.0, np.array([0.1, 0.1 * (1 + 1e-16), 0.1 * (1 + 1e-15)])) == pytest.approx(
        0.96**3, rel=1e-12
    )


def test_the_gain_bounds_the_factor_of_every_eigenvalue():
    """One step's root on the Fiedler value and the other's on λ_max: at both ends the factor is 0."""
    layer, x_BND = layer_of("sc", rope="none", iterations=2, step="learned")
    values = np.linalg.eigvalsh(dense_of(layer, x_BND, 0))
    steps_T = 1 / (2 * values[[K, -1]])
    with torch.no_grad():
        layer.step_before_softplus.copy_(torch.log(torch.expm1(torch.from_numpy(steps_T))))
    gain = spectra_of(layer, x_BND)[0].numbers["gain"]
    assert gain == pytest.approx(
        np.abs(filter_response(np.linspace(values[K], values[-1], 100_001), steps_T)).max(), rel=1e-6
    )
    assert gain >= np.abs(filter_response(values[K:], steps_T)).max() > 0.1


def test_a_runs_rope_is_that_of_its_consensus_layers():
    assert ropes_of([layer_of("sc", rope="none")[0]]) == {"none"}
    pattern = [layer_of("mix", layer=layer, num_layers=2, sc={"rope": "relative"})[0] for layer in (0, 1)]
    assert ropes_of(pattern) == {"relative"}
    assert ropes_of([layer_of("sa")[0]]) == frozenset()


def test_with_rope_the_filter_is_not_the_layers_update():
    """Equal u at every position: the filter leaves them, the layer with rotated disagreements does not."""
    for rope, leaves in (("none", True), ("absolute", False)):
        layer, x_BND = layer_of("sc", rope=rope)
        numbers = spectra_of(layer, x_BND[:, :1].expand(-1, N, -1))[0].numbers
        if leaves:
            assert_within(numbers["variance_after"], 1e-20)
        else:
            assert numbers["variance_after"] > 1e-6


def test_the_density_is_exact_from_enough_products_and_follows_its_options():
    layer, x_BND = layer_of("sc")
    values = np.linalg.eigvalsh(dense_of(layer, x_BND, 0))
    density = spectra_of(layer, x_BND, products=N * K)[0].density
    nodes = density.nodes[density.probe == 0]
    for node in nodes:
        assert_within(np.abs(values - node).min(), 1e-8)
    assert sorted(set(density.probe)) == [0, 1, 2]
    assert len(spectra_of(layer, x_BND, probes=2, products=4)[0].density.nodes) == 8
    assert not np.array_equal(
        spectra_of(layer, x_BND, seed=1)[0].density.nodes, spectra_of(layer, x_BND)[0].density.nodes
    )


def test_too_large_factors_leave_the_share_to_the_quadrature(monkeypatch):
    from stability.probes.layers import laplacian

    layer, x_BND = layer_of("sc")
    exact = spectra_of(layer, x_BND)[0].numbers["non_oscillating"]
    monkeypatch.setattr(laplacian, "MOST_FILL", 0)
    assert spectra_of(layer, x_BND, probes=30, products=32)[0].numbers["non_oscillating"] == pytest.approx(
        exact, abs=0.05
    )


@pytest.mark.parametrize(
    "settings", [{"graph": "cycle"}, {"graph": "complete"}, {"graph": "top_w"}, {"rank": 0}, {"edge_mlp": "separate"}]
)
def test_every_graph_has_its_spectrum(settings):
    layer, x_BND = layer_of("sc", **settings)
    found = spectra_of(layer, x_BND)[1].numbers
    values = np.linalg.eigvalsh(dense_of(layer, x_BND, 1))
    assert found["largest"] == pytest.approx(values[-1], rel=1e-9)
    assert found["fiedler"] == pytest.approx(values[found["components"] * K], rel=1e-8)


def dense_softmax(layer, x_BND, head, window=None, causal=False):
    """A of one head, entry by entry."""
    qkv = (x_BND[0] @ layer.qkv.weight.T + layer.qkv.bias).detach()
    q, k, v = (qkv[:, part * WIDTH + head * K : part * WIDTH + (head + 1) * K] for part in range(3))
    q, k, found = rotated(q), rotated(k), np.zeros((N, N))
    for i in range(N):
        for j in range(N):
            if (window is None or abs(i - j) <= window) and (j <= i or not causal):
                found[i, j] = np.exp(float(q[i] @ k[j]) / K**0.5)
    return found / found.sum(1, keepdims=True), v.numpy()


@pytest.mark.parametrize(
    ("name", "settings", "seen"),
    [("sa", {}, {}), ("sa", {"direction": "causal"}, {"causal": True}), ("sw", {"window": 2}, {"window": 2})],
)
def test_attentions_numbers_are_those_of_its_dense_softmax_matrix(name, settings, seen):
    layer, x_BND = layer_of(name, **settings)
    centre = np.eye(N) - np.ones((N, N)) / N
    # an orthonormal basis of the signals without a mean: no projection, no zero to leave out
    basis = np.linalg.svd(centre)[0][:, : N - 1]
    for head, found in enumerate(low_pass(layer, x_BND)):
        a, v = dense_softmax(layer, x_BND, head, **seen)
        inner = basis.T @ a @ basis
        assert np.allclose(found.singular_values, np.linalg.svd(inner, compute_uv=False), atol=1e-10)
        assert found.numbers["gain"] == pytest.approx(np.linalg.norm(inner, 2), rel=1e-9)
        assert found.numbers["second_eigenvalue"] == pytest.approx(np.abs(np.linalg.eigvals(inner)).max(), rel=1e-8)
        assert found.numbers["variance_before"] == pytest.approx(((v - v.mean(0)) ** 2).sum(), rel=1e-10)
        assert found.numbers["variance_after"] == pytest.approx(((a @ v - (a @ v).mean(0)) ** 2).sum(), rel=1e-10)


def test_an_eigenvalue_that_does_not_settle_is_nan(monkeypatch):
    def fail(matrix):
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    layer, x_BND = layer_of("sa")
    monkeypatch.setattr(low_pass_module.np.linalg, "eigvals", fail)
    numbers = next(low_pass(layer, x_BND)).numbers
    assert np.isnan(numbers["second_eigenvalue"]) and np.isfinite(numbers["gain"])


def test_qk_singular_values_are_those_of_the_dense_product():
    layer, _ = layer_of("sa")
    found = qk_singular_values(layer)
    assert found.shape == (HEADS, K)
    weight = layer.qkv.weight.detach()
    for head in range(HEADS):
        w_q, w_k = (weight[part * WIDTH + head * K : part * WIDTH + (head + 1) * K] for part in range(2))
        dense = torch.linalg.svdvals(w_q.T @ w_k)
        assert torch.allclose(found[head], dense[:K], rtol=1e-10)
        assert_within(dense[K:].abs().max(), 1e-12 * dense[0])


def test_layers_are_told_apart():
    layers = [layer_of(name)[0] for name in ("sa", "sw", "sc")]
    assert [isinstance(layer, AbstractConsensus) for layer in layers] == [False, False, True]
    assert [isinstance(layer, AbstractSoftmaxAttention) for layer in layers] == [True, True, False]
