"""PDMM against the KKT system, and against its paper's Eqs. 2 to 4 written out edge by edge."""

from __future__ import annotations

import numpy as np
import pytest

from stability.probes.graphs.pdmm import GRAPHS, SCHEDULES, WIDTH, Network, network, optimum, pdmm, pdmm_rows
from tests.sizes import with_slow
from tests.within import assert_within

NODES = 5
KINDS = ("consensus", "general")


def error(problem: Network, **options) -> float:
    """Largest distance of the last iterate from the optimum."""
    return float(np.abs(pdmm(problem, **options).x_TND[-1] - optimum(problem)).max())


def violation(problem: Network, x_ND: np.ndarray) -> float:
    sums = [
        problem.constraint_ETRD[e, 0] @ x_ND[i] + problem.constraint_ETRD[e, 1] @ x_ND[j]
        for e, (i, j) in enumerate(problem.ends_ET)
    ]
    return float(np.abs(np.array(sums) - problem.offset_ER).max())


@pytest.mark.parametrize("constraints", KINDS)
def test_the_optimum_is_feasible_and_no_feasible_direction_descends(constraints):
    problem = network("random", NODES, constraints=constraints, seed=4)
    x_ND = optimum(problem)
    assert_within(violation(problem, x_ND), 1e-12)
    rows = np.zeros((problem.offset_ER.size, NODES * WIDTH))
    for e, (i, j) in enumerate(problem.ends_ET):
        for t, node in enumerate((i, j)):
            rows[e * problem.offset_ER.shape[1] :][: problem.offset_ER.shape[1], node * WIDTH : (node + 1) * WIDTH] = (
                problem.constraint_ETRD[e, t]
            )
    gradient = np.concatenate([problem.hessian_NDD[i] @ x_ND[i] - problem.linear_ND[i] for i in range(NODES)])
    feasible = np.linalg.svd(rows)[2][np.linalg.matrix_rank(rows) :]
    assert_within(np.abs(feasible @ gradient).max(initial=0), 1e-11)


def test_under_consensus_the_optimum_is_the_solution_of_the_summed_problem():
    problem = network("random", NODES, constraints="consensus", seed=2)
    together = np.linalg.solve(problem.hessian_NDD.sum(0), problem.linear_ND.sum(0))
    assert np.allclose(optimum(problem), together, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("constraints", KINDS)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", with_slow([0], [1, 2]))
def test_converges_to_the_optimum_on_every_graph(graph, constraints, schedule, seed):
    problem = network(graph, NODES, constraints=constraints, seed=seed)
    assert any(error(problem, rho=1.0, iterations=most, schedule=schedule, seed=seed) < 1e-8 for most in (200, 6000))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rho", [0.02, 50.0])
def test_converges_for_tiny_and_large_penalties_too(rho, schedule):
    problem = network("random", NODES, constraints="consensus", seed=1)
    assert error(problem, rho=rho, iterations=40, schedule=schedule) > 1e-3, "it is slower there"
    assert_within(
        error(problem, rho=rho, iterations=7000 if schedule == "synchronous" else 2000, schedule=schedule), 1e-8
    )


def by_the_paper(problem: Network, rho: float, order: list[list[int]]):
    """Eqs. 2 and 3 with dictionaries: x_i from the stationarity of (2), λ_{i|j} from (3), by the nodes of each turn at
    once. All states, first to last."""
    edges = {}
    for e, (i, j) in enumerate(problem.ends_ET.tolist()):
        edges[i, j] = (problem.constraint_ETRD[e, 0], problem.constraint_ETRD[e, 1], problem.offset_ER[e])
        edges[j, i] = (problem.constraint_ETRD[e, 1], problem.constraint_ETRD[e, 0], problem.offset_ER[e])
    x = {i: np.zeros(WIDTH) for i in range(len(problem.linear_ND))}
    multiplier = {key: np.zeros(problem.offset_ER.shape[1]) for key in edges}
    states = [(x, multiplier)]
    for acting in order:
        new_x, new_multiplier = dict(x), dict(multiplier)
        for i in acting:
            left, right = problem.hessian_NDD[i].copy(), problem.linear_ND[i].copy()
            for (owner, j), (a_ij, a_ji, b) in edges.items():
                if owner == i:
                    left += rho * a_ij.T @ a_ij
                    right += a_ij.T @ multiplier[j, i] - rho * a_ij.T @ (a_ji @ x[j] - b)
            new_x[i] = np.linalg.solve(left, right)
            for (owner, j), (a_ij, a_ji, b) in edges.items():
                if owner == i:
                    new_multiplier[i, j] = multiplier[j, i] + rho * (b - a_ji @ x[j] - a_ij @ new_x[i])
        x, multiplier = new_x, new_multiplier
        states.append((x, multiplier))
    return states, edges


@pytest.mark.parametrize("constraints", KINDS)
def test_synchronous_states_are_those_of_the_papers_recursion(constraints):
    problem = network("random", NODES, constraints=constraints, seed=3)
    trace = pdmm(problem, rho=0.7, iterations=12)
    states, _ = by_the_paper(problem, 0.7, [list(range(NODES))] * 12)
    for k, (x, multiplier) in enumerate(states):
        assert np.allclose(trace.x_TND[k], [x[i] for i in range(NODES)], atol=1e-12)
        for e, (i, j) in enumerate(problem.ends_ET.tolist()):
            assert np.allclose(trace.multiplier_TETR[k, e], [multiplier[i, j], multiplier[j, i]], atol=1e-12)


def test_asynchronous_states_are_those_of_the_papers_recursion_for_the_same_order():
    problem = network("cycle", NODES, constraints="general", seed=3)
    trace = pdmm(problem, rho=0.7, iterations=6, schedule="asynchronous", seed=9)
    draws = np.random.default_rng([9, 1])
    order = [[int(node)] for _ in range(6) for node in draws.integers(NODES, size=NODES)]
    states, _ = by_the_paper(problem, 0.7, order)
    for k, (x, multiplier) in enumerate(states[::NODES]):
        assert np.allclose(trace.x_TND[k], [x[i] for i in range(NODES)], atol=1e-11)
        for e, (i, j) in enumerate(problem.ends_ET.tolist()):
            assert np.allclose(trace.multiplier_TETR[k, e], [multiplier[i, j], multiplier[j, i]], atol=1e-11)


def history(states, edges, i, j, k, *, as_printed: bool):
    """λ_{j|i}^k / ρ for even k by Eq. 4. The paper prints its second sum with x_j^{2m−1} and x_i^{2m}; by (3) it is
    x_i^{2m−1} and x_j^{2m}."""
    a_ij, a_ji, b = edges[i, j]
    x = [state[0] for state in states]
    total = np.zeros_like(b)
    for m in range(1, k // 2 + 1):
        total = total + b - a_ji @ x[2 * m - 2][j] - a_ij @ x[2 * m - 1][i]
        own, other = (2 * m, 2 * m - 1) if as_printed else (2 * m - 1, 2 * m)
        total = total + b - a_ij @ x[own][i] - a_ji @ x[other][j]
    return total


@pytest.mark.parametrize("k", [2, 6, 10])
def test_a_multiplier_is_the_sum_of_historical_residuals(k):
    """Eq. 4 with its indices put right; as printed it disagrees with the paper's own Eq. 3."""
    problem, rho = network("random", NODES, constraints="general", seed=5), 0.4
    trace = pdmm(problem, rho=rho, iterations=k)
    states, edges = by_the_paper(problem, rho, [list(range(NODES))] * k)
    for e, (i, j) in enumerate(problem.ends_ET.tolist()):
        assert np.allclose(
            trace.multiplier_TETR[k, e, 1], rho * history(states, edges, i, j, k, as_printed=False), atol=1e-12
        )
        assert not np.allclose(
            trace.multiplier_TETR[k, e, 1], rho * history(states, edges, i, j, k, as_printed=True), atol=1e-3
        )


def test_recorded_residuals_are_what_the_multipliers_gained():
    problem, rho = network("random", NODES, constraints="general", seed=6), 0.4
    trace = pdmm(problem, rho=rho, iterations=8)
    gained = trace.multiplier_TETR[1:] - trace.multiplier_TETR[:-1, :, ::-1]
    assert np.allclose(rho * trace.residual_TETR, gained, atol=1e-12)


def test_an_asynchronous_residual_is_that_of_the_ends_last_turn():
    """By Eq. 3, from the states just before and just after the last turn of each directed edge's owner."""
    problem = network("path", 3, constraints="general", seed=0)
    trace = pdmm(problem, rho=0.7, iterations=2, schedule="asynchronous", seed=5)
    draws = np.random.default_rng([5, 1])
    turns = [int(node) for _ in range(2) for node in draws.integers(3, size=3)]
    states, edges = by_the_paper(problem, 0.7, [[node] for node in turns])
    for e, (i, j) in enumerate(problem.ends_ET.tolist()):
        for t, (own, other) in enumerate(((i, j), (j, i))):
            a_own, a_other, b = edges[own, other]
            last = max((turn for turn, node in enumerate(turns) if node == own), default=None)
            expected = (
                np.zeros_like(b)
                if last is None
                else b - a_other @ states[last][0][other] - a_own @ states[last + 1][0][own]
            )
            assert np.allclose(trace.residual_TETR[-1, e, t], expected, atol=1e-12)


def flat_pair() -> Network:
    """Two nodes that must agree, f = 0: every common value is optimal."""
    return Network(
        np.zeros((2, 1, 1)), np.zeros((2, 1)), np.array([[0, 1]]), np.array([[[[1.0]], [[-1.0]]]]), np.array([[1.0]])
    )


def test_merely_convex_nodes_exchange_their_values_for_ever_unless_messages_are_averaged():
    """x_1 − x_2 = 1 with f = 0: plain synchronous PDMM never agrees, θ = ½ (ADMM) does, and so does one node at a
    time."""

    def gap(**options) -> np.ndarray:
        x_T2 = pdmm(flat_pair(), rho=1.0, iterations=60, **options).x_TND[..., 0]
        return np.abs(x_T2[:, 0] - x_T2[:, 1] - 1)

    assert gap()[1:].min() >= 1.0
    assert_within(gap(averaging=0.5)[-1], 1e-8)
    assert_within(gap(schedule="asynchronous")[-1], 1e-8)


@pytest.mark.parametrize("averaging", [0.5, 0.9])
def test_averaging_keeps_the_optimum(averaging):
    problem = network("random", NODES, constraints="general", seed=0)
    assert_within(error(problem, rho=1.0, iterations=1500, averaging=averaging), 1e-8)


def test_a_node_without_a_minimum_of_its_own_is_refused():
    loose = network("path", 3, constraints="general", seed=0)
    flat = Network(
        np.zeros_like(loose.hessian_NDD), loose.linear_ND, loose.ends_ET, loose.constraint_ETRD, loose.offset_ER
    )
    with pytest.raises(ValueError, match="node 0 has no unique minimum"):
        pdmm(flat, rho=1.0, iterations=1)


def test_seeds_draw_other_problems_and_other_orders_and_the_same_ones_again():
    first, second = (network("random", NODES, constraints="general", seed=seed) for seed in (0, 1))
    assert not np.array_equal(first.linear_ND, second.linear_ND)
    runs = [pdmm(first, rho=1.0, iterations=2, schedule="asynchronous", seed=seed).x_TND for seed in (0, 0, 1)]
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize(("graph", "edges"), [("path", 5), ("cycle", 6), ("complete", 15)])
def test_graphs_have_the_edges_of_their_name(graph, edges):
    assert len(network(graph, 6, constraints="consensus", seed=0).ends_ET) == edges


def test_the_random_graph_is_connected():
    for seed in range(10):
        problem = network("random", 6, constraints="consensus", seed=seed)
        reached = {0}
        for _ in range(6):
            reached |= {node for ends in problem.ends_ET.tolist() if reached & set(ends) for node in ends}
        assert reached == set(range(6))


def test_rows_hold_error_and_discrepancy_of_every_iteration():
    rows = list(pdmm_rows(nodes=4, rho=1.0, iterations=9, constraints="consensus", averaging=1.0, seed=0))
    assert len(rows) == len(GRAPHS) * len(SCHEDULES) * 9
    row = next(row for row in rows if (row["graph"], row["schedule"], row["iteration"]) == ("random", "synchronous", 9))
    problem = network("random", 4, constraints="consensus", seed=0)
    states, edges = by_the_paper(problem, 1.0, [list(range(4))] * 9)
    x, before = states[-1][0], states[-2][0]
    squares = [np.square(b - a_ji @ before[j] - a_ij @ x[i]).mean() for (i, j), (a_ij, a_ji, b) in edges.items()]
    assert row["discrepancy"] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-9)
    distance = np.linalg.norm([x[i] for i in range(4)] - optimum(problem)) / np.linalg.norm(optimum(problem))
    assert row["error"] == pytest.approx(distance, rel=1e-9)
