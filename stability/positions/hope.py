"""`hope`: hyperbolic rotary positions, whose logits decay with the distance (arXiv:2509.05218)."""

from __future__ import annotations

from pydantic import Field

from stability.config import Settings
from stability.models.position import Decays
from stability.positions import AbstractPosition


class HyperbolicPosition(AbstractPosition):
    """Multiplies every query-key product by decays of its distance |m − n|, after a fixed change of basis.

    The paper's e^(−mθ′) B(θ, m) q and e^(nθ′) B(θ, −n) k, with a hyperbolic rotation B of each pair of entries, have
    this logit in closed form. It holds no growing exponential. See `stability.models.position.Decays`.
    """

    class Config(Settings):
        """Settings for the decays."""

        base: float = Field(
            default=10_000.0, gt=1, description="the slowest pair decays about this many times as slowly"
        )
        damping: float = Field(
            default=1.0,
            ge=1,
            description="θ′/θ of every pair; at 1 half of the entries never decay, above 1 all do",
        )

    @classmethod
    def decays(cls, config: Config) -> Decays:
        return Decays(config.base, config.damping)


EXPORT = HyperbolicPosition
