"""`learned`: a table of absolute positions that is added to the embedding (Radford et al. 2019, as nanoGPT has it)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.positions._base import AbstractPosition


class Placed(nn.Module):
    """The embedding plus row p of a table at position p = 0, 1, …: (B, N, D)."""

    own_roles: ClassVar = {"positions_ND": "position"}

    def __init__(self, embedding: nn.Module, width: int, num_positions: int, std: float):
        super().__init__()
        self.embedding = embedding
        self.positions_ND = nn.Parameter(std * torch.randn(num_positions, width))

    def forward(self, inputs: Any) -> Tensor:
        """Embed and place. Errors: ``ValueError`` where there are more positions than rows of the table."""
        x_BND = self.embedding(inputs)
        if x_BND.shape[1] > len(self.positions_ND):
            raise ValueError(
                f"position=learned has a table of {len(self.positions_ND)} positions, and a sequence has "
                f"{x_BND.shape[1]}; give shorter ones, or train with position=rope"
            )
        return x_BND + self.positions_ND[: x_BND.shape[1]]


class LearnedPosition(AbstractPosition):
    """Every position up to the model's length has a learned vector; mixers rotate nothing. A context that a cross
    mechanism reads by position counts from 0, too, as under `rope`."""

    class Config(Settings):
        """Settings of the table's start."""

        std: float = Field(
            default=0.02,
            gt=0,
            description="standard deviation that the table starts with, whatever model.embedding_std is",
        )

    adds = True

    @classmethod
    def placed(cls, config: Config, embedding: nn.Module, width: int, num_positions: int) -> nn.Module:
        return Placed(embedding, width, num_positions, config.std)


EXPORT = LearnedPosition
