"""`standard`: initial values, learning rates and decay as at any size."""

from __future__ import annotations

from stability.config import Settings
from stability.parametrizations import AbstractParametrization


class Standard(AbstractParametrization):
    """Every factor is 1."""

    class Config(Settings):
        """This part has no settings."""


EXPORT = Standard
