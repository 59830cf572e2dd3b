"""`none`: no position information; a causal model can still count visible positions (Haviv et al. 2022)."""

from __future__ import annotations

from stability.config import Settings
from stability.positions import AbstractPosition


class NoPosition(AbstractPosition):
    """Scheme without rotation and without added vectors."""

    class Config(Settings):
        """This part has no settings."""


EXPORT = NoPosition
