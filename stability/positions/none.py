"""`none`: the model is told no positions; a causal one can still count what it sees (Haviv et al. 2022)."""

from __future__ import annotations

from stability.config import Settings
from stability.positions._base import AbstractPosition


class NoPosition(AbstractPosition):
    """The scheme that rotates nothing and adds nothing."""

    class Config(Settings):
        """This part has no settings."""


EXPORT = NoPosition
