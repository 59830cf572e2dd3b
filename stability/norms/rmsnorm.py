"""`rmsnorm`: root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from stability.config import Settings
from stability.config.identity import Since
from stability.norms import AbstractNorm


class RMSNorm(nn.RMSNorm, AbstractNorm):
    """Norm by the root mean square over the last axis.

    y = γ ⊙ x / √(mean x² + ε). γ starts at 1.
    """

    class Config(Settings):
        """Settings of the mean square."""

        epsilon: Annotated[float, Since(1e-5)] = Field(default=1e-5, gt=0, description="ε, added to the mean square")

    def __init__(self, config: Config, width: int):
        super().__init__(width, eps=config.epsilon)


EXPORT = RMSNorm
