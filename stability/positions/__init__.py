"""Position schemes, one file each."""

from typing import Any, ClassVar

from torch import nn

from stability.config import Settings
from stability.models.position import Decays, Rope

__all__ = ["AbstractPosition"]


class AbstractPosition:
    """Base class for every position scheme.

    Attributes:
        adds: whether it adds its own vectors to the embedding.
        is_bounded: whether no sequence may be longer than those of training.
    """

    family: ClassVar[str] = "positions"
    Config: ClassVar[type[Settings]]
    adds: ClassVar[bool] = False
    is_bounded: ClassVar[bool] = False

    @classmethod
    def rope(cls, config: Any) -> Rope | None:
        """Return the rotation for mixers, or None."""
        return None

    @classmethod
    def decays(cls, config: Any) -> Decays | None:
        """Return the decays of logits in mixers, or None; a mixer that has none is refused."""
        return None

    @classmethod
    def placed(cls, config: Any, embedding: nn.Module, width: int, num_positions: int) -> nn.Module:
        """Return the module from inputs to positioned embeddings, (B, N, D).

        Default: ``embedding`` itself. Parameters are drawn from the global random state.

        Args:
            config: the scheme's settings.
            embedding: embeds inputs, (B, N, D).
            width: D.
            num_positions: largest N.
        """
        return embedding
