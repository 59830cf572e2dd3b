"""`cc`: multi-head cross-consensus, which moves a source towards a context.

From the consensus paper, Algorithms 3, 4 and 6, appendices C.1 to C.3. Edges go from source positions i to context
positions j: all pairs, or those in a window. They are the last axis in every tensor, P per sequence; ``rows`` are the
covered source positions, so that a caller can process a long sequence in blocks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._base import AbstractCrossMechanism, MixerShape, require_context, without_padding
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
from stability.mechanisms._pairs import cos_sin, exact_cos_sin, rotate, rotate_back, turn_of_kernels
from stability.models.position import Rope

# Size of the largest tensor (Λ) in one block of source rows: 64 MiB in float32. For a backward pass autograd stores
# all blocks.
BLOCK_NUMBERS = 1 << 24


class _Sides(NamedTuple):
    """Signals u and ṽ, and each side's terms in the edge MLP's first layer."""

    u_HKBN: Tensor
    v_HKBJ: Tensor
    source_HXBN: Tensor
    target_HXBJ: Tensor

    def split(self, heads_at_once: int) -> list[_Sides]:
        return [_Sides(*of_heads) for of_heads in zip(*(side.split(heads_at_once) for side in self), strict=True)]


class CrossConsensus(EdgeNetwork, AbstractCrossMechanism):
    """Consensus of a source with a context: u′ = u − η·g, g_i = Σ_j R_ij(u_i − v_j), per head.

    y_out = W_o u′ + b_o with u = W_s y + b_s and v = W_c c + b_c. R_ij = α I + β Λᵀ Λ is positive definite; α, β > 0
    and Λ (r × d_H, rows of norm 1/√r) come from an MLP on [y_i; c_j].

    With ``rope="absolute"`` g contains ũ_i − ṽ_j, each rotated by its own position (C.3). With "gradient" g_i is the
    derivative of their energy by u_i: ρ(i)ᵀ times that sum. With "relative" g contains ρ(i − j)u_i − v_j. Several
    iterations repeat u ← u − η_t·g(u) with the edge weights from y and c; v is fixed. With ``step="bounded"``
    each i's R_ij are divided by Σ_j (α_ij + β_ij) ≥ λ_max of Σ_j R_ij, over valid j. A position without valid context
    has u′ = u.
    """

    class Config(ConsensusSettings):
        """Settings for graph, edge MLP and step."""

        graph: Literal["auto", "window", "complete"] = Field(
            default="auto",
            description=(
                "which context positions a source position sees; auto: those in the window where both are as long, "
                "else all"
            ),
        )
        rope: RopeOfEdges = "gradient"

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.rope, self.rotation = shape.rope or Rope(), "none" if shape.rope is None else config.rope
        if self.rotation != "none":
            shape.require_pairs()
        self.source = nn.Linear(shape.width, shape.width)
        self.context = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.add_edge_parameters(config, shape)

    @classmethod
    def for_words(cls, config: Any) -> Any:
        """Return the settings with all edges: words have no window around a position."""
        return config.model_copy(update={"graph": "complete"})

    @classmethod
    def check_positions(cls, config: Any, num_positions: int, num_context: int) -> None:
        if config.graph == "window" and num_context != num_positions:
            lengths = f"a context as long as model.positions={num_positions}, got objective.context={num_context}"
            raise ValueError(f"cross.graph=window needs {lengths}; choose auto or complete")
        if cls._is_windowed(config, num_positions, num_context) and config.window >= num_positions:
            raise ValueError(f"cross.window={config.window} must be below model.positions={num_positions}")

    @staticmethod
    def _is_windowed(config: Any, num_positions: int, num_context: int) -> bool:
        """Return whether the edges are limited to the window."""
        return config.graph == "window" or (config.graph == "auto" and num_context == num_positions)

    @classmethod
    def reading(cls, config: Any) -> str:
        return f"rope={config.rope}, {READINGS[config.rope]}"

    @classmethod
    def calls_linears(cls, config: Any) -> bool:
        return False

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int, num_context: int) -> float:
        windowed = cls._is_windowed(config, num_positions, num_context)
        edges = WindowedEdges(config.window, num_positions).num_edges if windowed else num_positions * num_context
        of_nodes = shape.width**2 * (2 * num_positions + num_context)
        of_features = shape.width * config.edge_hidden * mlps_of(config) * (num_positions + num_context)
        return float(of_nodes + of_features + edges * cost_per_edge(config, shape))

    def forward(
        self,
        x_BND: Float[Tensor, "B N D"],
        context_BJD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Return the source moved towards the context, (B, N, D).

        Edges with a padded end contribute nothing. A context with length J = 0 contributes nothing: u′ = u. A window
        beyond the ends is cut there (w ≥ N − 1: the complete graph); only a run refuses w ≥ N.

        Args:
            x_BND: source y.
            context_BJD: context c.
            mask_BN: True at valid source positions; None without padding.
            context_mask_BJ: True at valid context entries; None without padding.

        Raises:
            ValueError: wrong mask, context with another width or batch than the source, or ``graph="window"`` with J ≠
                N.
        """
        require_context(x_BND, context_BJD)
        x_BND = without_padding(x_BND, mask_BN)
        context_BJD = without_padding(context_BJD, context_mask_BJ, name="context_mask_BJ")
        masks = (
            None
            if mask_BN is None and context_mask_BJ is None
            else (_or_all(mask_BN, x_BND), _or_all(context_mask_BJ, context_BJD))
        )
        if self.config.impl == "triton":
            updated_HKBN = self._update_by_kernels(x_BND, context_BJD, masks or (None, None))
            return self.join_heads(self.out, updated_HKBN)
        slices = self.heads_in_turn(x_BND.device)
        updated = [
            torch.cat(
                [
                    self._update(edges, heads, sides, masks)
                    for edges in self._blocks(x_BND, context_BJD, len(sides.u_HKBN))
                ],
                -1,
            )
            for heads, sides in zip(slices, self._sides(x_BND, context_BJD).split(slices[0].stop), strict=True)
        ]
        return self.join_heads(self.out, torch.cat(updated))

    def _sides(self, x_BND: Tensor, context_BJD: Tensor) -> _Sides:
        u_HKBN, v_HKBJ = self.project_heads(self.source, x_BND), self.project_heads(self.context, context_BJD)
        (source_HXBN,), (target_HXBJ,) = (
            self.compute_end_terms(x_BND, slice(0, 1)),
            self.compute_end_terms(context_BJD, slice(1, 2)),
        )
        return _Sides(u_HKBN, self._rotate(v_HKBJ), source_HXBN, target_HXBJ)

    def _rotate(self, u_HKBN: Tensor) -> Tensor:
        if self.rotation == "relative":
            return rotate(u_HKBN, *self._angles(u_HKBN))
        return u_HKBN if self.rotation == "none" else self.rope(u_HKBN, position_dim=-1, width_dim=1)

    def _angles(self, u_HKBN: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at all positions in a signal, (K/2, 1, N) each."""
        tables = exact_cos_sin if self.rotation == "relative" else cos_sin
        cos, sin = tables(u_HKBN, u_HKBN.shape[-1], self.rope)
        return cos[:, None], sin[:, None]

    def _blocks(
        self, x_BND: Tensor, context_BJD: Tensor, heads_at_once: int
    ) -> list[WindowedEdges] | list[CompleteEdges]:
        """Return the edges, in blocks of source rows if complete.

        Λ for one block has about `BLOCK_NUMBERS` entries.
        """
        (batch, num_positions, width), num_context = x_BND.shape, context_BJD.shape[1]
        if self._is_in_window(num_positions, num_context):
            return [WindowedEdges(self.config.window, num_positions)]
        of_row = heads_at_once * batch * num_context * max(self.config.rank, 1) * (width // self.heads)
        step = max(BLOCK_NUMBERS // max(of_row, 1), 1)
        return [
            CompleteEdges(first, min(first + step, num_positions), num_context)
            for first in range(0, num_positions, step)
        ]

    def _is_in_window(self, num_positions: int, num_context: int) -> bool:
        """Return whether the edges are those in the window.

        Raises:
            ValueError: as in `forward`.
        """
        if self.config.graph == "window" and num_context != num_positions:
            raise ValueError(
                f"cross.graph=window needs a context as long as the source ({num_positions}), got {num_context}; "
                "choose auto or complete"
            )
        return self._is_windowed(self.config, num_positions, num_context)

    def _update_by_kernels(
        self, x_BND: Tensor, context_BJD: Tensor, masks: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Return u′ (H, K, B, N) for all heads, without edge weights in memory."""
        from kernels.consensus import cross_consensus

        u_HKBN, *others = self._sides(x_BND, context_BJD)
        in_window = self._is_in_window(x_BND.shape[1], context_BJD.shape[1])
        settings = {"window": self.config.window if in_window else None, "precision": precision_on(x_BND.device)}
        constants = [*masks]
        if self.rotation == "relative":
            constants.append(turn_of_kernels(*(table[:, 0] for table in self._angles(others[0]))))
        for step_size in self.step_sizes():
            turned_HKBN = self._rotate(u_HKBN)
            g_HKBN = cross_consensus(turned_HKBN, *others, *self.list_kernel_arguments(), *constants, **settings)
            if self.rotation == "gradient":
                g_HKBN = self.rope(g_HKBN, position_dim=-1, width_dim=1, back=True)
            u_HKBN = u_HKBN - step_size * g_HKBN
        return u_HKBN

    def _update(
        self, edges: WindowedEdges | CompleteEdges, heads: slice, sides: _Sides, masks: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return u′ for the rows covered by ``edges`` (Algorithm 6, lines 14 to 17)."""
        rows = edges.rows
        valid_BP = 1.0 if masks is None else edges.sums(masks[0][:, rows].byte(), masks[1].byte()) == 2
        weights = self._weights(edges, heads, sides, valid_BP)
        u = sides.u_HKBN[..., rows]
        angles = () if self.rotation == "none" else [table[..., rows] for table in self._angles(sides.u_HKBN)]
        for step_size in self.step_sizes():
            difference = edges.sums(rotate(u, *angles) if angles else u, -sides.v_HKBJ)
            if self.rotation == "relative":  # ρ(i − j)u_i − v_j = ρ(j)ᵀ(ũ_i − ṽ_j)
                of_context = (edges.gather_at_targets(table) for table in self._angles(sides.v_HKBJ))
                difference = rotate_back(difference, *of_context)
            g = edges.collect(weights.flow(difference[:, None]) * valid_BP)
            u = u - step_size * (rotate_back(g, *angles) if self.rotation == "gradient" else g)
        return u

    def _weights(
        self, edges: WindowedEdges | CompleteEdges, heads: slice, sides: _Sides, valid_BP: Tensor | float = 1.0
    ) -> EdgeWeights:
        """Return the edge weights R (Algorithm 3), divided by Σ_j (α + β) with ``step="bounded"``."""
        hidden_HTXM = F.gelu(edges.sums(sides.source_HXBN[..., edges.rows], sides.target_HXBJ))[:, None].flatten(-2)
        weights = self.edge_weights_of(hidden_HTXM, heads, (sides.u_HKBN.shape[2], edges.num_edges))
        if weights.norm_HBP is None:
            return weights
        degree_HBN = edges.collect(weights.norm_HBP * valid_BP)
        return weights.divide(edges.sums(degree_HBN, degree_HBN.new_zeros(sides.v_HKBJ.shape[-1])))

    def edge_weights(
        self, x_BND: Float[Tensor, "B N D"], context_BJD: Float[Tensor, "B J D"]
    ) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " E"], Float[Tensor, "B H E K K"]]:
        """Return ``source_E, target_E, R_BHEKK``: R_ij in `forward` from source position i to context position j."""
        require_context(x_BND, context_BJD)
        num_positions, num_context = x_BND.shape[1], context_BJD.shape[1]
        windowed = isinstance(self._blocks(x_BND, context_BJD, self.heads)[0], WindowedEdges)
        edges = (
            WindowedEdges(self.config.window, num_positions)
            if windowed
            else CompleteEdges(0, num_positions, num_context)
        )
        r_BHEKK = self._weights(edges, slice(None), self._sides(x_BND, context_BJD)).dense(
            self.source.out_features // self.heads
        )
        number_E = edges.sums(
            torch.arange(num_positions, device=x_BND.device) * num_context,
            torch.arange(num_context, device=x_BND.device),
        )
        return number_E // num_context, number_E % num_context, r_BHEKK


def _or_all(mask_BN: Tensor | None, x_BND: Tensor) -> Tensor:
    return torch.ones(x_BND.shape[:2], dtype=torch.bool, device=x_BND.device) if mask_BN is None else mask_BN


EXPORT = CrossConsensus


class WindowedEdges:
    """Edges i → j for |i − j| ≤ w, j = i included, with equal lengths (Eq. 38).

    They are computed per offset, with slices only.
    """

    def __init__(self, window: int, num_positions: int):
        reach = min(window, num_positions - 1)
        self.rows = slice(0, num_positions)
        self.sources, self.targets = (
            [slice(max(0, sign * offset), num_positions + min(0, sign * offset)) for offset in range(-reach, reach + 1)]
            for sign in (-1, 1)
        )
        self.lengths = [source.stop - source.start for source in self.sources]
        self.num_edges = sum(self.lengths)

    def sums(self, at_rows: Tensor, at_context: Tensor) -> Tensor:
        """Return at_rows + at_context for each edge, (…, P)."""
        return torch.cat(
            [at_rows[..., i] + at_context[..., j] for i, j in zip(self.sources, self.targets, strict=True)], -1
        )

    def gather_at_targets(self, at_context: Tensor) -> Tensor:
        """Return the context's value at each edge's target, (…, P)."""
        return torch.cat([at_context[..., j] for j in self.targets], -1)

    def collect(self, flow: Tensor) -> Tensor:
        """Return the sum over each row's edges, (…, N)."""
        flows = zip(self.sources, flow.split(self.lengths, -1), strict=True)
        return torch.stack([F.pad(part, (i.start, self.rows.stop - i.stop)) for i, part in flows]).sum(0)


class CompleteEdges:
    """All edges i → j from source positions ``first`` … ``last`` − 1 to ``num_context`` entries."""

    def __init__(self, first: int, last: int, num_context: int):
        self.rows, self.num_context = slice(first, last), num_context
        self.num_rows = last - first
        self.num_edges = self.num_rows * num_context

    def sums(self, at_rows: Tensor, at_context: Tensor) -> Tensor:
        """Return at_rows + at_context for each edge, (…, P)."""
        return (at_rows[..., None] + at_context[..., None, :]).flatten(-2)

    def gather_at_targets(self, at_context: Tensor) -> Tensor:
        """Return the context's value at each edge's target, (…, P)."""
        return at_context[..., None, :].expand(*at_context.shape[:-1], self.num_rows, -1).flatten(-2)

    def collect(self, flow: Tensor) -> Tensor:
        """Return the sum over each row's edges, (…, last − first)."""
        return flow.unflatten(-1, (self.num_rows, self.num_context)).sum(-1)
