"""`mlp`: two linear maps with an activation between."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.identity import Since
from stability.ffns import ACTIVATIONS, AbstractFeedForward


class MultilayerPerceptron(AbstractFeedForward):
    """Perceptron with one hidden layer, y = W_o a(W_h x + b_h) + b_o.

    The hidden width is multiple·D, rounded to the nearest integer, at least 1.
    """

    activated = "hidden"

    class Config(Settings):
        """Settings for the hidden layer."""

        activation: Annotated[Literal["gelu", "silu", "relu2", "relu", "gelu_tanh"], Since("gelu")] = Field(
            default="gelu",
            description="what stands between the two maps; relu2: the square of relu; gelu_tanh: gelu by a tanh",
        )
        multiple: Annotated[float | None, Since(None)] = Field(
            default=None, gt=0, le=1024, description="hidden width as a multiple of d; null: model.ffn_multiple"
        )
        bias: Annotated[bool, Since(True)] = Field(default=True, description="whether both maps add a bias")

    def __init__(self, config: Config, width: int, multiple: float):
        super().__init__()
        hidden = max(1, round(width * (multiple if config.multiple is None else config.multiple)))
        self.activation = ACTIVATIONS[config.activation]
        self.hidden = nn.Linear(width, hidden, bias=config.bias)
        self.out = nn.Linear(hidden, width, bias=config.bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.out(self.dropped(self.activation(self.hidden(x_BND))))


EXPORT = MultilayerPerceptron
