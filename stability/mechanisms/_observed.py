"""Define what a mechanism lets probes see: the weights by which attention mixes values, the edges along which consensus
works.

A probe asks with ``isinstance`` for the class that says what it needs, and names the layers of which it does not know
what they hold. The mechanisms' contract (tests/mechanisms/checks.py) rebuilds `forward` from what is exposed here, and
holds what `AbstractSoftmaxAttention` says beside it, which `forward` leaves open. By the class's word alone stand the
units of values where `joined` is its own, and of η and R, of which `forward` shows the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Int64
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, AbstractMechanism, MixerShape
from stability.models.position import Rope


class AbstractAttention(AbstractMechanism):
    """A mechanism whose heads weigh values v by a matrix A: y = `joined`(`mixed`(A, v), x), by default W_o Av + b_o.

    ``rows_sum_to_one``: whether A averages, as a softmax does: each row sums to 1, or is zero where a position sees
    nothing. False where weights may be any numbers (sigmoid, linear attention).

    ``maps_per_head``: how many attentions each head has, each with weights and values of its own; they stand one after
    the other on the axis of heads, all heads of the first before all of the second.
    """

    rows_sum_to_one: ClassVar[bool]
    maps_per_head: ClassVar[int] = 1
    out: nn.Linear

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Count a key and a value for each of `num_kept`; None where not causal."""
        if shape.direction != CAUSAL:
            return None
        return 2 * shape.head_width * cls.num_kept(config, shape, num_positions)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return of how many pairs of a position and a head key and value are kept once ``num_positions`` are read: of
        those that later positions may see, however long the sequence becomes. Every one, unless a mechanism sees
        less."""
        return shape.heads * num_positions

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        """Return A (B, H, N, N), where A_ij is what value j counts for position i: 0 where i does not see j, and where
        ``mask_BN`` is False at j."""
        raise NotImplementedError

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        """Return the values v, one per position and head."""
        raise NotImplementedError

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        """Return what each head makes of its weights and values, (…, N, K): Av, unless a mechanism says otherwise."""
        return a_BHNN @ v_BHNK

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the layer's output from what its heads made: side by side, through W_o. A gated mechanism reads x,
        too."""
        return self.out(y_BHNK.transpose(1, 2).flatten(2))


class AbstractConsensus(AbstractMechanism):
    """A mechanism whose heads move a signal along a graph's edges: y = W_o u′ + b_o, where u = W_s x + b_s becomes u′.

    For each η of `step_sizes` in turn u ← u − η·g(u), with g_i = Σ_j R_ij δ_ij − Σ_k R_ki δ_ki over the directed edges
    of `edge_weights` that leave i (i → j) and that enter it (k → i).

    ``rotation``: the disagreement δ_ij. "none": u_i − u_j; "absolute": ũ_i − ũ_j, each rotated by its position;
    "gradient": the same, and the step goes along ρ(i)ᵀg_i in place of g_i; "relative": ρ(i − j)u_i − u_j. ``rope``: the
    rotation ρ.
    """

    heads: int
    source: nn.Linear
    out: nn.Linear
    rotation: str
    rope: Rope = Rope()

    def edge_weights(
        self,
        x_BND: Tensor,
    ) -> tuple[Int64[Tensor, " E"], Int64[Tensor, " E"], Float[Tensor, "B H E K K"]]:
        """Return ``source_E, target_E, R_BHEKK``: the R_ij that `forward` uses on the edges i = source → j = target.

        Errors: ``ValueError`` where there are no edges.
        """
        raise NotImplementedError

    def step_sizes(self) -> Sequence[float | Tensor]:
        """Return η of each step, in turn."""
        raise NotImplementedError
