"""A feed-forward network is the module of a block's last branch: it works on each position by itself."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from stability.config import Settings
from stability.models.init import OwnInit


class AbstractFeedForward(OwnInit):
    """Base of every feed-forward network, (B, N, D) → (B, N, D). A subclass is constructed as ``cls(config, width,
    multiple)``, with its own settings, the model's width D and the model's ``ffn_multiple``, which counts unless the
    settings have a multiple of their own.

    ``hidden_dropout``: the share of its hidden layer that training drops, which the model sets after the constructor
    (`model.dropout_at=maps`); a network without such a layer leaves it alone, and its output is dropped anyway.

    The last projection is called ``out``: the initialisation scales it by the number of branches. What the constructor
    starts in a way of its own, it names in `own_init`.
    """

    family: ClassVar[str] = "ffns"
    Config: ClassVar[type[Settings]]
    hidden_dropout: float = 0.0

    @classmethod
    def build(cls, config: Any, width: int, multiple: float) -> AbstractFeedForward:
        return cls(config, width, multiple)

    def dropped(self, hidden_BNH: Tensor) -> Tensor:
        """Return the hidden layer with that share dropped in training mode."""
        share = self.hidden_dropout
        return nn.functional.dropout(hidden_BNH, share, self.training) if share else hidden_BNH

    def forward(self, x_BND: Tensor) -> Any:
        """Return (B, N, D). One that has a loss of its own (a router's) returns a `WithLoss`, whose output that is."""
        raise NotImplementedError
