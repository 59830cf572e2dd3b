"""Run the primal-dual method of multipliers (PDMM) on a network of quadratic nodes.

PDMM is the origin of AttentionX's consensus discrepancy (section 2). Also the algebraic connectivity of the consensus
paper's graphs, beside its section 4 (Eqs. 15, 16 and 35).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stability.probes.layers.laplacian import connectivity

GRAPHS = ("path", "cycle", "random", "complete")
SCHEDULES = ("synchronous", "asynchronous")
WIDTH = 3  # variables of a node
ROWS = 2  # of a general edge's constraint
EXTRA_EDGES = 0.3  # probability of a pair beyond the random graph's tree


@dataclass(frozen=True)
class Network:
    """A network minimising Σ_i ½x_iᵀQ_ix_i − q_iᵀx_i under edge constraints (Eq. 1).

    Constraints: A_ij x_i + A_ji x_j = b_ij on every edge. N nodes of D variables, E edges of R rows. ``ends_ET[e]`` are
    the nodes of edge e; ``constraint_ETRD[e, t]`` is the matrix of end t.
    """

    hessian_NDD: np.ndarray
    linear_ND: np.ndarray
    ends_ET: np.ndarray
    constraint_ETRD: np.ndarray
    offset_ER: np.ndarray


@dataclass(frozen=True)
class Trace:
    """States 0 … T of a run.

    ``multiplier[k, e, t]`` is λ_{i|j} of end i = ``ends_ET[e, t]``. ``residual[k − 1, e, t]`` is b_ij − A_ji x_j − A_ij
    x_i from the end's latest update up to iteration k (Eqs. 3 and 4); zero before its first.
    """

    x_TND: np.ndarray
    multiplier_TETR: np.ndarray
    residual_TETR: np.ndarray


def network(graph: str, nodes: int, *, constraints: str, seed: int) -> Network:
    """Draw a seeded problem: Q_i with eigenvalues from 0.3 to 3, normal q_i.

    Args:
        graph: one of `GRAPHS`.
        nodes: N.
        constraints: "consensus" (A_ij = I, A_ji = −I, b = 0), or "general" (normal A with two rows, and a feasible b).
        seed: of the draws.
    """
    draws = np.random.default_rng([seed, GRAPHS.index(graph)])
    ends_ET = _ends(graph, nodes, draws)
    basis_NDD = np.linalg.qr(draws.standard_normal((nodes, WIDTH, WIDTH))).Q
    values_ND = np.exp(draws.uniform(np.log(0.3), np.log(3.0), (nodes, WIDTH)))
    hessian_NDD = np.einsum("nik,nk,njk->nij", basis_NDD, values_ND, basis_NDD)
    linear_ND, feasible_ND = draws.standard_normal((2, nodes, WIDTH))
    if constraints == "consensus":
        constraint_ETRD = np.tile(np.stack([np.eye(WIDTH), -np.eye(WIDTH)]), (len(ends_ET), 1, 1, 1))
        return Network(hessian_NDD, linear_ND, ends_ET, constraint_ETRD, np.zeros((len(ends_ET), WIDTH)))
    constraint_ETRD = draws.standard_normal((len(ends_ET), 2, ROWS, WIDTH))
    offset_ER = np.einsum("etrd,etd->er", constraint_ETRD, feasible_ND[ends_ET])
    return Network(hessian_NDD, linear_ND, ends_ET, constraint_ETRD, offset_ER)


def _ends(graph: str, nodes: int, draws: np.random.Generator) -> np.ndarray:
    if graph == "random":
        tree = {(int(draws.integers(node)), node) for node in range(1, nodes)}
        more = {(i, j) for i, j in zip(*np.triu_indices(nodes, 1), strict=True) if draws.random() < EXTRA_EDGES}
        return np.array(sorted(tree | more))
    made = {
        "path": lambda: window_path(nodes, 1),
        "cycle": lambda: cycle(nodes, 1),
        "complete": lambda: complete(nodes),
    }[graph]()
    return np.stack(made, 1)


def optimum(problem: Network) -> np.ndarray:
    """Return x* (N, D) by least squares on the KKT system.

    Redundant constraints make only the multipliers ambiguous, not x*.
    """
    (edges, _, rows, width), nodes = problem.constraint_ETRD.shape, len(problem.linear_ND)
    hessian = np.zeros((nodes * width, nodes * width))
    for node, block in enumerate(problem.hessian_NDD):
        hessian[node * width : (node + 1) * width, node * width : (node + 1) * width] = block
    constraint = np.zeros((edges * rows, nodes * width))
    for edge, ends in enumerate(problem.ends_ET):
        for end, node in enumerate(ends):
            constraint[edge * rows : (edge + 1) * rows, node * width : (node + 1) * width] = problem.constraint_ETRD[
                edge, end
            ]
    system = np.block([[hessian, -constraint.T], [constraint, np.zeros((edges * rows, edges * rows))]])
    solved = np.linalg.lstsq(
        system, np.concatenate([problem.linear_ND.ravel(), problem.offset_ER.ravel()]), rcond=None
    )[0]
    return solved[: nodes * width].reshape(nodes, width)


def pdmm(
    problem: Network,
    *,
    rho: float,
    iterations: int,
    schedule: str = "synchronous",
    averaging: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Run Eqs. 2 and 3 from x = λ = 0.

    End i receives from its neighbor the message z_{i|j} = λ_{j|i} − ρ(A_ji x_j − b_ij). x_i minimises f_i −
    x_iᵀΣ_jA_ijᵀz_{i|j} + ρ/2 Σ_j‖A_ij x_i‖², and λ_{i|j} = z_{i|j} − ρA_ij x_i. Synchronous PDMM is Peaceman–Rachford
    splitting of the dual: convergent for strongly convex f_i with Lipschitz gradients. A merely convex f_i needs
    averaging: two nodes with f = 0 exchange their values forever. θ = ½ is ADMM (Sherson et al. 2019).

    Args:
        problem: the network.
        rho: the penalty ρ.
        iterations: T.
        schedule: "synchronous" (an iteration updates all nodes from the previous state), or "asynchronous" (an
            iteration is N updates of one uniformly drawn node from the current state).
        averaging: θ; below 1 it sends (1 − θ)·(last message) + θ·(new message).
        seed: of the asynchronous draws.

    Raises:
        ValueError: a node's own problem has no unique minimum.
    """
    draws, nodes = np.random.default_rng([seed, 1]), len(problem.linear_ND)
    local_NDD = _local_hessians(problem, rho)
    state = _State.zero(problem, rho)
    states, residuals = [state], []
    for _ in range(iterations):
        turns = (
            [np.ones(nodes, bool)]
            if schedule == "synchronous"
            else [np.arange(nodes) == node for node in draws.integers(nodes, size=nodes)]
        )
        for acts_N in turns:
            state = _act(problem, state, acts_N, local_NDD, rho, averaging)
        states.append(state)
        residuals.append(state.residual_ETR)
    return Trace(
        np.stack([each.x_ND for each in states]),
        np.stack([each.multiplier_ETR for each in states]),
        np.stack(residuals),
    )


@dataclass(frozen=True)
class _State:
    """The state at one iteration; ``message_ETR[e, t]`` is z_{i|j}, last received by end t."""

    x_ND: np.ndarray
    multiplier_ETR: np.ndarray
    message_ETR: np.ndarray
    residual_ETR: np.ndarray

    @staticmethod
    def zero(problem: Network, rho: float) -> _State:
        zeros = np.zeros((len(problem.ends_ET), 2, problem.offset_ER.shape[1]))
        return _State(np.zeros_like(problem.linear_ND), zeros, zeros + rho * problem.offset_ER[:, None], zeros)


def _local_hessians(problem: Network, rho: float) -> np.ndarray:
    """Return Q_i + ρ Σ_j A_ijᵀA_ij."""
    local_NDD = problem.hessian_NDD.copy()
    np.add.at(
        local_NDD, problem.ends_ET, rho * np.einsum("etrd,etrc->etdc", problem.constraint_ETRD, problem.constraint_ETRD)
    )
    flat = [int(node) for node in np.flatnonzero(np.linalg.matrix_rank(local_NDD, hermitian=True) < local_NDD.shape[1])]
    if flat:
        raise ValueError(
            f"node {flat[0]} has no unique minimum: Q_i + ρ Σ A_ijᵀA_ij is singular; give it a curved f_i or more "
            "constraints"
        )
    return local_NDD


def _act(
    problem: Network, state: _State, acts_N: np.ndarray, local_NDD: np.ndarray, rho: float, averaging: float
) -> _State:
    """Perform updates (2), (3) and messages at the nodes in ``acts_N``; the others stay unchanged."""
    pulled_ND = problem.linear_ND.copy()
    np.add.at(pulled_ND, problem.ends_ET, (state.message_ETR[:, :, None] @ problem.constraint_ETRD)[:, :, 0])
    x_ND = np.where(acts_N[:, None], np.linalg.solve(local_NDD, pulled_ND[..., None])[..., 0], state.x_ND)
    own_ETR, before_ETR = (
        (problem.constraint_ETRD @ each[problem.ends_ET][..., None])[..., 0] for each in (x_ND, state.x_ND)
    )
    acts_ET1 = acts_N[problem.ends_ET][..., None]
    offset_E1R = problem.offset_ER[:, None]
    multiplier_ETR = np.where(acts_ET1, state.message_ETR - rho * own_ETR, state.multiplier_ETR)
    residual_ETR = np.where(acts_ET1, offset_E1R - before_ETR[:, ::-1] - own_ETR, state.residual_ETR)
    sent_ETR = (multiplier_ETR - rho * (own_ETR - offset_E1R))[:, ::-1]
    heard_ETR = np.where(
        acts_ET1[:, ::-1], (1 - averaging) * state.message_ETR + averaging * sent_ETR, state.message_ETR
    )
    return _State(x_ND, multiplier_ETR, heard_ETR, residual_ETR)


def pdmm_rows(
    *, nodes: int, rho: float, iterations: int, constraints: str, averaging: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield error and discrepancy by graph, schedule and iteration.

    Error: ‖x − x*‖/‖x*‖. Discrepancy: root mean square of the residuals over directed edges and rows.

    Args:
        nodes: N.
        rho: ρ.
        iterations: T.
        constraints: as in `network`.
        averaging: θ, as in `pdmm`.
        seed: of problem and schedule.
    """
    for graph in GRAPHS:
        problem = network(graph, nodes, constraints=constraints, seed=seed)
        solution_ND = optimum(problem)
        recipe = {
            "constraints": constraints,
            "rho": rho,
            "averaging": averaging,
            "nodes": nodes,
            "edges": len(problem.ends_ET),
        }
        for schedule in SCHEDULES:
            trace = pdmm(problem, rho=rho, iterations=iterations, schedule=schedule, averaging=averaging, seed=seed)
            errors = np.linalg.norm(trace.x_TND[1:] - solution_ND, axis=(1, 2)) / np.linalg.norm(solution_ND)
            residuals = np.sqrt(np.square(trace.residual_TETR).mean((1, 2, 3)))
            for iteration, (error, residual) in enumerate(zip(errors, residuals, strict=True), 1):
                yield {
                    "graph": graph,
                    "schedule": schedule,
                    **recipe,
                    "iteration": iteration,
                    "error": error,
                    "discrepancy": residual,
                }


POSITIONS = (32, 64, 128, 256, 512, 1024)
WINDOWS = (1, 2, 4, 8, 16, 32)
MOST_COMPLETE = 256  # nodes of the largest complete graph: its matrix is full


def window_path(num_nodes: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges i < j ≤ i + w of P_N^w (Definition 3.1)."""
    near = np.arange(1, min(window, num_nodes - 1) + 1)
    low = np.concatenate([np.arange(num_nodes - offset) for offset in near])
    return low, np.concatenate([np.arange(offset, num_nodes) for offset in near])


def cycle(num_nodes: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of C_N^w, w < N/2 (Remark 4.1).

    The edges are {i, i + o mod N}, 0 < o ≤ w. ``ValueError`` for a larger w.
    """
    if 2 * window >= num_nodes:
        raise ValueError(f"a cycle of {num_nodes} nodes takes a window below {num_nodes / 2:g}, got {window}")
    nodes = np.tile(np.arange(num_nodes), window)
    return nodes, (nodes + np.repeat(np.arange(1, window + 1), num_nodes)) % num_nodes


def complete(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all edges of K_N."""
    return np.triu_indices(num_nodes, 1)


def cycle_connectivity(num_nodes: int, window: int) -> float:
    """Return λ_1(C_N^w) = 4 Σ_{j ≤ w} sin²(πj/N) (Eq. 15)."""
    return 4 * sum(math.sin(math.pi * j / num_nodes) ** 2 for j in range(1, window + 1))


def path_bounds(num_nodes: int, window: int) -> tuple[float, float]:
    """Return the bounds ½λ_1(C_2N^w) ≤ λ_1(P_N^w) ≤ λ_1(C_2N^w) for w < N/2 (Eqs. 16 and 35)."""
    upper = cycle_connectivity(2 * num_nodes, window)
    return upper / 2, upper


def connectivity_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each graph: kind, N, w, computed λ_1, and its bounds.

    For cycle and complete graphs both bounds equal the closed form.
    """
    for num_nodes in POSITIONS:
        for window in (window for window in WINDOWS if 2 * window < num_nodes):
            low, high = path_bounds(num_nodes, window)
            closed = cycle_connectivity(num_nodes, window)
            yield _row("window", num_nodes, window, connectivity(*window_path(num_nodes, window), num_nodes), low, high)
            yield _row("cycle", num_nodes, window, connectivity(*cycle(num_nodes, window), num_nodes), closed, closed)
        if num_nodes <= MOST_COMPLETE:
            yield _row(
                "complete",
                num_nodes,
                num_nodes - 1,
                connectivity(*complete(num_nodes), num_nodes),
                num_nodes,
                num_nodes,
            )


def _row(graph: str, num_nodes: int, window: int, value: float, low: float, high: float) -> dict[str, Any]:
    return {
        "graph": graph,
        "positions": num_nodes,
        "window": window,
        "connectivity": value,
        "bound_low": low,
        "bound_high": high,
    }
