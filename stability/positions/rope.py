"""`rope`: rotary position embedding, applied in each mixer (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stability.config import Settings
from stability.config.identity import Since
from stability.models.position import Rope
from stability.positions import AbstractPosition


class RotaryPosition(AbstractPosition):
    """Rotates pair k of a head's K entries by p·base^(−2k/K) at position p.

    See `stability.models.position.rope`.
    """

    class Config(Settings):
        """Setting for the angles."""

        base: Annotated[float, Since(10_000.0)] = Field(
            default=10_000.0, gt=1, description="the slowest pair turns about this many times as slowly as the first"
        )

    @classmethod
    def rope(cls, config: Config) -> Rope:
        return Rope(config.base)


EXPORT = RotaryPosition
