"""`sc`: multi-head self-consensus on the window-path graph (consensus paper, Algorithms 1, 2 and 5).

Axes of this file beside the legend's: P the unordered pairs {i, j}, i < j, of one sequence, offset by offset; T their two directed edges
(0: i → j, 1: j → i). Inside, features lead and positions come last: shifting along a sequence is then a slice, and every reduction over
features runs over long contiguous rows. Both edges of a pair share the disagreement u_i − u_j, and the update moves its ends oppositely.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._base import BIDIRECTIONAL, AbstractMechanism, MixerShape
from stability.models.position import rope


class SelfConsensus(AbstractMechanism):
    """y_out = W_o u′ + b_o with u = W_s y + b_s, u′ = u − η·g and g_i = Σ_j R_ij(u_i − u_j) − Σ_k R_ki(u_k − u_i), per head.

    R_ij = α I + β Λᵀ Λ is positive definite; α, β > 0 and Λ (r × d_H, rows of norm 1/√r) come from an MLP of [y_i; y_j].
    With ``rope="absolute"`` the disagreements in g are those of the rotated ũ (C.3, read literally: u′ = u − η·g(ũ)).
    """

    class Config(Settings):
        """Graph, edge MLP and step."""

        window: int = Field(default=2, ge=1, description="w: positions on each side that share an edge with a position")
        rank: int = Field(default=4, ge=1, description="r: rows of Λ, the rank of an edge's anisotropic part")
        edge_hidden: int = Field(default=16, ge=1, description="ξ: hidden width of the edge MLP")
        step_size: float = Field(default=0.1, gt=0, description="η: step along the gradient of the disagreement energy")
        rope: Literal["absolute", "none"] = Field(default="absolute", description="whether disagreements are taken between rotated embeddings")
        edge_mlp: Literal["shared", "separate"] = Field(default="shared", description="one first layer for α, β and Λ, or one for each")
        # At 1 all edges start nearly equal and the update is a plain blur: the quickstart's sc then ends at 3.21 nats, at 4 at 3.12 (two seeds).
        edge_gain: float = Field(default=4.0, gt=0, description="first weights of the layers that α and β come from, over torch's default")

    directions = frozenset({BIDIRECTIONAL})

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        self.config, self.heads = config, shape.heads
        hidden, rank, head_width = config.edge_hidden, config.rank, shape.head_width
        num_mlps = 3 if config.edge_mlp == "separate" else 1
        self.source = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        # (H, 2, ξ, d_H): [:, 0] acts on y_i and [:, 1] on y_j of the edge i → j; the MLPs for α, β, Λ follow one another along ξ
        self.pair_weight = _uniform(2 * head_width, shape.heads, 2, num_mlps * hidden, head_width, gain=config.edge_gain)
        self.pair_bias = _uniform(2 * head_width, shape.heads, num_mlps * hidden)
        # (H, 2, ξ): α, β
        self.scalar_weight = _uniform(hidden, shape.heads, 2, hidden, gain=config.edge_gain)
        self.scalar_bias = _uniform(hidden, shape.heads, 2)
        self.lambda_weight = _uniform(hidden, shape.heads, rank * head_width, hidden)
        self.lambda_bias = _uniform(hidden, shape.heads, rank * head_width)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        edges = 2 * sum(num_positions - offset for offset in _offsets(config.window, num_positions))
        per_node = 2 * shape.width**2 + 2 * shape.width * config.edge_hidden * (3 if config.edge_mlp == "separate" else 1)
        # per edge and head: α and β; Λ; the norm of its rows, Λ(u_i − u_j) and Λᵀ of that; α times the disagreement
        per_edge = shape.heads * (2 * config.edge_hidden + config.rank * shape.head_width * (config.edge_hidden + 3) + shape.head_width)
        return float(num_positions * per_node + edges * per_edge)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B N D"]:
        """Padding: an edge with a padded end contributes nothing."""
        if mask_BN is not None:  # a factor of zero does not silence a NaN
            x_BND = torch.where(mask_BN[..., None], x_BND, 0.0)
        u_DM = self.source.weight @ x_BND.flatten(0, 1).t() + self.source.bias[:, None]
        u_HKBN = u_DM.unflatten(0, (self.heads, -1)).unflatten(-1, x_BND.shape[:2])
        if offsets := _offsets(self.config.window, x_BND.shape[1]):
            u_HKBN = u_HKBN - self.config.step_size * self._gradient(x_BND, u_HKBN, mask_BN, offsets)
        y_MD = F.linear(u_HKBN.flatten(0, 1).flatten(1).t(), self.out.weight, self.out.bias)
        return y_MD.unflatten(0, x_BND.shape[:2])

    def _gradient(self, x_BND: Tensor, u_HKBN: Tensor, mask_BN: Tensor | None, offsets: range) -> Tensor:
        """g of Algorithm 5, line 12, as Σ over pairs of (R_ij + R_ji)(ũ_i − ũ_j), added at i and taken off at j."""
        turned_HKBN = rope(u_HKBN, position_dim=-1, width_dim=1) if self.config.rope == "absolute" else u_HKBN
        difference_HKBP = _on_pairs(turned_HKBN, -turned_HKBN, offsets)
        hidden_HTXM = self._hidden(x_BND, offsets)
        # On a CPU one head at a time: its Λ then stays in the cache (measured: a fifth faster in the larger benchmark). Elsewhere all at once.
        at_once = 1 if x_BND.device.type == "cpu" else self.heads
        slices = [slice(head, head + at_once) for head in range(0, self.heads, at_once)]
        flow_HKBP = torch.cat([self._flow(hidden_HTXM[heads], difference_HKBP[heads], heads) for heads in slices])
        if mask_BN is not None:
            flow_HKBP = flow_HKBP * torch.cat([mask_BN[:, :-offset] & mask_BN[:, offset:] for offset in offsets], -1)
        num_positions = x_BND.shape[1]
        flows = zip(offsets, flow_HKBP.split([num_positions - offset for offset in offsets], -1), strict=True)
        return torch.stack([F.pad(flow, (0, offset)) - F.pad(flow, (offset, 0)) for offset, flow in flows]).sum(0)

    def _flow(self, hidden_HTXM: Tensor, difference_HKBP: Tensor, heads: slice) -> Tensor:
        """(R_ij + R_ji)(ũ_i − ũ_j) for each pair, without ever writing a normalised Λ: its rows' norms are in the gain."""
        alpha_HTBP, gain_HTRBP, lambda_HTRKBP = self._weights(hidden_HTXM, heads, difference_HKBP.shape[2:])
        along_HTRBP = (lambda_HTRKBP * difference_HKBP[:, None, None]).sum(3)
        anisotropic_HKBP = ((gain_HTRBP * along_HTRBP)[:, :, :, None] * lambda_HTRKBP).sum((1, 2))
        return alpha_HTBP.sum(1)[:, None] * difference_HKBP + anisotropic_HKBP

    def _hidden(self, x_BND: Tensor, offsets: range) -> Tensor:
        """GELU(first layer) of every directed edge, (H, T, X, B·P). The layer is linear in [y_i; y_j]: two products per node, one sum per edge."""
        x_H1KM = x_BND.flatten(0, 1).t().unflatten(0, (self.heads, 1, -1))
        node_HTXM = self.pair_weight @ x_H1KM
        node_HTXM = torch.stack([node_HTXM[:, 0] + self.pair_bias[..., None], node_HTXM[:, 1]], 1)
        node_HTXBN = node_HTXM.unflatten(-1, x_BND.shape[:2])
        return F.gelu(_on_pairs(node_HTXBN, node_HTXBN.flip(1), offsets)).flatten(-2)

    def _weights(self, hidden_HTXM: Tensor, heads: slice, batch_and_pairs: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """α, gain and Λ before its rows are normalised: R = α I + Σ_p gain_p Λ_pᵀ Λ_p, gain_p = β / (r‖Λ_p‖²) (Algorithm 2, Eq. 36)."""
        alpha_HTM, beta_HTM = F.softplus(self._scalars(hidden_HTXM, heads)).unbind(2)
        of_lambda_HTXM = hidden_HTXM[:, :, -self.config.edge_hidden :]
        lambda_HTYM = self.lambda_weight[heads, None] @ of_lambda_HTXM + self.lambda_bias[heads, None, :, None]
        lambda_HTRKM = lambda_HTYM.unflatten(2, (self.config.rank, -1))
        gain_HTRM = beta_HTM[:, :, None] / (self.config.rank * _nonzero((lambda_HTRKM * lambda_HTRKM).sum(3)))
        return alpha_HTM.unflatten(-1, batch_and_pairs), gain_HTRM.unflatten(-1, batch_and_pairs), lambda_HTRKM.unflatten(-1, batch_and_pairs)

    def _scalars(self, hidden_HTXM: Tensor, heads: slice) -> Tensor:
        """α and β before their softplus, (H, T, 2, B·P)."""
        weight, bias = self.scalar_weight[heads, None], self.scalar_bias[heads, None, :, None]
        if self.config.edge_mlp == "shared":
            return weight @ hidden_HTXM + bias
        of_alpha, of_beta, _ = hidden_HTXM.chunk(3, 2)
        return torch.cat([weight[:, :, :1] @ of_alpha, weight[:, :, 1:] @ of_beta], 2) + bias

    def edge_weights(self, x_BND: Float[Tensor, "B N D"]) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " E"], Float[Tensor, "B H E K K"]]:
        """``source_E, target_E, R_BHEKK``: the R_ij that `forward` uses on the directed edges i = source → j = target of the graph."""
        num_positions = x_BND.shape[1]
        offsets = _offsets(self.config.window, num_positions)
        if not offsets:
            raise ValueError(f"a sequence of {num_positions} position has no edges; give at least 2")
        left_P = torch.cat([torch.arange(num_positions - offset, device=x_BND.device) for offset in offsets])
        right_P = torch.cat([torch.arange(offset, num_positions, device=x_BND.device) for offset in offsets])
        alpha_HTBP, gain_HTRBP, lambda_HTRKBP = self._weights(self._hidden(x_BND, offsets), slice(None), (len(x_BND), len(left_P)))
        identity_KK = torch.eye(lambda_HTRKBP.shape[3], dtype=x_BND.dtype, device=x_BND.device)
        anisotropic = torch.einsum("htrbp,htrkbp,htrlbp->bhtpkl", gain_HTRBP, lambda_HTRKBP, lambda_HTRKBP)
        r_BHTPKK = alpha_HTBP.permute(2, 0, 1, 3)[..., None, None] * identity_KK + anisotropic
        return torch.cat([left_P, right_P]), torch.cat([right_P, left_P]), r_BHTPKK.flatten(2, 3)


def _offsets(window: int, num_positions: int) -> range:
    """j − i of the pairs of the window-path graph (Definition 3.1)."""
    return range(1, min(window, num_positions - 1) + 1)


def _on_pairs(at_i: Tensor, at_j: Tensor, offsets: range) -> Tensor:
    """at_i + at_j for each pair {i, j = i + offset}: (…, N) → (…, P). Slices only; nothing is gathered."""
    return torch.cat([at_i[..., :-offset] + at_j[..., offset:] for offset in offsets], -1)


def _nonzero(squares: Tensor) -> Tensor:
    """The squared norms, 1 for a zero row, which Eq. 36 leaves as it is. Zero means: 1/square³ overflows; second derivatives hold that power."""
    return torch.where(squares > torch.finfo(squares.dtype).tiny ** (1 / 3), squares, 1.0)


def _uniform(fan_in: int, *shape: int, gain: float = 1.0) -> nn.Parameter:
    """torch's own initialisation of a linear layer, for weights and biases, times ``gain``."""
    bound = gain * fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


EXPORT = SelfConsensus
