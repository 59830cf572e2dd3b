"""Graphs, steps and rotations of sc against dense matrices, and what a caller may give as edges."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from torch import Tensor

from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from tests.mechanisms.checks import HEADS, WIDTH, build_seeded, inputs, padding
from tests.mechanisms.oracles import consensus_on
from tests.mechanisms.variants import EDGES, SELF, listed, name_of


def module(**settings) -> torch.nn.Module:
    return build_seeded(lambda: build("sc", width=WIDTH, heads=HEADS, **settings)).double()


def pairs_of(graph: str, window: int, num_positions: int) -> set[tuple[int, int]]:
    """The definition of a graph, pair by pair."""
    pairs = {(i, j) for i in range(num_positions) for j in range(num_positions) if i != j}
    if graph == "window":
        return {(i, j) for i, j in pairs if abs(i - j) <= window}
    if graph == "cycle":
        return {
            (i, j)
            for i, j in pairs
            if any((i + step) % num_positions == j or (i - step) % num_positions == j for step in range(1, window + 1))
        }
    return {(i, j) for i, j in EDGES if i != j} if graph == "given" else pairs


def best_scored(layer: torch.nn.Module, x_ND: Tensor, valid: list[bool]) -> dict[tuple[int, int], float]:
    """Each valid node's w best valid neighbours by sorting, with the gate 2σ(s)."""
    q_NK = x_ND @ layer.query.weight.T + layer.query.bias
    k_NK = x_ND @ layer.key.weight.T + layer.key.bias
    chosen = {}
    for i in range(len(x_ND)):
        score = {
            j: float((q_NK[i] @ k_NK[j]).detach()) / (WIDTH // HEADS) ** 0.5
            for j in range(len(x_ND))
            if j != i and valid[i] and valid[j]
        }
        for j in sorted(score, key=lambda j: -score[j])[: layer.config.window]:
            chosen[i, j] = 2 / (1 + 2.718281828459045 ** -score[j])
    return chosen


def edges_of(
    layer: torch.nn.Module, x_BND: Tensor, mask_BN: Tensor | None = None
) -> list[dict[tuple[int, int], float]]:
    """Each sequence's edges with their gates; none has a padded end."""
    config, num_positions = layer.config, x_BND.shape[1]
    valid = [[True] * num_positions] * len(x_BND) if mask_BN is None else mask_BN.tolist()
    if config.graph == "top_w":
        return [best_scored(layer, x_ND, valid[b]) for b, x_ND in enumerate(x_BND)]
    pairs = pairs_of(config.graph, config.window, num_positions)
    return [{(i, j): 1.0 for i, j in pairs if valid[b][i] and valid[b][j]} for b in range(len(x_BND))]


def given(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {"edges": listed(EDGES)} if layer.config.graph == "given" else {}


def set_away_from_start(layer: torch.nn.Module) -> None:
    if layer.config.step == "learned":
        with torch.no_grad():
            layer.step_before_softplus.copy_(torch.linspace(-3, -1, layer.config.iterations))


@pytest.mark.parametrize("settings", SELF, ids=name_of)
def test_equals_the_dense_block_matrix_of_its_graph(settings):
    layer = module(**settings)
    set_away_from_start(layer)
    for mask_BN in (padding(), torch.ones_like(padding())):  # which takes away exactly the edges that it ends
        x_BND = inputs() * mask_BN[..., None]
        expected = consensus_on(layer, x_BND, edges_of(layer, x_BND, mask_BN))[mask_BN]
        found = layer(inputs(), mask_BN=mask_BN, **given(layer))[mask_BN]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(x_BND, **given(layer)).flatten(0, 1), expected, rtol=0, atol=1e-10)
    if layer.config.graph != "top_w":  # whose choice may turn on a rounding
        single = layer.float()(x_BND.float(), **given(layer)).flatten(0, 1)
        torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("graph", ["window", "cycle", "complete"])
@pytest.mark.parametrize("rope", ["none", "relative"])
@pytest.mark.parametrize(("window", "num_positions"), [(1, 2), (1, 3), (2, 4), (2, 5), (2, 6), (3, 5), (4, 3), (3, 11)])
def test_each_edge_of_the_definition_is_there_once(graph, rope, window, num_positions):
    source_E, target_E, _ = module(graph=graph, rope=rope, window=window).edge_weights(
        inputs(num_positions=num_positions)
    )
    assert source_E.dtype == target_E.dtype == torch.int64
    assert sorted(zip(source_E.tolist(), target_E.tolist(), strict=True)) == sorted(
        pairs_of(graph, window, num_positions)
    )


@pytest.mark.parametrize(
    "settings", [{}, {"graph": "cycle"}, {"graph": "complete"}, {"graph": "top_w"}, {"rope": "relative"}], ids=name_of
)
def test_a_lone_position_passes_the_two_projections_only(settings):
    layer, x_BND = module(**settings), inputs(num_positions=1)
    torch.testing.assert_close(layer(x_BND), layer.out(layer.source(x_BND)), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="has no edges"):
        layer.edge_weights(x_BND)


# Edges that a caller gives


def test_edge_list_and_adjacency_shared_or_per_sequence_are_one_graph():
    layer, x_BND = module(graph="given"), inputs()
    adjacency_NN = torch.zeros(9, 9, dtype=torch.bool)
    for i, j in EDGES:
        adjacency_NN[i, j] = True
    expected = layer(x_BND, edges=listed(EDGES))
    for edges in (
        listed(EDGES).expand(3, -1, -1),
        adjacency_NN,
        adjacency_NN.expand(3, -1, -1),
        torch.cat([listed(EDGES), -torch.ones(2, 2).long()]),
    ):
        torch.testing.assert_close(layer(x_BND, edges=edges), expected, rtol=0, atol=1e-13)


def test_each_sequence_takes_its_own_edges_and_no_filler():
    layer, x_BND = module(graph="given"), inputs()
    own = [EDGES, {(0, 8)}, set()]
    edges_BE2 = torch.full((3, 10, 2), -1)
    adjacency_BNN = torch.zeros(3, 9, 9, dtype=torch.bool)
    for b, edges in enumerate(own):
        edges_BE2[b, 1 : 1 + len(edges)] = listed(edges)
        for i, j in edges:
            adjacency_BNN[b, i, j] = True
    expected = consensus_on(layer, x_BND, [{edge: 1.0 for edge in edges if edge[0] != edge[1]} for edges in own])
    torch.testing.assert_close(layer(x_BND, edges=edges_BE2), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(x_BND, edges=adjacency_BNN), expected, rtol=0, atol=1e-10)


def test_self_loops_and_an_empty_graph_contribute_nothing():
    layer, x_BND = module(graph="given", rope="relative"), inputs()
    alone = layer.out(layer.source(x_BND))
    for edges in (torch.tensor([[4, 4], [0, 0]]), torch.empty(0, 2, dtype=torch.int64), torch.eye(9, dtype=torch.bool)):
        torch.testing.assert_close(layer(x_BND, edges=edges), alone, rtol=0, atol=1e-12)


def test_edge_weights_list_no_filler_and_no_self_loop():
    edges = torch.cat([listed(EDGES), torch.tensor([[-1, -1], [8, 8]])])
    source_E, target_E, r_BHEKK = module(graph="given").edge_weights(inputs(), edges=edges)
    assert set(zip(source_E.tolist(), target_E.tolist(), strict=True)) == pairs_of("given", 2, 9)
    assert len(source_E) == r_BHEKK.shape[2] == len(EDGES) - 1


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 1], [3, 9]], "edges holds [3, 9]; positions go from 0 to 8 ([-1, -1] is filler)"),
        ([[-1, 4]], "edges holds [-1, 4]; positions go from 0 to 8"),
        ([[0, 1], [2, 3], [0, 1]], "edges holds [0, 1] twice; give each directed edge once"),
        (
            [[[0, 1]], [[0, 1]]],
            "edges has dtype int64 and shape (2, 1, 2); expected int64 (E, 2) or (3, E, 2), or bool (9, 9) or (3, "
            "9, 9)",
        ),
        ([[0.0, 1.0]], "edges has dtype float32 and shape (1, 2); expected int64 (E, 2)"),
        ([[True, False]], "edges has dtype bool and shape (1, 2); expected int64 (E, 2)"),
        ([0, 1], "edges has dtype int64 and shape (2,); expected int64 (E, 2)"),
    ],
)
def test_wrong_edges_are_refused_in_one_line(edges, message):
    with pytest.raises(ValueError) as caught:
        module(graph="given")(inputs(), edges=torch.tensor(edges))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_edges_and_their_graph_need_each_other():
    with pytest.raises(ValueError, match=r"mechanism\.sc\.graph=given needs edges: forward\(x, edges=…\)"):
        module(graph="given")(inputs())
    with pytest.raises(ValueError, match=r"mechanism\.sc\.graph=window takes no edges; choose graph=given"):
        module()(inputs(), edges=listed(EDGES))
    assert build("sc", width=16, heads=2, graph="given").needs_edges(module(graph="given").config)
    assert not module().needs_edges(module().config)


def test_edge_weights_of_a_batch_whose_sequences_differ_are_refused():
    for layer, edges in (
        (module(graph="top_w"), {}),
        (module(graph="given"), {"edges": listed(EDGES).expand(3, -1, -1)}),
    ):
        with pytest.raises(
            ValueError, match="each of the 3 sequences has edges of its own; give edge_weights one sequence at a time"
        ):
            layer.edge_weights(inputs(), **edges)


def test_mask_of_another_shape_or_dtype_is_refused_in_one_line():
    with pytest.raises(
        ValueError, match=r"^mask_BN has shape \(3, 8\); expected \(3, 9\), True where a position is valid$"
    ):
        module()(inputs(), mask_BN=torch.ones(3, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^mask_BN has dtype float32; expected bool, True where a position is valid$"):
        module()(inputs(), mask_BN=torch.ones(3, 9))


@pytest.mark.parametrize("rope", ["absolute", "relative"])
def test_odd_head_width_is_refused_where_pairs_are_turned(rope):
    with pytest.raises(
        ValueError, match="^head width 6/2 = 3 is odd, and RoPE turns pairs; heads that leave an even one: 1, 3$"
    ):
        build("sc", width=6, heads=2, rope=rope)


# top_w: hard choice, smooth gate


def kept(layer: torch.nn.Module, x_BND: Tensor) -> set[tuple[int, int]]:
    return {(i, j) for i, j in best_scored(layer, x_BND[0], [True] * x_BND.shape[1])}


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_top_w_chooses_the_best_scored(window):
    layer, x_BND = module(graph="top_w", window=window), inputs()[:1]
    source_E, target_E, _ = layer.edge_weights(x_BND)
    chosen = set(zip(source_E.tolist(), target_E.tolist(), strict=True))
    assert chosen == kept(layer, x_BND)
    assert len(chosen) == len(source_E) == 9 * min(window, 8)


def test_top_w_takes_fewer_where_fewer_are_valid():
    layer, mask_BN = module(graph="top_w", window=4), torch.zeros(3, 9, dtype=torch.bool)
    mask_BN[0, [1, 5]] = mask_BN[1, 3] = True
    y_BND = layer(inputs(), mask_BN=mask_BN)
    x_BND = inputs() * mask_BN[..., None]
    torch.testing.assert_close(
        y_BND[mask_BN], consensus_on(layer, x_BND, edges_of(layer, x_BND, mask_BN))[mask_BN], rtol=0, atol=1e-10
    )
    torch.testing.assert_close(y_BND[1, 3], layer.out(layer.source(inputs()[1, 3])), rtol=0, atol=1e-12)


def test_gradient_reaches_the_kept_scores_only():
    layer, x_BND = module(graph="top_w", window=3), inputs()[:1]
    scores = layer._scores(x_BND).detach().requires_grad_()
    layer._scores = lambda x_BND: scores
    (gradient_BNN,) = torch.autograd.grad(layer(x_BND).square().sum(), scores)
    assert {(i, j) for _, i, j in gradient_BNN.nonzero().tolist()} == kept(module(graph="top_w", window=3), x_BND)


def test_gate_is_one_where_all_scores_are_zero():
    layer, x_BND = module(graph="top_w", window=8), inputs()
    with torch.no_grad():
        for parameter in (*layer.query.parameters(), *layer.key.parameters()):
            parameter.zero_()
    complete = module(graph="complete")
    complete.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x_BND), complete(x_BND), rtol=0, atol=1e-12)


# Steps and sizes


def test_learned_steps_start_at_the_fixed_one():
    for step_size in (1e-3, 0.1, 50.0):
        fixed, learned = (module(step=step, step_size=step_size, iterations=3) for step in ("fixed", "learned"))
        torch.testing.assert_close(learned(inputs()), fixed(inputs()), rtol=1e-6, atol=1e-6)
        assert learned.step_before_softplus.shape == (3,)


def test_rank_zero_holds_no_parameters_of_its_anisotropic_part():
    names = {name for name, _ in module(rank=0, edge_mlp="separate").named_parameters()}
    assert names == {f"{layer}.{kind}" for layer in ("source", "out") for kind in ("weight", "bias")} | {
        "pair_weight",
        "pair_bias",
        "scalar_weight",
        "scalar_bias",
    }
    assert module(rank=0).scalar_weight.shape == (HEADS, 1, 16)


@pytest.mark.parametrize("graph", ["window", "cycle", "top_w"])
def test_window_as_long_as_a_run_is_refused(graph):
    layer = module(graph=graph, window=64)
    layer.check_positions(layer.config, 65)
    with pytest.raises(ValueError, match=r"^mechanism\.sc\.window=64 must be below model\.positions=64$"):
        layer.check_positions(layer.config, 64)
    layer.check_positions(module(graph="complete", window=64).config, 64)


def test_cost_counts_the_edges_of_its_graph_and_every_iteration():
    def cost(num_positions: int = 32, **settings) -> float:
        layer = module(**settings)
        return type(layer).cost(layer.config, MixerShape(WIDTH, HEADS), num_positions)

    def per_edge(**settings) -> float:
        return (cost(graph="complete", **settings) - cost(num_positions=32, graph="window", window=1, **settings)) / (
            32 * 31 - 62
        )

    # α and β: 2ξ; Λ and its norms: rK(ξ + 1); Λ(u_i − u_j), Λᵀ of it and α times the difference: 2rK + K, in each
    # iteration
    assert per_edge() == HEADS * (2 * 16 + 32 * 17 + 72)
    assert per_edge(iterations=3) == HEADS * (2 * 16 + 32 * 17 + 3 * 72)
    assert per_edge(rank=0) == HEADS * (16 + 8)
    assert cost(graph="cycle") - cost(graph="window") == 6 * per_edge()
    assert cost(graph="cycle", window=40) == cost(graph="complete") == cost(graph="given")
    assert cost(graph="top_w", window=3) - cost(graph="top_w", window=2) == 32 * per_edge()


def test_edges_that_are_no_tensor_or_none_are_told(monkeypatch):
    # which refuses the list before we do, in tests alone
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    layer = module(graph="given")
    with pytest.raises(ValueError, match="^edges must be a tensor, got list; e.g. "):
        layer(inputs(), edges=[[0, 1]])
    with pytest.raises(ValueError, match="^edges holds no edge; give at least one$"):
        layer.edge_weights(inputs(), edges=torch.zeros(0, 2, dtype=torch.int64))


def test_a_window_past_the_ends_is_the_complete_graph():
    torch.testing.assert_close(module(window=20)(inputs()), module(graph="complete")(inputs()), rtol=0, atol=1e-12)
