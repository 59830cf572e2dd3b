"""Quantities that mechanisms expose to probes: attention weights, consensus edges.

A probe tests with ``isinstance`` for the class with the quantities it needs, and lists the layers it cannot interpret.
The contract test (tests/mechanisms/checks.py) rebuilds `forward` from these quantities. It also checks the claims of
`AbstractSoftmaxAttention`, which `forward` leaves open. Two claims remain unchecked: the units of values if `joined` is
overridden, and η and R separately, since `forward` shows their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Int64
from torch import Tensor, nn

from stability.mechanisms._base import CAUSAL, AbstractMechanism, MixerShape
from stability.models.position import Rope


class AbstractAttention(AbstractMechanism):
    """A mechanism with one attention matrix A per head, applied to values v.

    y = `joined`(`mixed`(A, v), x), by default W_o Av + b_o.

    Attributes:
        rows_sum_to_one: True if A averages, like a softmax: each row sums to 1, or is zero if nothing is visible. False
            if weights are arbitrary (sigmoid, linear attention).
        maps_per_head: number of attention maps per head, each with its own weights and values. They share the axis of
            heads: all heads for the first map, then all for the second.
    """

    rows_sum_to_one: ClassVar[bool]
    maps_per_head: ClassVar[int] = 1
    out: nn.Linear

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Count one key and one value per entry of `num_kept`; None if not causal.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        if shape.direction != CAUSAL:
            return None
        return 2 * shape.head_width * cls.num_kept(config, shape, num_positions)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the number of stored key-value pairs, over all heads.

        These are the pairs visible to later positions, for any final sequence length. By default all.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        return shape.heads * num_positions

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        """Return A (B, H, N, N), with A_ij the weight of value j at position i.

        It is 0 if j is not visible to i, or ``mask_BN`` is False at j.
        """
        raise NotImplementedError

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        """Return the values v, one per position and head."""
        raise NotImplementedError

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        """Return each head's result from its weights and values, (…, N, K), by default Av."""
        return a_BHNN @ v_BHNK

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the layer's output: heads concatenated, through W_o.

        Gated mechanisms also use x.
        """
        return self.out(y_BHNK.transpose(1, 2).flatten(2))


class AbstractConsensus(AbstractMechanism):
    """A mechanism that moves each head's signal along a graph's edges.

    y = W_o u′ + b_o, with u = W_s x + b_s updated to u′. For each η in `step_sizes` u ← u − η·g(u), with g_i = Σ_j R_ij
    δ_ij − Σ_k R_ki δ_ki over the directed out-edges i → j and in-edges k → i in `edge_weights`.

    Attributes:
        rotation: form of the disagreement δ_ij. "none": u_i − u_j. "absolute": ũ_i − ũ_j, each rotated by its position.
            "gradient": the same, with step direction ρ(i)ᵀg_i instead of g_i. "relative": ρ(i − j)u_i − u_j.
        rope: the rotation ρ.
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
        """Return ``source_E, target_E, R_BHEKK``: R_ij in `forward` on the edges i = source → j = target.

        Raises:
            ValueError: no edges.
        """
        raise NotImplementedError

    def step_sizes(self) -> Sequence[float | Tensor]:
        """Return η per step, in order."""
        raise NotImplementedError
