"""`gated_softmax`: softmax attention whose output is gated by what stands at each position (Qiu et al. 2025,
arXiv:2505.06708)."""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape
from stability.mechanisms.sa import SoftmaxAttention
from stability.models.precision import at_least_float32


class GatedSoftmaxAttention(SoftmaxAttention):
    """The attention of `sa` with a sigmoid gate before its output map: y = W_o (SDPA(q, k, v) ⊙ σ(W_g x + b_g)) + b_o
    (section 2.2, at the position G1, with gates of each head's own).

    x is what the layer reads, normed by the block. Elementwise, W_g is (D, D) and each entry of each head has a gate;
    headwise it is (H, D), with one gate per head. b_g begins at 0 under every initialisation, so that the gates begin
    about ½ and the branch about half as large as that of `sa`; the paper's maps have no biases, as with
    ``model.mixer_bias=none``.
    """

    class Config(SoftmaxAttention.Config):
        """Settings of the gate, beside those of `sa`."""

        gate: Literal["elementwise", "headwise"] = Field(
            default="elementwise", description="a gate for each entry of each head, or one for each head"
        )

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape)
        self.gate = nn.Linear(shape.width, num_gates(config, shape))
        nn.init.zeros_(self.gate.bias)

    @property
    def own_decay(self) -> dict[str, bool]:
        """The gates' biases are kept from weight decay, which would draw them to half open."""
        return super().own_decay if self.gate.bias is None else {**super().own_decay, "gate.bias": False}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the gates' map beside what `sa` does."""
        return super().cost(config, shape, num_positions) + num_positions * shape.width * num_gates(config, shape)

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return what the heads attended to, gated by x, through W_o."""
        gate_BHNK = at_least_float32(self.gate(x_BND)).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return super().joined(y_BHNK * gate_BHNK, x_BND)


def num_gates(config: Any, shape: MixerShape) -> int:
    """Return how many gates a position has."""
    return shape.heads if config.gate == "headwise" else shape.width


EXPORT = GatedSoftmaxAttention
