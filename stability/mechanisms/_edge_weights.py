"""Shared parts for self- and cross-consensus: edge MLPs (Algorithms 2 and 3), weights R, step sizes.

Axes in addition to the legend's: P, edges or unordered pairs per sequence; T, directions per entry in P (2 for
unordered pairs, 1 for directed edges). Features come first and edges last, so that reductions over features run over
long contiguous rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from stability.config.base import Settings
from stability.config.identity import Since
from stability.config.impl import Impl, Use
from stability.mechanisms._base import MixerShape
from stability.models.passes import autocast_dtype, rounds_products

LARGEST = {"window": 16, "rank": 16, "edge_hidden": 256, "heads of width": 128}  # of kernels.consensus


# the default is not "absolute", the paper's literal C.3: blind to order (facts 1, reports/consensus_readings.pdf)
RopeOfEdges = Annotated[
    Literal["absolute", "relative", "gradient", "none"],
    Field(
        description=(
            "whether disagreements are taken between rotated embeddings, each by its position or one by the "
            "distance (with position=rope); gradient: by position, and each flow is turned back"
        )
    ),
]

# readings of the consensus paper's C.3, for a report's first page
READINGS = {
    "gradient": "the energy of the rotated embeddings falls along its gradient, as C.3 says in words; by C.3's formula "
    "(rope=absolute) a text and its mirror image are hardly distinguished",
    "absolute": "C.3's formula to the letter",
    "relative": "disagreements are rotated by the distance, as in the authors' earlier code",
    "none": "nothing is rotated",
}


class ConsensusSettings(Settings):
    """Settings for edge MLP and step, shared by self- and cross-consensus."""

    window: int = Field(
        default=2, ge=1, description="w: positions on each side that share an edge with a position; cut at the ends"
    )
    rank: int = Field(
        default=4,
        ge=0,
        le=2**16,
        description="r: rows of Λ, the rank of an edge's anisotropic part; 0: scalar weights, R = α I",
    )
    edge_hidden: int = Field(default=16, ge=1, le=2**20, description="ξ: hidden width of the edge MLP")
    # One η per iteration, not per position as in an earlier implementation: parameters per position would fix the
    # sequence length, and lengths vary here.
    step_size: float = Field(
        default=0.1,
        gt=0,
        description="η: step along the gradient of the disagreement energy; where a learned step starts",
    )
    step: Annotated[Literal["fixed", "learned", "bounded"], Since("fixed", of=("sc",))] = Field(
        default="fixed",
        description=(
            "whether η stays at step_size, is learned, one for each iteration, or is step_size over a bound of the "
            "operator's largest eigenvalue"
        ),
    )
    iterations: Annotated[int, Since(1, of=("sc",))] = Field(
        default=1, ge=1, description="T: steps in a row, all with the edge weights of the layer's input"
    )
    edge_mlp: Literal["shared", "separate"] = Field(
        default="shared", description="one first layer for α, β and Λ, or one for each"
    )
    # At 1 all edges start nearly equal and the update is a plain blur. Quickstart's sc with rope=absolute: 3.21 nats
    # with 1, 3.12 with 4 (two seeds). The flagship's with rope=gradient: 2.547 with either (three seeds; facts 1).
    edge_gain: float = Field(
        default=4.0, gt=0, description="first weights of the layers that α and β come from, over torch's default"
    )
    impl: Impl = "reference"


class EdgeWeights(NamedTuple):
    """R = α I + Σ_p gain_p Λ_pᵀ Λ_p with gain_p = β / (r‖Λ_p‖²).

    Attributes:
        alpha_HTBP: α.
        gain_HTRBP: gain; None at rank 0.
        lambda_HTRKBP: Λ before row normalisation; None at rank 0.
        norm_HBP: Σ_T (α + β), only with ``step="bounded"``. It bounds ‖Σ_T R‖, since ‖ΛᵀΛ‖ ≤ trace = 1 with rows of
            norm 1/√r.
    """

    alpha_HTBP: Tensor
    gain_HTRBP: Tensor | None
    lambda_HTRKBP: Tensor | None
    norm_HBP: Tensor | None = None

    def divide(self, bound_HBP: Tensor) -> EdgeWeights:
        """Return R divided by a bound per head, sequence and edge.

        Any axis may have size 1. A bound of 0, for a sequence without edges, counts as 1.
        """
        bound_HTBP = _nonzero(bound_HBP)[:, None]
        gain_HTRBP = None if self.gain_HTRBP is None else self.gain_HTRBP / bound_HTBP[:, :, None]
        return EdgeWeights(self.alpha_HTBP / bound_HTBP, gain_HTRBP, self.lambda_HTRKBP)

    def flow(self, difference_HTKBP: Tensor) -> Tensor:
        """Return Σ_T R·difference per entry of P.

        The difference is one per T, or one for all (T = 1). Λ is never normalised explicitly: its row norms are in the
        gain.
        """
        if difference_HTKBP.shape[1] == 1:
            isotropic_HKBP = self.alpha_HTBP.sum(1)[:, None] * difference_HTKBP[:, 0]
        else:
            isotropic_HKBP = (self.alpha_HTBP[:, :, None] * difference_HTKBP).sum(1)
        if self.gain_HTRBP is None or self.lambda_HTRKBP is None:
            return isotropic_HKBP
        along_HTRBP = (self.lambda_HTRKBP * difference_HTKBP[:, :, None]).sum(3)
        return isotropic_HKBP + ((self.gain_HTRBP * along_HTRBP)[:, :, :, None] * self.lambda_HTRKBP).sum((1, 2))

    def dense(self, head_width: int) -> Tensor:
        """Return R as matrices, (B, H, T·P, K, K)."""
        identity_KK = torch.eye(head_width, dtype=self.alpha_HTBP.dtype, device=self.alpha_HTBP.device)
        r_BHTPKK = self.alpha_HTBP.permute(2, 0, 1, 3)[..., None, None] * identity_KK
        if self.gain_HTRBP is not None and self.lambda_HTRKBP is not None:
            r_BHTPKK = r_BHTPKK + torch.einsum(
                "htrbp,htrkbp,htrlbp->bhtpkl", self.gain_HTRBP, self.lambda_HTRKBP, self.lambda_HTRKBP
            )
        return r_BHTPKK.flatten(2, 3)


class EdgeNetwork(nn.Module):
    """Parameters for the edges, one MLP per head; a mixin.

    They sit next to the projections, under the names in checkpoints.
    """

    config: Any
    heads: int
    kernels_second_order = True

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        """Return the first setting not supported by `kernels.consensus`, or None."""
        if mlps_of(config) > 1:
            return "edge_mlp=separate"
        if config.step == "bounded":
            return "step=bounded"
        sizes = {"rank": config.rank, "edge_hidden": config.edge_hidden, "heads of width": use.head_width}
        if config.graph != "complete":
            sizes["window"] = config.window
        over = (f"{name}={size} > {LARGEST[name]}" for name, size in sizes.items() if size > LARGEST[name])
        return next(over, None)

    def add_edge_parameters(self, config: ConsensusSettings, shape: MixerShape) -> None:
        """Create the parameters for the edge MLPs (Algorithms 2 and 3) and learned step sizes."""
        self.config, self.heads = config, shape.heads
        hidden, head_width, num_mlps, num_scalars = (
            config.edge_hidden,
            shape.head_width,
            mlps_of(config),
            2 if config.rank else 1,
        )
        # (H, 2, ξ, d_H): [:, 0] acts on the source's and [:, 1] on the target's embedding; the MLPs for α, β, Λ are
        # concatenated along ξ
        self.pair_weight = _uniform(
            2 * head_width, shape.heads, 2, num_mlps * hidden, head_width, gain=config.edge_gain
        )
        self.pair_bias = _uniform(2 * head_width, shape.heads, num_mlps * hidden)
        # (H, 2, ξ): α, β; without anisotropic part (rank 0) α alone
        self.scalar_weight = _uniform(hidden, shape.heads, num_scalars, hidden, gain=config.edge_gain)
        self.scalar_bias = _uniform(hidden, shape.heads, num_scalars)
        if config.rank:
            self.lambda_weight = _uniform(hidden, shape.heads, config.rank * head_width, hidden)
            self.lambda_bias = _uniform(hidden, shape.heads, config.rank * head_width)
        if config.step == "learned":
            # log(e^step − 1) without overflow
            self.step_before_softplus = nn.Parameter(
                torch.full((config.iterations,), config.step_size + math.log(-math.expm1(-config.step_size)))
            )

    def project_heads(self, projection: nn.Linear, x_BND: Tensor) -> Tensor:
        """Split the projected signal into heads, (H, K, B, N)."""
        u_DM = projection.weight @ x_BND.flatten(0, 1).t()
        if projection.bias is not None:
            u_DM = u_DM + projection.bias[:, None]
        return u_DM.unflatten(0, (self.heads, -1)).unflatten(-1, x_BND.shape[:2])

    def join_heads(self, projection: nn.Linear, u_HKBN: Tensor) -> Tensor:
        """Join the heads side by side and project them, (B, N, D)."""
        y_MD = F.linear(u_HKBN.flatten(0, 1).flatten(1).t(), projection.weight, projection.bias)
        return y_MD.unflatten(0, u_HKBN.shape[2:])

    def step_sizes(self) -> Sequence[float | Tensor]:
        """Return η per iteration."""
        if self.config.step == "learned":
            return F.softplus(self.step_before_softplus).unbind()
        return (self.config.step_size,) * self.config.iterations

    def heads_in_turn(self, device: torch.device) -> list[slice]:
        """Return the slices of heads computed at once: one head on a CPU, all elsewhere."""
        # on a CPU one head's Λ stays in the cache (measured: a fifth faster in the larger benchmark)
        at_once = 1 if device.type == "cpu" else self.heads
        return [slice(head, head + at_once) for head in range(0, self.heads, at_once)]

    def compute_end_terms(self, x_BND: Tensor, ends: slice = slice(None)) -> list[Tensor]:
        """Return each node's first-layer terms as edge source and as target, (H, X, B, N) each.

        ``ends`` selects one of the two. The layer is linear in [y_i; y_j]: two products per node, one sum per edge.
        """
        x_H1KM = x_BND.flatten(0, 1).t().unflatten(0, (self.heads, 1, -1))
        node_HTXM = self.pair_weight[:, ends] @ x_H1KM
        biased = (
            [node_HTXM[:, 0] + self.pair_bias[..., None], *node_HTXM[:, 1:].unbind(1)]
            if not ends.start
            else node_HTXM.unbind(1)
        )
        return [node_HXM.unflatten(-1, x_BND.shape[:2]) for node_HXM in biased]

    def list_kernel_arguments(self) -> tuple[Tensor | None, ...]:
        """Return the edge MLPs' second layers in the argument order of `kernels.consensus`."""
        of_lambda = (self.lambda_weight, self.lambda_bias) if self.config.rank else (None, None)
        return self.scalar_weight, self.scalar_bias, *of_lambda

    def edge_weights_of(self, hidden_HTXM: Tensor, heads: slice, batch_and_edges: tuple[int, int]) -> EdgeWeights:
        """Return R from the first layers' activations (Algorithm 2, Eq. 36).

        Args:
            hidden_HTXM: activations.
            heads: slice over heads.
            batch_and_edges: (B, P).
        """
        scalars_HTSM = F.softplus(self._scalars(hidden_HTXM, heads))
        alpha_HTBP = scalars_HTSM[:, :, 0].unflatten(-1, batch_and_edges)
        is_bounded = self.config.step == "bounded"
        norm_HBP = scalars_HTSM.sum((1, 2)).unflatten(-1, batch_and_edges) if is_bounded else None
        if not self.config.rank:
            return EdgeWeights(alpha_HTBP, None, None, norm_HBP)
        of_lambda_HTXM = hidden_HTXM[:, :, -self.config.edge_hidden :]
        lambda_HTYM = self.lambda_weight[heads, None] @ of_lambda_HTXM + self.lambda_bias[heads, None, :, None]
        lambda_HTRKM = lambda_HTYM.unflatten(2, (self.config.rank, -1))
        gain_HTRM = scalars_HTSM[:, :, 1][:, :, None] / (
            self.config.rank * _nonzero((lambda_HTRKM * lambda_HTRKM).sum(3))
        )
        return EdgeWeights(
            alpha_HTBP,
            gain_HTRM.unflatten(-1, batch_and_edges),
            lambda_HTRKM.unflatten(-1, batch_and_edges),
            norm_HBP,
        )

    def flows_once(self) -> bool:
        """Return whether `flow_once` supports the settings."""
        config = self.config
        return bool(config.rank) and mlps_of(config) == config.iterations == 1 and config.step != "bounded"

    def flow_once(self, hidden_HTXM: Tensor, difference_H1KBP: Tensor) -> Tensor:
        """Return `EdgeWeights.flow` of all heads, (H, K, B, P), without second derivatives.

        Args:
            hidden_HTXM: activations.
            difference_H1KBP: disagreement, one for both directions.
        """
        difference_HKM = difference_H1KBP[:, 0].flatten(-2)
        # By head: torch rounds the last few numbers of a tensor's softplus otherwise than the others.
        scalars_HTSM = torch.cat([F.softplus(part) for part in self._scalars(hidden_HTXM, slice(None)).split(1)])
        lambda_HTRKM, squares_HTRM, along_HTRM = Rows.apply(
            hidden_HTXM, self.lambda_weight, self.lambda_bias, difference_HKM, self.config.rank
        )
        gain_HTRM = scalars_HTSM[:, :, 1][:, :, None] / (self.config.rank * _nonzero(squares_HTRM))
        isotropic_HKM = scalars_HTSM[:, :, 0].sum(1)[:, None] * difference_HKM
        flow_HKM = isotropic_HKM + Combination.apply(gain_HTRM * along_HTRM, lambda_HTRKM)
        return flow_HKM.unflatten(-1, difference_H1KBP.shape[-2:])

    def _scalars(self, hidden_HTXM: Tensor, heads: slice) -> Tensor:
        """Return α and β before softplus, (H, T, 2, B·P); only α at rank 0."""
        weight, bias = self.scalar_weight[heads, None], self.scalar_bias[heads, None, :, None]
        if mlps_of(self.config) == 1:
            return weight @ hidden_HTXM + bias
        of_alpha, of_beta, _ = hidden_HTXM.chunk(3, 2)
        return torch.cat([weight[:, :, :1] @ of_alpha, weight[:, :, 1:] @ of_beta], 2) + bias


class Rows(torch.autograd.Function):
    """Λ with its rows' squared norms and their products with the edges' disagreement.

    Λ is the one large tensor of a layer on a CPU. Autograd writes each of its products into new memory; this function
    and `Combination` write them into one tensor a head, which stays in the cache. The gradient
    by Λ must come from `Combination` alone, since it is overwritten.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_HTXM: Tensor, weight_HYX: Tensor, bias_HY: Tensor, difference_HKM: Tensor, rank: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Λ, (H, T, R, K, M), ‖Λ_r‖² and Λ_r·difference, (H, T, R, M) each.

        Args:
            ctx: autograd's context.
            hidden_HTXM: activations of the first layer.
            weight_HYX: second layer, Y = R·K.
            bias_HY: its bias.
            difference_HKM: disagreement, one for both directions.
            rank: R.
        """
        heads, directions, _, num = hidden_HTXM.shape
        lambda_HTYM = hidden_HTXM.new_empty(heads, directions, weight_HYX.shape[1], num)
        squares_HTRM, along_HTRM = hidden_HTXM.new_empty(2, heads, directions, rank, num)
        for head in range(heads):
            rows_TYM = lambda_HTYM[head]
            torch.bmm(weight_HYX[head].expand(directions, -1, -1), hidden_HTXM[head], out=rows_TYM)
            rows_TRKM = rows_TYM.add_(bias_HY[head][:, None]).unflatten(1, (rank, -1))
            product = rows_TRKM * rows_TRKM
            torch.sum(product, 2, out=squares_HTRM[head])
            torch.sum(torch.mul(rows_TRKM, difference_HKM[head], out=product), 2, out=along_HTRM[head])
        ctx.save_for_backward(hidden_HTXM, weight_HYX, lambda_HTYM, difference_HKM)
        return lambda_HTYM.unflatten(2, (rank, -1)), squares_HTRM, along_HTRM

    @staticmethod
    def backward(ctx: Any, to_lambda: Tensor, to_squares: Tensor, to_along: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by activations, weight, bias and disagreement; None for the rank.

        Args:
            ctx: autograd's context.
            to_lambda: gradient by Λ, overwritten.
            to_squares: gradient by the squared norms.
            to_along: gradient by the products with the disagreement.

        Raises:
            RuntimeError: a second derivative is taken.
        """
        _refuse_second_order()
        hidden_HTXM, weight_HYX, lambda_HTYM, difference_HKM = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden_HTXM), torch.empty_like(weight_HYX)
        to_bias, to_difference = weight_HYX.new_empty(weight_HYX.shape[:2]), torch.empty_like(difference_HKM)
        for head, rows_TYM in enumerate(lambda_HTYM):
            rows_TRKM = rows_TYM.unflatten(1, (to_squares.shape[2], -1))
            along_TR1M, squares_TR1M, sum_TRKM = (
                to_along[head][:, :, None],
                to_squares[head][:, :, None],
                to_lambda[head],
            )
            product = along_TR1M * rows_TRKM
            torch.sum(product, (0, 1), out=to_difference[head])
            sum_TRKM += torch.mul(along_TR1M, difference_HKM[head], out=product)
            torch.mul(squares_TR1M, rows_TRKM, out=product)
            sum_TRKM += product  # twice, as autograd adds the two factors of Λ·Λ
            sum_TRKM += product
            sum_TYM = sum_TRKM.flatten(1, 2)
            torch.sum(sum_TYM, (0, 2), out=to_bias[head])
            torch.sum(torch.bmm(sum_TYM, hidden_HTXM[head].mT), 0, out=to_weight[head])
            torch.bmm(weight_HYX[head].mT.expand(len(sum_TYM), -1, -1), sum_TYM, out=to_hidden[head])
        return to_hidden, to_weight, to_bias, to_difference, None


class Combination(torch.autograd.Function):
    """Σ_r factor_r Λ_r per edge, summed over both directions."""

    @staticmethod
    def forward(ctx: Any, factor_HTRM: Tensor, lambda_HTRKM: Tensor) -> Tensor:
        """Return the sum, (H, K, M).

        Args:
            ctx: autograd's context.
            factor_HTRM: a factor for each row of Λ.
            lambda_HTRKM: Λ.
        """
        ctx.save_for_backward(factor_HTRM, lambda_HTRKM)
        heads, *_, head_width, num = lambda_HTRKM.shape
        sum_HKM, product = factor_HTRM.new_empty(heads, head_width, num), torch.empty_like(lambda_HTRKM[0])
        for head, rows_TRKM in enumerate(lambda_HTRKM):
            torch.sum(torch.mul(factor_HTRM[head][:, :, None], rows_TRKM, out=product), (0, 1), out=sum_HKM[head])
        return sum_HKM

    @staticmethod
    def backward(ctx: Any, to_sum: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_second_order()
        factor_HTRM, lambda_HTRKM = ctx.saved_tensors
        to_factor, to_lambda = torch.empty_like(factor_HTRM), torch.empty_like(lambda_HTRKM)
        product = torch.empty_like(lambda_HTRKM[0])
        for head, rows_TRKM in enumerate(lambda_HTRKM):
            torch.sum(torch.mul(to_sum[head], rows_TRKM, out=product), 2, out=to_factor[head])
            torch.mul(to_sum[head], factor_HTRM[head][:, :, None], out=to_lambda[head])
        return to_factor, to_lambda


def _refuse_second_order() -> None:
    # `once_differentiable` would not: a second derivative by autograd.grad would leave these functions out.
    if torch.is_grad_enabled():
        raise RuntimeError("a pass within differentiated_once() has no second derivative")


def precision_on(device: torch.device) -> str:
    """Return the precision for kernels' products on a device, same as torch's."""
    if autocast_dtype(device) is not None:
        return "bf16"
    return "tf32" if rounds_products(device) else "ieee"


def mlps_of(config: ConsensusSettings) -> int:
    """Return the number of first layers in the edge MLP: 1 or 3.

    At rank 0 there is only α, and so 1.
    """
    return 3 if config.edge_mlp == "separate" and config.rank else 1


def cost_per_edge(config: ConsensusSettings, shape: MixerShape) -> float:
    """Return the multiply-adds per directed edge over all heads.

    α, β and Λ with its row norms count once, R·(u_i − u_j) in each iteration.
    """
    of_lambda = config.rank * shape.head_width
    once = (2 if config.rank else 1) * config.edge_hidden + of_lambda * (config.edge_hidden + 1)
    return float(shape.heads * (once + config.iterations * (2 * of_lambda + shape.head_width)))


def _nonzero(squares: Tensor) -> Tensor:
    """Return the squared norms, with 1 for zero rows, left unchanged by Eq. 36."""
    # values so small that 1/square³, a factor in second derivatives, overflows count as zero
    return torch.where(squares > torch.finfo(squares.dtype).tiny ** (1 / 3), squares, 1.0)


def _uniform(fan_in: int, *shape: int, gain: float = 1.0) -> nn.Parameter:
    """Draw torch's initialisation for a linear layer, times ``gain``."""
    bound = gain * fan_in**-0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
