"""`dense`: the plain linear map."""

from __future__ import annotations

from torch import nn

from stability.config import Settings
from stability.linears import AbstractLinear


class Dense(AbstractLinear):
    """Ordinary linear map, y = Wx + b, `torch.nn.Linear` unchanged."""

    class Config(Settings):
        """This part has no settings."""

    is_affine = True

    @classmethod
    def of(cls, config: Config, dense: nn.Linear) -> nn.Linear:
        return dense


EXPORT = Dense
