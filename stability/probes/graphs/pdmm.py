"""Run the primal-dual method of multipliers (PDMM) on a network of quadratic nodes: where AttentionX takes its
consensus discrepancy from (section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stability.probes.graphs.connectivity import complete, cycle, window_path

GRAPHS = ("path", "cycle", "random", "complete")
SCHEDULES = ("synchronous", "asynchronous")
WIDTH = 3  # variables of a node
ROWS = 2  # of a general edge's constraint
EXTRA_EDGES = 0.3  # share of the pairs beyond a tree that the random graph takes


@dataclass(frozen=True)
class Network:
    """A network of nodes that minimise Σ_i ½x_iᵀQ_ix_i − q_iᵀx_i subject to A_ij x_i + A_ji x_j = b_ij on every edge
    (Eq. 1).

    N nodes of D variables, E edges of R rows each; of edge e the ends are ``ends_ET[e]``, and ``constraint_ETRD[e, t]``
    is the matrix of end t.
    """

    hessian_NDD: np.ndarray
    linear_ND: np.ndarray
    ends_ET: np.ndarray
    constraint_ETRD: np.ndarray
    offset_ER: np.ndarray


@dataclass(frozen=True)
class Trace:
    """States 0 … T of a run. ``multiplier[k, e, t]`` is λ_{i|j} of end i = ``ends_ET[e, t]``; ``residual[k − 1, e, t]``
    the b_ij − A_ji x_j − A_ij x_i that entered it last by iteration k (Eqs. 3 and 4), zero for an end that has not
    acted yet."""

    x_TND: np.ndarray
    multiplier_TETR: np.ndarray
    residual_TETR: np.ndarray


def network(graph: str, nodes: int, *, constraints: str, seed: int) -> Network:
    """Draw a seeded problem: Q_i with eigenvalues of 0.3 to 3, normal q_i. ``constraints``: "consensus" (A_ij = I, A_ji
    = −I, b = 0), or "general" (normal A of two rows, b such that some x satisfies all)."""
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
    """Return x* (N, D) by least squares on the KKT system; redundant constraints leave the multipliers open, x* not."""
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
    """Run Eqs. 2 and 3 from x = λ = 0. Synchronous: an iteration updates all nodes from the last one's state.
    Asynchronous: it is N updates of one node each, drawn uniformly with ``seed``, from the state as it stands.

    What end i needs of its neighbor is the message z_{i|j} = λ_{j|i} − ρ(A_ji x_j − b_ij): x_i minimises f_i −
    x_iᵀΣ_jA_ijᵀz_{i|j} + ρ/2 Σ_j‖A_ij x_i‖², and λ_{i|j} = z_{i|j} − ρA_ij x_i. ``averaging`` θ < 1 sends (1 − θ)·(the
    last message) + θ·(the new one). Synchronous PDMM is Peaceman–Rachford splitting of the dual: it converges for
    strongly convex f_i with Lipschitz gradients, and needs averaging where f_i is merely convex (two nodes with f = 0
    exchange their values for ever); θ = ½ is ADMM (Sherson et al. 2019). Errors: ``ValueError`` where a node's own
    problem has no unique minimum.
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
    """The state of a run at one iteration. ``message_ETR[e, t]``: z_{i|j}, what end t has last heard of the other."""

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
    """Let the nodes of ``acts_N`` update x (2) and λ (3) and send messages; the others and what they have said stay."""
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
    """Yield a row a graph, schedule and iteration: ‖x − x*‖/‖x*‖, and the root mean square of the residuals over
    directed edges and rows."""
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
