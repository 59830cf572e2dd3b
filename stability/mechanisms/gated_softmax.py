"""`gated_softmax`: softmax attention with an output gate from each position's input.

From Qiu et al. 2025, arXiv:2505.06708.
"""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape
from stability.mechanisms.sa import SoftmaxAttention
from stability.models.passes import at_least_float32


class GatedSoftmaxAttention(SoftmaxAttention):
    """Attention as in `sa` with a sigmoid gate before the output projection.

    y = W_o (SDPA(q, k, v) ⊙ σ(W_g x + b_g)) + b_o (section 2.2, at position G1, with head-specific gates). x is the
    layer's input, normed by the block. Elementwise, W_g is (D, D), one gate per entry per head. Headwise, W_g is (H,
    D), one gate per head. b_g starts at 0 under every initialisation, so that gates start near ½ and the branch about
    half as large as in `sa`. The paper's maps have no biases, as with ``model.mixer_bias=none``.
    """

    class Config(SoftmaxAttention.Config):
        """Setting for the gate, in addition to those of `sa`."""

        gate: Literal["elementwise", "headwise"] = Field(
            default="elementwise", description="a gate for each entry of each head, or one for each head"
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.gate = nn.Linear(shape.width, num_gates(config, shape))
        nn.init.zeros_(self.gate.bias)

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on gate biases: it would pull gates to half open."""
        return super().own_decay if self.gate.bias is None else {**super().own_decay, "gate.bias": False}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the gates' map in addition to `sa`.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        return super().cost(config, shape, num_positions) + num_positions * shape.width * num_gates(config, shape)

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the heads' outputs, gated by x, through W_o."""
        gate_BHNK = at_least_float32(self.gate(x_BND)).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return super().joined(y_BHNK * gate_BHNK, x_BND)


def num_gates(config: Any, shape: MixerShape) -> int:
    """Return the number of gates per position."""
    return shape.heads if config.gate == "headwise" else shape.width


EXPORT = GatedSoftmaxAttention
