"""Analyse a sparse block Laplacian: extreme eigenvalues, exact counts, spectral density, energy.

Its edge weights are matrices. Additional axes: n = N·K, length of a flat signal (position by position); C connected
components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, SuperLU, cg, eigsh, splu

from stability.curvature.lanczos import Operator, krylov

TOLERANCE = 1e-9  # relative, for iterative eigenvalues
MOST_VECTORS = 100  # in ARPACK's Krylov space
# Largest triangular factor in numbers (8 bytes each); beyond (long-range edges), conjugate gradients.
MOST_FILL = 200_000_000
ROUNDINGS = 10  # smaller eigenvalues, relative to the largest diagonal entry, count as zero


class SingularError(RuntimeError):
    """An LDLᵀ pivot is exactly zero."""


@dataclass(frozen=True)
class Density:
    """A stochastic Lanczos quadrature; each probe's weights sum to 1.

    ``probe`` is the probe's number for each node.
    """

    probe: np.ndarray
    nodes: np.ndarray
    weights: np.ndarray


class BlockLaplacian:
    """The block Laplacian of a graph with symmetric positive definite weights R_ij.

    L̄ = ½(D_out + D_in − W − Wᵀ) for directed edges i → j, R_ij (K × K). With S_ij = ½(R_ij + R_ji) for each unordered
    pair (a missing edge counts 0), L̄ = Σ_{i,j} (e_i − e_j)(e_i − e_j)ᵀ ⊗ S_ij: symmetric and positive semidefinite;
    the null space is the signals constant on each connected component. The energy of Eq. 5 is uᵀL̄u, its gradient 2L̄u,
    and the consensus update u − 2η·L̄u. The paper's L_sym = ½(L + Lᵀ) has out-degrees only and differs unless R_ij =
    R_ji.
    """

    def __init__(self, source_E: np.ndarray, target_E: np.ndarray, weight_EKK: np.ndarray, num_nodes: int):
        """Add up the weights of each unordered pair; loops i → i cancel and are dropped.

        Args:
            source_E: i of each edge.
            target_E: j of each edge.
            weight_EKK: R_ij, best in float64; rounding errors in its symmetry are removed.
            num_nodes: N.
        """
        proper = source_E != target_E
        low, high = np.minimum(source_E, target_E)[proper], np.maximum(source_E, target_E)[proper]
        pairs, place = np.unique(low.astype(np.int64) * num_nodes + high, return_inverse=True)
        self.num_nodes, self.width = num_nodes, weight_EKK.shape[-1]
        self.low, self.high = pairs // num_nodes, pairs % num_nodes
        self.weight_PKK = np.zeros((len(pairs), self.width, self.width))
        np.add.at(self.weight_PKK, place, weight_EKK[proper].astype(np.float64) / 2)
        self.weight_PKK = (self.weight_PKK + self.weight_PKK.transpose(0, 2, 1)) / 2
        self.matrix = _assemble(self.low, self.high, self.weight_PKK, num_nodes)
        ones, shape = np.ones(len(pairs)), (num_nodes, num_nodes)
        self._adjacency = sp.csr_array(sp.coo_array((ones, (self.low, self.high)), shape=shape))
        self.num_components, self._component_N = connected_components(self._adjacency, directed=False)
        sizes = np.bincount(self._component_N)
        self._constants = sp.csr_array(
            (1 / np.sqrt(sizes[self._component_N]), (self._component_N, np.arange(num_nodes))),
            shape=(len(sizes), num_nodes),
        )

    @property
    def size(self) -> int:
        """n, the number of eigenvalues; K·C are zero."""
        return self.num_nodes * self.width

    def weight_bounds(self) -> tuple[float, float]:
        """Return (smallest, largest) eigenvalue over all pairs' S_ij."""
        values_PK = np.linalg.eigvalsh(self.weight_PKK)
        return float(values_PK.min()), float(values_PK.max())

    def largest(self) -> float:
        """Return λ_max by Lanczos (ARPACK)."""
        if not len(self.low):
            return 0.0
        start = np.random.default_rng(0).standard_normal(self.size)
        return _extreme(self.matrix, start)

    def fiedler(self) -> float:
        """Return the smallest eigenvalue beyond the K·C zeros, by Lanczos on the pseudoinverse.

        NaN without edges; 0 if below the rounding of the matrix entries (for edges 1e-15 times lighter than others).
        """
        if not len(self.low):
            return float("nan")
        try:
            solve = self._build_grounded_solver()
        except SingularError:
            return 0.0
        kept_n = _flat(self._kept, self.width)

        def apply(x_n: np.ndarray) -> np.ndarray:
            y_n = np.zeros(self.size)
            # one sparse triangular solve: with one node per component fixed at 0 the rest of L̄ is positive definite,
            # and without a constant part in x the fixed nodes' equations hold
            y_n[kept_n] = solve(self.without_constants(x_n)[kept_n])
            return self.without_constants(y_n)

        inverse = LinearOperator((self.size, self.size), matvec=apply, dtype=np.float64)  # type: ignore[call-arg]
        start = self.without_constants(np.random.default_rng(0).standard_normal(self.size))
        value = 1 / _extreme(inverse, start)
        return value if value > ROUNDINGS * np.finfo(np.float64).eps * self.matrix.diagonal().max() else 0.0

    def without_constants(self, x_n: np.ndarray) -> np.ndarray:
        """Return x minus its mean on every component: the projection off the null space."""
        x_NK = x_n.reshape(self.num_nodes, self.width)
        return (x_NK - self._constants.T @ (self._constants @ x_NK)).reshape(-1)

    def count_below(self, threshold: float) -> int | None:
        """Count the eigenvalues ≤ ``threshold`` (to 1e-9 relative), exactly.

        None if the factors exceed `MOST_FILL`, or for a zero pivot.
        """
        if self._fill(self._order) > MOST_FILL:
            return None
        order_n = _flat(self._order, self.width)
        shifted = self.matrix.tocsr()[order_n][:, order_n] - threshold * (1 + TOLERANCE) * sp.eye_array(self.size)
        try:
            # Sylvester's law of inertia: as many as negative pivots in the LDLᵀ of L̄ − threshold·I
            return int((_factors(shifted).U.diagonal() < 0).sum())
        except SingularError:
            return None

    def density(self, probes: int, products: int, seed: int) -> Density:
        """Return quadratures of all n eigenvalues (Ubaru, Chen and Saad 2017).

        Args:
            probes: number of Rademacher vectors.
            products: matrix-vector products for each.
            seed: of the vectors.
        """
        generator, operator = torch.Generator().manual_seed(seed), self._operator()
        found = [self.quadrature(operator.probe(generator).numpy(), products) for _ in range(probes)]
        owner = np.concatenate([np.full(len(nodes), number) for number, (nodes, _) in enumerate(found)])
        return Density(
            owner, np.concatenate([nodes for nodes, _ in found]), np.concatenate([weights for _, weights in found])
        )

    def quadrature(self, start_n: np.ndarray, products: int) -> tuple[np.ndarray, np.ndarray]:
        """Return nodes and weights of Gauss's rule for zᵀf(L̄)z / zᵀz, z = ``start_n``.

        Exact for polynomials of degree below 2·products.
        """
        *_, last = krylov(self._operator(), torch.from_numpy(np.array(start_n, dtype=np.float64)), products)
        return last.values.numpy().clip(min=0.0), last.vectors[0].numpy() ** 2

    def energy(self, u_NK: np.ndarray) -> float:
        """Return uᵀL̄u (Eqs. 5 and 14).

        Equals ½ Σ over directed edges (u_i − u_j)ᵀ R_ij (u_i − u_j).
        """
        flat = np.asarray(u_NK, dtype=np.float64).reshape(-1)
        return float(flat @ (self.matrix @ flat))

    def _operator(self) -> Operator:
        return Operator(
            lambda x_n: torch.from_numpy(self.matrix @ x_n.numpy()), self.size, torch.float64, torch.device("cpu")
        )

    @cached_property
    def _order(self) -> np.ndarray:
        """The nodes in reverse Cuthill–McKee order, for short edges and small factors."""
        return reverse_cuthill_mckee(sp.csr_array(self._adjacency + self._adjacency.T), symmetric_mode=True)

    @cached_property
    def _kept(self) -> np.ndarray:
        """All nodes in this order except the first of each component."""
        _, first = np.unique(self._component_N, return_index=True)
        return self._order[~np.isin(self._order, first)]

    def _fill(self, order: np.ndarray) -> int:
        """Return the size of a triangular factor: the matrix's envelope in this order."""
        rank = np.empty(self.num_nodes, dtype=np.int64)
        rank[self._order] = np.arange(self.num_nodes)
        first = rank.copy()
        np.minimum.at(first, self.low, rank[self.high])
        np.minimum.at(first, self.high, rank[self.low])
        return int((rank - first + 1)[order].sum()) * self.width**2

    def _build_grounded_solver(self):
        """Return x ↦ L̄_kept⁻¹ x; L̄_kept has no rows or columns of the fixed nodes."""
        kept_n = _flat(self._kept, self.width)
        grounded = self.matrix.tocsr()[kept_n][:, kept_n]
        if self._fill(self._kept) <= MOST_FILL:
            return _factors(grounded).solve
        return self._iterative_solver(grounded)

    def _iterative_solver(self, grounded):
        """Return a conjugate-gradient solver, preconditioned with the unweighted Laplacian."""
        # the condition number is then the weights', independent of the graph's length
        unweighted = _assemble(self.low, self.high, np.ones((len(self.low), 1, 1)), self.num_nodes).tocsr()[self._kept][
            :, self._kept
        ]
        plain = splu(unweighted.tocsc())

        def spread_out(x: np.ndarray) -> np.ndarray:
            return plain.solve(x.reshape(-1, self.width)).reshape(-1)

        spread = LinearOperator(grounded.shape, matvec=spread_out, dtype=np.float64)  # type: ignore[call-arg]

        def solve(x: np.ndarray) -> np.ndarray:
            solution, left = cg(grounded, x, rtol=TOLERANCE / 10, maxiter=10_000, M=spread)
            if left:
                raise RuntimeError(
                    "conjugate gradients did not settle: the edge weights differ by too many orders of magnitude"
                )
            return solution

        return solve


def connectivity(source_E: np.ndarray, target_E: np.ndarray, num_nodes: int) -> float:
    """Return λ_1 of the unweighted graph: its smallest eigenvalue beyond the components' zeros.

    Args:
        source_E: i of each edge.
        target_E: j of each edge; each unordered pair counts once.
        num_nodes: N.
    """
    low, high = np.minimum(source_E, target_E), np.maximum(source_E, target_E)
    pairs = np.unique(low.astype(np.int64) * num_nodes + high)
    low, high = pairs // num_nodes, pairs % num_nodes
    return BlockLaplacian(
        np.concatenate([low, high]), np.concatenate([high, low]), np.ones((2 * len(low), 1, 1)), num_nodes
    ).fiedler()


def _assemble(low: np.ndarray, high: np.ndarray, weight_PKK: np.ndarray, num_nodes: int) -> sp.bsr_array:
    width = weight_PKK.shape[-1]
    degree_NKK = np.zeros((num_nodes, width, width))
    np.add.at(degree_NKK, low, weight_PKK)
    np.add.at(degree_NKK, high, weight_PKK)
    nodes = np.arange(num_nodes)
    row, column = np.concatenate([low, high, nodes]), np.concatenate([high, low, nodes])
    order = np.lexsort((column, row))
    blocks = np.concatenate([-weight_PKK, -weight_PKK, degree_NKK])[order]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_nodes))])
    return sp.bsr_array((blocks, column[order], starts), shape=(num_nodes * width, num_nodes * width))


def _extreme(operator, start_n: np.ndarray) -> float:
    """Return a symmetric operator's eigenvalue of largest modulus (ARPACK)."""
    tolerance: Any = TOLERANCE  # scipy's stubs require an int
    usual: dict[str, Any] = {"k": 1, "which": "LM", "tol": tolerance, "v0": start_n, "return_eigenvectors": False}
    try:
        return float(eigsh(operator, **usual)[0])
    except ArpackNoConvergence:
        # ARPACK's default of 20 vectors may fail with more than 20 eigenvalues within 1e-7, common if the edge weights
        # are nearly multiples of I
        return float(eigsh(operator, **usual, ncv=min(MOST_VECTORS, len(start_n)))[0])


def _flat(nodes: np.ndarray, width: int) -> np.ndarray:
    """Return the nodes' indices in a flat signal."""
    return (nodes[:, None] * width + np.arange(width)).reshape(-1)


def _factors(matrix) -> SuperLU:
    """Factor a symmetric matrix into LU without row exchanges."""
    try:
        # without row exchanges this is LDLᵀ: U's diagonal has the pivots
        found = splu(matrix.tocsc(), permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError as error:  # scipy: "Factor is exactly singular"
        raise SingularError(str(error)) from None
    if not (found.perm_r == np.arange(matrix.shape[0])).all():
        raise SingularError("rows were exchanged for a zero pivot")
    return found
