"""`sc`: multi-head self-consensus on the window graph or another.

From the consensus paper, Algorithms 1, 2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from stability.config.identity import Since
from stability.config.impl import Use
from stability.mechanisms._base import BIDIRECTIONAL, MixerShape, without_padding
from stability.mechanisms._edge_weights import (
    READINGS,
    ConsensusSettings,
    EdgeNetwork,
    EdgeWeights,
    RopeOfEdges,
    cost_per_edge,
    mlps_of,
    precision_on,
)
from stability.mechanisms._graphs import Edges, convert_edges, cycle_edges, top_edges
from stability.mechanisms._observed import AbstractConsensus
from stability.mechanisms._pairs import EdgeList, Pairs, exact_cos_sin, rotate, turn_of_kernels
from stability.models.passes import is_differentiated_once
from stability.models.position import Rope

WINDOW_MATTERS = ("window", "cycle", "top_w")


class SelfConsensus(EdgeNetwork, AbstractConsensus):
    """Consensus of a sequence with itself, per head: u′ = u − η·g.

    y_out = W_o u′ + b_o with u = W_s y + b_s and g_i = Σ_j R_ij(u_i − u_j) − Σ_k R_ki(u_k − u_i). The sums run over a
    directed graph, the same for all heads: j over the out-edges i → j, k over the in-edges k → i. R_ij = α I + β Λᵀ Λ
    is positive definite; α, β > 0 and Λ (r × d_H, rows of norm 1/√r) come from an MLP on [y_i; y_j].

    With ``rope="absolute"`` g's disagreements use the rotated ũ (C.3, read literally: u′ = u − η·g(ũ)). With "gradient"
    g is the gradient of their energy by u: u′_i = u_i − η·ρ(i)ᵀg(ũ)_i. With "relative" they are ρ(i − j)u_i − u_j, in
    both sums. Several iterations repeat u ← u − η_t·g(u) with the edge weights from y. With ``step="bounded"`` R is
    divided by a bound of the operator's largest eigenvalue (`largest_eigenvalue`), so that u ↦ η·g(u) has norm at
    most η.
    """

    class Config(ConsensusSettings):
        """Settings for graph, edge MLP and step."""

        graph: Annotated[Literal["window", "cycle", "complete", "given", "top_w"], Since("window", of=("sc",))] = Field(
            default="window",
            description=(
                "which positions share an edge: those in the window, wrapped around, all, those given with each "
                "batch, the best scored"
            ),
        )
        rope: RopeOfEdges = "gradient"

    directions = frozenset({BIDIRECTIONAL})
    cross_kind = "cc"

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        self.rope, self.rotation = shape.rope or Rope(), "none" if shape.rope is None else config.rope
        if self.rotation != "none":
            shape.require_pairs()
        self.source = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.add_edge_parameters(config, shape)
        if config.graph == "top_w":  # one score for all heads, since Algorithm 5 has one graph for them
            self.query = nn.Linear(shape.width, shape.head_width)
            self.key = nn.Linear(shape.width, shape.head_width)

    @classmethod
    def check_positions(cls, config: Any, num_positions: int) -> None:
        if config.graph in WINDOW_MATTERS and config.window >= num_positions:
            raise ValueError(f"mechanism.sc.window={config.window} must be below model.positions={num_positions}")

    @classmethod
    def needs_edges(cls, config: Any) -> bool:
        return config.graph == "given"

    @classmethod
    def blind_to_order(cls, config: Any) -> bool:
        # given edges may all point one way
        return config.graph != "given" and config.rope in ("absolute", "none")

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        return f"graph={config.graph}" if config.graph != "window" else super().no_kernel(config, use)

    @classmethod
    def reading(cls, config: Any) -> str:
        return f"rope={config.rope}, {READINGS[config.rope]}"

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        return False

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Return the multiply-adds; ``graph="given"`` counts as the complete graph.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        neighbors = min(config.window, num_positions - 1)
        edges = {
            "window": 2 * sum(num_positions - offset for offset in range(1, neighbors + 1)),
            "cycle": num_positions * min(2 * config.window, num_positions - 1),
            "top_w": num_positions * neighbors,
        }.get(config.graph, num_positions * (num_positions - 1))
        per_node = 2 * shape.width**2 + 2 * shape.width * config.edge_hidden * mlps_of(config)
        if config.graph == "top_w":
            per_node += 2 * shape.width * shape.head_width + num_positions * shape.head_width
        return float(num_positions * per_node + edges * cost_per_edge(config, shape))

    def forward(
        self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None, edges: Tensor | None = None
    ) -> Float[Tensor, "B N D"]:
        """Return the updated signal, (B, N, D).

        Edges with a padded end contribute nothing. A window beyond the ends is cut there (w ≥ N − 1: the complete
        graph); only a run, with its length known beforehand, refuses w ≥ N.

        Args:
            x_BND: source y.
            mask_BN: True at valid positions; None without padding.
            edges: only for ``graph="given"``: directed edges i → j. Either int64 (E, 2), shared by the batch, or (B, E,
                2) with rows [-1, -1] as filler; or a boolean adjacency (N, N) or (B, N, N), True at [i, j].

        Raises:
            ValueError: wrong mask or wrong edges.
        """
        x_BND = without_padding(x_BND, mask_BN)
        u_HKBN = self.project_heads(self.source, x_BND)
        graph = self._graph(x_BND, mask_BN, edges)
        if self.config.impl == "triton":
            u_HKBN = self._update_by_kernels(u_HKBN, x_BND, mask_BN)
        elif graph.shape[1]:
            u_HKBN = self._update(u_HKBN, self._hidden(x_BND, graph), graph)
        return self.join_heads(self.out, u_HKBN)

    def _graph(self, x_BND: Tensor, mask_BN: Tensor | None, edges: Tensor | None) -> Pairs | EdgeList:
        """Return one forward pass's graph: `Pairs` for window and complete graphs, else `EdgeList`."""
        batch, num_positions = x_BND.shape[:2]
        if self.config.graph != "given" and edges is not None:
            raise ValueError(f"mechanism.sc.graph={self.config.graph} takes no edges; choose graph=given")
        window = num_positions if self.config.graph == "complete" else self.config.window
        relative = self.rope if self.rotation == "relative" else None
        if self.config.graph in ("window", "complete"):
            return Pairs(window, batch, num_positions, mask_BN, relative)
        if self.config.graph == "cycle":
            listed = cycle_edges(window, num_positions, x_BND.device)
        elif self.config.graph == "top_w":
            listed = top_edges(self._scores(x_BND), window, mask_BN)
        else:
            listed = self._convert_edges(edges, x_BND)
        return EdgeList(listed, batch, num_positions, mask_BN, relative)

    def _convert_edges(self, edges: Tensor | None, x_BND: Tensor) -> Edges:
        if edges is None:
            raise ValueError(
                "mechanism.sc.graph=given needs edges: forward(x, edges=…), e.g. int64 (E, 2) with a row [i, j] for "
                "each edge i → j"
            )
        return convert_edges(edges, x_BND.shape[0], x_BND.shape[1], x_BND.device)

    def _scores(self, x_BND: Tensor) -> Tensor:
        """Return s_ij = q_i·k_j / √K, (B, N, N)."""
        return self.query(x_BND) @ self.key(x_BND).mT / self.query.out_features**0.5

    def _hidden(self, x_BND: Tensor, graph: Pairs | EdgeList) -> Tensor:
        """Return GELU(first layer) per edge, (H, T, X, B·P)."""
        return F.gelu(graph.sums(*self.compute_end_terms(x_BND)))

    def _weights(self, hidden_HTXM: Tensor, heads: slice, graph: Pairs | EdgeList) -> EdgeWeights:
        """Return R for some ``heads``, divided by the bound of λ_max with ``step="bounded"``."""
        weights = self.edge_weights_of(hidden_HTXM, heads, graph.shape)
        if weights.norm_HBP is None:
            return weights
        return weights.divide(largest_eigenvalue(graph, weights.norm_HBP))

    def _update(self, u_HKBN: Tensor, hidden_HTXM: Tensor, graph: Pairs | EdgeList) -> Tensor:
        """Return u after all steps u ← u − η·g, one or all heads at a time."""
        slices, step_sizes = self.heads_in_turn(u_HKBN.device), self.step_sizes()
        if self.flows_once() and self.rotation != "relative" and is_differentiated_once(u_HKBN):
            flow_HKBP = self.flow_once(hidden_HTXM, graph.differences(self._rotate(u_HKBN)))
            return u_HKBN - step_sizes[0] * self._rotate_back(graph.collect(flow_HKBP))
        at_once = slices[0].stop
        weights: Iterable[EdgeWeights] = (
            self._weights(hidden, heads, graph)
            for heads, hidden in zip(slices, hidden_HTXM.split(at_once), strict=True)
        )
        if len(step_sizes) > 1:
            weights = list(weights)
        for step_size in step_sizes:  # for a single step each head's Λ is freed before the next head's
            differences = graph.differences(self._rotate(u_HKBN)).split(at_once)
            flows = [of_heads.flow(difference) for of_heads, difference in zip(weights, differences, strict=True)]
            u_HKBN = u_HKBN - step_size * self._rotate_back(graph.collect(torch.cat(flows)))
        return u_HKBN

    def _rotate(self, u_HKBN: Tensor) -> Tensor:
        """Return ũ if disagreements use ũ, else u."""
        is_turned = self.rotation in ("absolute", "gradient")
        return self.rope(u_HKBN, position_dim=-1, width_dim=1) if is_turned else u_HKBN

    def _rotate_back(self, g_HKBN: Tensor) -> Tensor:
        """Return the step's direction: ρ(i)ᵀg_i with ``rope="gradient"``, else g."""
        is_turned = self.rotation == "gradient"
        return self.rope(g_HKBN, position_dim=-1, width_dim=1, back=True) if is_turned else g_HKBN

    def _update_by_kernels(self, u_HKBN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Return `_update`'s result on the window graph, without edge weights in memory."""
        from kernels.consensus import self_consensus

        at_ends, network = self.compute_end_terms(x_BND), self.list_kernel_arguments()
        settings = {"window": self.config.window, "precision": precision_on(x_BND.device)}
        turn, constants = self._rotate, [mask_BN]
        if self.rotation == "relative":
            cos, sin = exact_cos_sin(u_HKBN, u_HKBN.shape[-1], self.rope)
            turn = partial(rotate, cos=cos[:, None], sin=sin[:, None])
            constants.append(turn_of_kernels(cos, sin))
        for step_size in self.step_sizes():
            g_HKBN = self_consensus(turn(u_HKBN), *at_ends, *network, *constants, **settings)
            u_HKBN = u_HKBN - step_size * self._rotate_back(g_HKBN)
        return u_HKBN

    def edge_weights(
        self, x_BND: Float[Tensor, "B N D"], *, edges: Tensor | None = None
    ) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " E"], Float[Tensor, "B H E K K"]]:
        """Return ``source_E, target_E, R_BHEKK``: R_ij in `forward` on the edges i = source → j = target.

        Gates are included.

        Raises:
            ValueError: no edges, or edges that differ within the batch (top_w, edges given per sequence).
        """
        graph = self._graph(x_BND, None, edges)
        if not graph.shape[1]:
            given = "edges holds no edge; give at least one"
            raise ValueError(
                given
                if self.config.graph == "given"
                else f"a sequence of {x_BND.shape[1]} position has no edges; give at least 2"
            )
        weights = self._weights(self._hidden(x_BND, graph), slice(None), graph)
        return graph.list_directed(weights.dense(self.source.out_features // self.heads))


def largest_eigenvalue(graph: Pairs | EdgeList, norm_HBP: Tensor) -> Tensor:
    """Return 2·max_i d_i per head and sequence, (H, B, 1): a bound of λ_max(A).

    With symmetric R_e ⪰ 0 on the directed edges e = (i → j) the operator behind g is A = Σ_e (e_i − e_j)(e_i − e_j)ᵀ ⊗
    R_e. Since |u_i − u_j|² ≤ 2(|u_i|² + |u_j|²), uᵀAu ≤ Σ_e ‖R_e‖·|u_i − u_j|² ≤ 2 Σ_i d_i|u_i|² with the degrees d_i =
    Σ_{e ∋ i} ‖R_e‖, and λ_max(A) ≤ 2·max_i d_i. Rotating u at either end of an edge preserves |u_i|: under RoPE the
    same value bounds the norm of u ↦ g(u). Its derivative is that of the node with the largest degree, or the mean over
    ties. Edges with a padded end do not count; the bound is 0 for a sequence without edges.

    Args:
        graph: the edges.
        norm_HBP: a bound of ‖R_e‖; for unordered pairs, of ‖R_ij‖ + ‖R_ji‖.
    """
    return 2 * graph.degrees(norm_HBP).amax(-1, keepdim=True)


EXPORT = SelfConsensus
