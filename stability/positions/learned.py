"""`learned`: a table of absolute positions added to the embedding.

From Radford et al. 2019, as in nanoGPT.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.positions import AbstractPosition


class Placed(nn.Module):
    """The embedding plus a table's row p at position p = 0, 1, …: (B, N, D)."""

    own_roles: ClassVar = {"positions_ND": "position"}

    def __init__(self, embedding: nn.Module, width: int, num_positions: int, std: float):
        super().__init__()
        self.embedding = embedding
        self.positions_ND = nn.Parameter(std * torch.randn(num_positions, width))

    def forward(self, inputs: Any) -> Tensor:
        """Embed inputs and add positions.

        Raises:
            ValueError: more positions than rows in the table.
        """
        x_BND = self.embedding(inputs)
        if x_BND.shape[1] > len(self.positions_ND):
            raise ValueError(
                f"position=learned has a table of {len(self.positions_ND)} positions, and a sequence has "
                f"{x_BND.shape[1]}; give shorter ones, or train with position=rope"
            )
        return x_BND + self.positions_ND[: x_BND.shape[1]]


class LearnedPosition(AbstractPosition):
    """A learned vector per position up to the model's length; mixers rotate nothing.

    In a cross mechanism, a context read by position also counts from 0, as under `rope`.
    """

    class Config(Settings):
        """Setting for the initial table."""

        std: float = Field(
            default=0.02,
            gt=0,
            description="standard deviation that the table starts with, whatever model.embedding_std is",
        )

    adds = is_bounded = True

    @classmethod
    def placed(cls, config: Config, embedding: nn.Module, width: int, num_positions: int) -> nn.Module:
        return Placed(embedding, width, num_positions, config.std)


EXPORT = LearnedPosition
