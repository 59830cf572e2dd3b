"""The readings of C.3 (`mechanism.sc.rope`): each against slow loops, and what it conserves, lowers and tells apart."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from stability.mechanisms import build
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.oracles import consensus_edge_weight, rotation, step_sizes
from tests.mechanisms.test_sc_graphs import edges_of, given
from tests.mechanisms.variants import GRAPHS, listed
from tests.within import assert_within, relative_error, rounding_floor

READINGS = ("absolute", "relative", "gradient", "none")
K = WIDTH // HEADS
N = 9
Weights = dict[tuple[int, int], Tensor]  # R_ij of each directed edge


def module(**settings) -> torch.nn.Module:
    return build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS, **settings)).double().requires_grad_(False)


def rho(position: int) -> Tensor:
    return rotation(position, K)


def energy(u_NK: Tensor, weights: Weights, turned: bool = True) -> Tensor:
    """E(ũ) = ½ Σ (ũ_i − ũ_j)ᵀR_ij(ũ_i − ũ_j) over directed edges, or E(u)."""
    turned_NK = torch.stack([rho(i) @ u for i, u in enumerate(u_NK)]) if turned else u_NK
    parts = [(turned_NK[i] - turned_NK[j]) @ r @ (turned_NK[i] - turned_NK[j]) for (i, j), r in weights.items()]
    return 0.5 * sum(parts, torch.zeros((), dtype=u_NK.dtype))


def turned_all(u_NK: Tensor, sign: int = 1) -> Tensor:
    return torch.stack([rho(sign * i) @ u for i, u in enumerate(u_NK)])


def heads_of(layer: torch.nn.Module, x_BND: Tensor, mask_BN: Tensor) -> Iterable[tuple[int, slice, Tensor, Weights]]:
    """Each sequence's and head's number, slice, u = W_s y + b_s and R by Algorithm 2, times the gate."""
    edges = edges_of(layer, x_BND, mask_BN)
    u_BND = x_BND @ layer.source.weight.T + layer.source.bias
    for b in range(len(x_BND)):
        for head in range(HEADS):
            part = slice(head * K, (head + 1) * K)
            y_NK = x_BND[b, :, part]
            weights = {
                (i, j): gate * consensus_edge_weight(layer, head, y_NK[i], y_NK[j]) for (i, j), gate in edges[b].items()
            }
            yield b, part, u_BND[b, :, part], weights


@pytest.mark.parametrize("graph", GRAPHS)
def test_gradient_descends_the_energy_of_rotated_signals_with_its_derivative_by_u(graph):
    """By autograd of E(ũ), the edge weights held fixed."""
    layer, mask_BN = module(graph=graph, rope="gradient", iterations=2), padding()
    x_BND = inputs() * mask_BN[..., None]
    updated_BND = torch.empty_like(x_BND)
    for b, part, u_NK, weights in heads_of(layer, x_BND, mask_BN):
        for step_size in step_sizes(layer):
            leaf_NK = u_NK.clone().requires_grad_()
            (derivative_NK,) = torch.autograd.grad(energy(leaf_NK, weights), leaf_NK)
            u_NK = u_NK - step_size * derivative_NK
        updated_BND[b, :, part] = u_NK
    expected = updated_BND @ layer.out.weight.T + layer.out.bias
    found = layer(inputs(), mask_BN=mask_BN, **given(layer))
    assert_within((found - expected)[mask_BN].abs().max(), 1e-12 * expected.abs().max())


# One sequence and head: the operator A of g = A u, on the edge weights of a layer


def weights_of_head(**settings) -> Weights:
    layer, x_BND = module(**settings), inputs()[:1]
    _, _, _, weights = next(iter(heads_of(layer, x_BND, torch.ones(1, N, dtype=torch.bool))))
    return weights


def set_to_identity(layer: torch.nn.Module) -> None:
    """Take the projections W_s and W_o out."""
    for projection in (layer.source, layer.out):
        projection.weight.copy_(torch.eye(WIDTH))
        projection.bias.zero_()


def update(rope: str, u_NK: Tensor, step_size: float = 0.1, **settings) -> Tensor:
    """u′ of one head by the layer itself: W_s and W_o are identities, the edge weights those of other inputs."""
    layer = module(rope=rope, step_size=step_size, **settings)
    x_BND = inputs()[:1]
    hidden = layer._hidden(x_BND, layer._graph(x_BND, None, given(layer).get("edges")))
    layer._hidden = lambda x_BND, graph: hidden
    set_to_identity(layer)
    u_1ND = torch.cat([u_NK, torch.zeros(len(u_NK), WIDTH - K)], 1)[None]
    return layer(u_1ND, **given(layer))[0, :, :K]


def signal(seed: int = 3) -> Tensor:
    return torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def size_of_step(weights: Weights) -> float:
    """1/λ_max of the energy's second derivative: every smaller step lowers the energy."""
    u_NK = torch.zeros(N, K, dtype=torch.float64)
    return 1 / float(
        torch.linalg.eigvalsh(torch.func.hessian(lambda u: energy(u, weights))(u_NK).reshape(N * K, -1))[-1]
    )


@pytest.mark.parametrize("graph", ["window", "complete", "given"])
def test_the_energy_falls_under_gradient_for_every_signal_and_small_step(graph):
    weights = weights_of_head(graph=graph)
    largest = size_of_step(weights)
    for seed in range(5):
        u_NK = signal(seed)
        for share in (1.0, 0.1, 1e-3):
            assert energy(update("gradient", u_NK, share * largest, graph=graph), weights) < energy(u_NK, weights)


def test_the_energy_may_rise_under_absolute_at_any_step():
    """A signal at one position whose rotation turns pairs by more than a right angle: the flow is not turned back, so
    that it goes uphill."""
    weights = weights_of_head(rank=0, window=1)
    u_NK = torch.zeros(N, K, dtype=torch.float64)
    u_NK[3, 0] = 1.0  # the first pair turns by 3 radians there, by 2 and 4 at its neighbors
    for share in (0.1, 1e-2, 1e-3):
        step_size = share * size_of_step(weights)
        before = energy(u_NK, weights)
        assert energy(update("absolute", u_NK, step_size, rank=0, window=1), weights) > before
        assert energy(update("gradient", u_NK, step_size, rank=0, window=1), weights) < before


def test_the_energy_may_rise_under_relative_at_any_step():
    """Out-edges over 2, 3 and 4 positions, whose flows are in their targets' frames and not turned back. R = α I, where
    relative's own energy is E(ũ)."""
    layer, star = module(rope="relative", rank=0, graph="given"), {(4, j) for j in (0, 1, 2, 6, 7)}
    x_BND = inputs()[:1]
    alpha = {(4, j): consensus_edge_weight(layer, 0, x_BND[0, 4, :K], x_BND[0, j, :K]) for j in (0, 1, 2, 6, 7)}
    u_NK = torch.zeros(N, K, dtype=torch.float64)
    u_NK[4, 0] = 1.0
    hidden = layer._hidden(x_BND, layer._graph(x_BND, None, listed(star)))
    layer._hidden = lambda x_BND, graph: hidden
    set_to_identity(layer)
    u_1ND = torch.cat([u_NK, torch.zeros(N, WIDTH - K)], 1)[None]
    for share in (0.1, 1e-2, 1e-3):
        object.__setattr__(layer, "config", layer.config.model_copy(update={"step_size": share * size_of_step(alpha)}))
        after_NK = layer(u_1ND, edges=listed(star))[0, :, :K]
        assert energy(after_NK, alpha) > energy(u_NK, alpha)


@pytest.mark.parametrize("graph", ["window", "given"])
@pytest.mark.parametrize("rope", READINGS)
def test_the_sum_that_a_reading_conserves(rope, graph):
    """Σ u_i where flows are not turned back, Σ ρ(i)u_i where they are."""
    u_NK = signal()
    after_NK = update(rope, u_NK, graph=graph)
    summed = {"gradient": turned_all}.get(rope, lambda u_NK: u_NK)
    assert_within((summed(after_NK).sum(0) - summed(u_NK).sum(0)).abs().max(), 1e-13)
    other = {"gradient": lambda u_NK: u_NK}.get(rope, turned_all)
    assert (other(after_NK).sum(0) - other(u_NK).sum(0)).abs().max() > 1e-2


@pytest.mark.parametrize("rope", READINGS)
def test_constant_signals_pass_and_shift_in_the_frame_of_the_disagreements(rope):
    """A signal whose ũ is constant passes unchanged (for "none", whose u is), and added to another it moves the result
    by itself."""
    constant_NK = signal()[:1].expand(N, K)
    own_NK, other_NK = (constant_NK, turned_all(constant_NK, -1))[:: 1 if rope == "none" else -1]
    assert_within((update(rope, own_NK) - own_NK).abs().max(), 1e-13)
    assert (update(rope, other_NK) - other_NK).abs().max() > 1e-2
    shifted_NK = update(rope, signal(4) + own_NK)
    assert_within((shifted_NK - update(rope, signal(4)) - own_NK).abs().max(), 1e-13)


def shifted_and_plain(by: int, **settings) -> tuple[Tensor, Tensor]:
    """The outputs of a text that begins ``by`` positions later, behind padding, and of the text itself."""
    layer, x_BND = module(**settings), inputs()[:, : N - by]
    late_BND = torch.cat([torch.zeros(len(x_BND), by, WIDTH), x_BND], 1)
    mask_BN = (torch.arange(N) >= by).expand(len(x_BND), -1)
    return layer(late_BND, mask_BN=mask_BN)[:, by:], layer(x_BND)


def test_a_later_text_gives_the_same_output_where_only_distances_count():
    """For "gradient" only where R commutes with ρ, as α I does; for "absolute" not even there."""
    for settings, is_same in (
        ({"rope": "none"}, True),
        ({"rope": "relative"}, True),
        ({"rope": "relative", "graph": "cycle", "window": 8}, True),
        ({"rope": "gradient", "rank": 0}, True),
        ({"rope": "gradient"}, False),
        ({"rope": "absolute", "rank": 0}, False),
    ):
        late_BND, plain_BND = shifted_and_plain(3, **settings)
        if is_same:
            assert_within((late_BND - plain_BND).abs().max(), 1e-13, settings)
        else:
            assert (late_BND - plain_BND).abs().max() > 1e-3, settings


@pytest.mark.parametrize("graph", ["window", "cycle", "complete", "top_w"])
def test_only_none_maps_the_mirrored_text_to_the_mirrored_output(graph):
    for rope in READINGS:
        layer = module(rope=rope, graph=graph)
        apart = (layer(inputs().flip(1)).flip(1) - layer(inputs())).abs().max()
        if rope == "none":
            assert_within(apart, 1e-13)
        else:
            assert apart > 1e-2


# The relation of "gradient" to "relative"


def test_relative_is_gradient_with_the_flows_of_out_edges_turned_where_r_commutes_with_rho():
    """R = α I: both take −R_ki δ_ki at the end k → i that an edge enters; at its source i → j relative adds R_ij δ_ij
    in j's frame, which gradient turns back to i's by ρ(j − i)."""
    into_one = {(0, 1), (2, 1), (6, 1)}  # each edge's source has no other edge
    layers = {rope: module(rope=rope, graph="given", rank=0) for rope in ("relative", "gradient")}
    for layer in layers.values():
        layer.out.weight.copy_(torch.eye(WIDTH))
        layer.out.bias.zero_()
    x_BND = inputs()[:1]
    u_NHK = (x_BND[0] @ layers["relative"].source.weight.T + layers["relative"].source.bias).unflatten(-1, (HEADS, K))
    moved = {
        rope: u_NHK - layer(x_BND, edges=listed(into_one))[0].unflatten(-1, (HEADS, K))
        for rope, layer in layers.items()
    }
    assert_within((moved["relative"][1] - moved["gradient"][1]).abs().max(), 1e-13)
    for source in (0, 2, 6):
        assert moved["relative"][source].abs().max() > 1e-3
        back = moved["relative"][source] @ rho(1 - source).T
        assert_within((back - moved["gradient"][source]).abs().max(), 1e-13)
        assert (moved["relative"][source] - moved["gradient"][source]).abs().max() > 1e-3


def test_both_energies_are_one_where_r_commutes_with_rho():
    """½ Σ δᵀR_ijδ with δ = ρ(i − j)u_i − u_j is E(ũ) on the edges ρ(j)R_ijρ(j)ᵀ."""

    def relative_energy(u_NK: Tensor, weights: Weights) -> Tensor:
        apart = {(i, j): rho(i - j) @ u_NK[i] - u_NK[j] for i, j in weights}
        return 0.5 * sum((apart[edge] @ r @ apart[edge] for edge, r in weights.items()), torch.zeros(()))

    u_NK = signal()
    scalar, matrix = weights_of_head(rank=0), weights_of_head()
    assert_within((relative_energy(u_NK, scalar) / energy(u_NK, scalar) - 1).abs(), 1e-13)
    assert (relative_energy(u_NK, matrix) / energy(u_NK, matrix) - 1).abs() > 1e-5  # α I is most of this R
    in_frame = {(i, j): rho(j) @ r @ rho(j).T for (i, j), r in matrix.items()}
    assert_within((relative_energy(u_NK, matrix) / energy(u_NK, in_frame) - 1).abs(), 1e-13)


# Rounding


def test_relative_keeps_float32_far_from_the_first_position():
    """Angles of positions near 4,096 in float32 would be off by 2e-4; those of distances are not. 32 roundings, each of
    half a unit, bound what two rotations, the edge network and the flow lose."""
    tolerance = 32 * 2.0**-24
    layer, x_BND = module(rope="relative"), inputs()[:1, :1].expand(1, 4096, WIDTH)
    exact_BND, found_BND = layer(x_BND), layer.float()(x_BND.float())
    floor = rounding_floor(tolerance, torch.float32, exact_BND[0, -9:])
    assert_within(relative_error(found_BND[0, -9:], exact_BND[0, -9:], floor), tolerance)
