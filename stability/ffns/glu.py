"""`glu`: gated linear unit: SwiGLU, GEGLU or ReGLU, by activation (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.ffns import ACTIVATIONS, AbstractFeedForward


class GatedLinearUnit(AbstractFeedForward):
    """Gated linear unit, y = W_o (a(W_g x + b_g) ⊙ (W_h x + b_h)) + b_o.

    This is Eq. 6, with optional biases. The hidden width is multiple·D, by default ⅔ of the model's multiple: three
    matrices then have as many weights as the two in an `mlp` (section 2). It is rounded to the nearest integer, at
    least 1.
    """

    activated = "gate"

    class Config(Settings):
        """Settings for gate and hidden width."""

        activation: Literal["silu", "gelu", "relu"] = Field(
            default="silu", description="activation of the gate; silu: SwiGLU, gelu: GEGLU, relu: ReGLU"
        )
        multiple: float | None = Field(
            default=None,
            gt=0,
            le=1024,
            description="hidden width as a multiple of d; null: ⅔ of model.ffn_multiple, for as many weights as mlp",
        )
        bias: bool = Field(default=False, description="whether the three maps add a bias; the paper's have none")

    def __init__(self, config: Config, width: int, multiple: float):
        super().__init__()
        hidden = max(1, round(width * (multiple * 2 / 3 if config.multiple is None else config.multiple)))
        self.activation = ACTIVATIONS[config.activation]
        self.gate = nn.Linear(width, hidden, bias=config.bias)
        self.hidden = nn.Linear(width, hidden, bias=config.bias)
        self.out = nn.Linear(hidden, width, bias=config.bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.out(self.dropped(self.activation(self.gate(x_BND)) * self.hidden(x_BND)))


EXPORT = GatedLinearUnit
