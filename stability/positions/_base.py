"""A position scheme says how a model tells positions apart: by rotations within its mixers, by what is added to the
embedding, or not at all."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from stability.config import Settings
from stability.models.position import Rope


class AbstractPosition:
    """Base of every position scheme. ``adds``: whether it adds vectors of its own to the embedding."""

    family: ClassVar[str] = "positions"
    Config: ClassVar[type[Settings]]
    adds: ClassVar[bool] = False

    @classmethod
    def rope(cls, config: Any) -> Rope | None:
        """Return the rotation that mixers apply to what they compare; None: they rotate nothing."""
        return None

    @classmethod
    def placed(cls, config: Any, embedding: nn.Module, width: int, num_positions: int) -> nn.Module:
        """Return what embeds inputs and says where each stands, (B, N, D) for N up to ``num_positions``: by default
        ``embedding`` itself. What is drawn comes from the global random state."""
        return embedding
