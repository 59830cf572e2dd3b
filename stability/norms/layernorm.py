"""`layernorm`: layer normalisation (Ba et al. 2016)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from stability.config import Settings
from stability.config.identity import Since
from stability.norms import AbstractNorm


class LayerNorm(nn.LayerNorm, AbstractNorm):
    """Norm by mean and variance over the last axis.

    y = γ ⊙ (x − mean x) / √(var x + ε) + β, var with divisor D. γ starts at 1, β at 0.
    """

    class Config(Settings):
        """Settings of the variance and of β."""

        epsilon: Annotated[float, Since(1e-5)] = Field(default=1e-5, gt=0, description="ε, added to the variance")
        bias: Annotated[bool, Since(True)] = Field(default=True, description="whether β is added after the gain γ")

    def __init__(self, config: Config, width: int):
        super().__init__(width, eps=config.epsilon, bias=config.bias)


EXPORT = LayerNorm
