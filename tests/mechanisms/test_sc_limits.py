"""What the paper's section 2 says of many consensus steps on fixed edges without RoPE, on every graph (Eqs. 5 to
13)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stability.mechanisms import build
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs
from tests.mechanisms.oracles import block_operator
from tests.mechanisms.variants import GRAPHS, listed
from tests.within import assert_within

HEAD_WIDTH, NUM_POSITIONS = WIDTH // HEADS, 5
# connected as an undirected graph, but neither symmetric nor balanced
EDGES = listed({(0, 1), (1, 2), (2, 0), (2, 3), (4, 3), (0, 4)})


def signal() -> Tensor:
    return inputs(num_positions=NUM_POSITIONS)


def consensus(u_BND: Tensor, **settings) -> tuple[Tensor, Tensor]:
    """u after the layer's iterations, its projections taken out, and the dense A of g = A u per sequence and head, (B,
    H, N·K, N·K).

    The edges are those of `signal`, whatever u is; weights are near one another (edge_gain 1), so that the slowest mode
    is not too slow.
    """
    layer = build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS, rope="none", edge_gain=1.0, **settings)).double()
    given = {"edges": EDGES} if layer.config.graph == "given" else {}
    with torch.no_grad():
        operators = torch.stack([torch.stack(_operators(layer, signal()[b : b + 1], given)) for b in range(len(u_BND))])
        graph = layer._graph(signal(), None, given.get("edges"))
        hidden_HTXM = layer._hidden(signal(), graph)
        layer._graph, layer._hidden = lambda x_BND, mask_BN, edges: graph, lambda x_BND, graph: hidden_HTXM
        for projection in (layer.source, layer.out):
            projection.weight.copy_(torch.eye(WIDTH))
            projection.bias.zero_()
        return layer(u_BND, **given), operators


def _operators(layer: torch.nn.Module, u_BND: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    source_E, target_E, r_BHEKK = layer.edge_weights(u_BND, **given)
    ends = list(zip(source_E.tolist(), target_E.tolist(), strict=True))
    return [
        block_operator(dict(zip(ends, r_BHEKK[0, head], strict=True)), u_BND.shape[1], HEAD_WIDTH)
        for head in range(HEADS)
    ]


def per_head(u_BND: Tensor) -> Tensor:
    """(B, H, N·K)."""
    return u_BND.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2).flatten(2)


def energy(u_BND: Tensor, operators: Tensor) -> Tensor:
    """½ Σ over the edges of (u_i − u_j)ᵀR_ij(u_i − u_j) = ½ uᵀA u (Eqs. 5 and 14)."""
    return 0.5 * torch.einsum("bhi,bhij,bhj->", per_head(u_BND), operators, per_head(u_BND))


@pytest.mark.parametrize("graph", GRAPHS)
def test_operator_is_symmetric_and_its_null_space_are_the_constants(graph):
    _, operators = consensus(signal(), graph=graph)
    torch.testing.assert_close(operators, operators.mT, rtol=0, atol=1e-12)
    spectrum = torch.linalg.eigvalsh(operators)
    assert_within(spectrum[..., :HEAD_WIDTH].abs(), 1e-10)
    assert (spectrum[..., HEAD_WIDTH:] > 1e-6).all()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("iterations", [1, 4])
def test_energy_falls_and_the_sum_is_conserved(graph, iterations):
    u_BND = signal()
    updated_BND, operators = consensus(u_BND, graph=graph, step_size=0.01, iterations=iterations)
    torch.testing.assert_close(updated_BND.sum(1), u_BND.sum(1), rtol=0, atol=1e-12)
    assert energy(updated_BND, operators) < energy(u_BND, operators)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_small_step_lowers_the_energy_by_the_squared_gradient(graph):
    u_BND = signal()
    updated_BND, operators = consensus(u_BND, graph=graph, step_size=1e-5)
    fall = energy(u_BND, operators) - energy(updated_BND, operators)
    torch.testing.assert_close(fall, (updated_BND - u_BND).square().sum() / 1e-5, rtol=1e-3, atol=0)


@pytest.mark.parametrize("graph", GRAPHS)
def test_slowest_mode_shrinks_by_omega_1_in_each_iteration(graph):
    """Eqs. 10 and 11: ω₁ = 1 − ηλ with λ the least eigenvalue of A outside the constants; the constants stay."""
    spectrum, modes = torch.linalg.eigh(consensus(signal(), graph=graph)[1])
    step_size = float(0.5 / spectrum.max())
    mode_BHNK = modes[..., HEAD_WIDTH].unflatten(-1, (NUM_POSITIONS, HEAD_WIDTH))
    mean_BND = signal().mean(1, keepdim=True)
    u_BND = mean_BND + mode_BHNK.transpose(1, 2).flatten(2)
    updated_BND, _ = consensus(u_BND, graph=graph, step_size=step_size, iterations=40)
    rate_BH = 1 - step_size * spectrum[..., HEAD_WIDTH]
    expected_BHNK = rate_BH[..., None, None] ** 40 * mode_BHNK
    torch.testing.assert_close(updated_BND, mean_BND + expected_BHNK.transpose(1, 2).flatten(2), rtol=0, atol=1e-10)


@pytest.mark.parametrize("graph", GRAPHS)
def test_many_iterations_reach_the_mean_no_slower_than_omega_1(graph):
    """Eqs. 12 and 13: ‖u_n − mean‖ ≤ |ω₁|ⁿ‖u_0 − mean‖, where η ≤ 1/(2λ_max), so that no mode oscillates."""
    u_BND, mean_BND = signal(), signal().mean(1, keepdim=True)
    spectrum = torch.linalg.eigvalsh(consensus(u_BND, graph=graph)[1])
    step_size = float(1 / spectrum.max())
    rate_BH = 1 - step_size * spectrum[..., HEAD_WIDTH]
    start_BH = per_head(u_BND - mean_BND).norm(dim=-1)
    for count in (1, 10, 500):
        distance_BH = per_head(consensus(u_BND, graph=graph, step_size=step_size, iterations=count)[0] - mean_BND).norm(
            dim=-1
        )
        assert (distance_BH <= rate_BH**count * start_BH + 1e-13).all()
    assert_within(distance_BH, 1e-10 * start_BH)
