"""Base of the norms.

A norm precedes each branch and the head, and scales their inputs to one size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings


class AbstractNorm(nn.Module):
    """Base of every norm over the last axis, (…, D) → (…, D).

    A subclass is constructed as ``cls(config, width)`` with its own settings and the model's width D.
    """

    family: ClassVar[str] = "norms"
    Config: ClassVar[type[Settings]]

    @classmethod
    def build(cls, config: Any, width: int) -> AbstractNorm:
        return cls(config, width)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError
