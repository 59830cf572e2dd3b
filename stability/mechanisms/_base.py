"""What a sequence mechanism is: a module that mixes positions, (B, N, D) in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings

BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"


@dataclass(frozen=True)
class MixerShape:
    """Where a mixer stands: what the backbone knows of it and its own settings do not.

    ``direction``: "bidirectional" or "causal"; ``layer`` of ``num_layers``, counted from 0 (patterns such as `mix` choose by it).
    """

    width: int
    heads: int
    direction: str = BIDIRECTIONAL
    layer: int = 0
    num_layers: int = 1

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; choose a divisor of {self.width}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class AbstractMechanism(nn.Module):
    """Base of every mechanism. A subclass holds its `Config`, says which `directions` it can do, and implements `forward`."""

    family: ClassVar[str] = "mechanisms"
    Config: ClassVar[type[Settings]]
    directions: ClassVar[frozenset[str]]
    trainable: ClassVar[bool] = True

    @classmethod
    def build(cls, config: Any, shape: MixerShape) -> AbstractMechanism:
        """The module for one layer. Patterns over the layers return another mechanism's module here."""
        if shape.direction not in cls.supported_directions(config):
            possible = ", ".join(sorted(cls.supported_directions(config)))
            raise ValueError(f"{cls.__module__.rsplit('.', 1)[-1]} cannot be {shape.direction}; it can be {possible}")
        return cls(config, shape)

    @classmethod
    def supported_directions(cls, config: Any) -> frozenset[str]:
        return cls.directions

    @classmethod
    def fewest_layers(cls, config: Any) -> int:
        """Layers that the settings need; more than one only for patterns over the layers."""
        return 1

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Multiply-adds of one forward pass over one sequence of ``num_positions``, projections included."""
        raise NotImplementedError

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Mix positions. ``mask_BN``: True where a position is valid; what the others hold changes no valid output."""
        raise NotImplementedError
