"""`complete_p`: `mup` with factors for depth (Dey et al. 2025, arXiv:2505.01618)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from stability.models.scaling import Factors, TensorSize
from stability.parametrizations import Growth
from stability.parametrizations.mup import Mup, MupSettings


class CompleteP(Mup):
    """The maximal-update parametrization with branches that shrink as the depth grows.

    With L̂ the number of blocks over the base's: every branch's output is multiplied by L̂^−α, the learning rate of all
    tensors in blocks by L̂^(α−1) or, under SGD, L̂^(2α−1), their ε by L̂^−α. Embedding, last norm and head are as in
    `mup`, and so is all decay λ: over a step it follows the depth's rate. The initial values of branch outputs are
    those of the base's depth.

    The authors' code (github.com/EleutherAI/nanoGPT-mup, branch completep) also multiplies the ε of embedding, last
    norm and head by L̂^−α. Their Table 1 scales that of blocks alone, as here: no other gradient falls with the depth.
    """

    scales_depth = True

    class Config(MupSettings):
        base_depth: int | None = Field(
            default=None,
            ge=1,
            description="number of blocks at which it is the standard one; null: the smallest of the sweep",
        )
        alpha: float = Field(default=1.0, ge=0.5, le=1, description="α, exponent of the depth")

        @property
        def base_layers(self) -> int | None:
            return self.base_depth

    @classmethod
    def factors(cls, config: Any, name: str, size: TensorSize, growth: Growth) -> Factors:
        found = Mup.factors(config, name, size, growth)
        if not size.is_inside:
            return found
        update = growth.update(name)
        lr = growth.depth ** ((2 if update == "sgd" else 1) * config.alpha - 1)
        is_scaled = config.epsilon == "scaled" and update == "adam"
        epsilon = growth.depth**-config.alpha if is_scaled else 1.0
        return replace(found, lr=found.lr * lr, epsilon=found.epsilon * epsilon)

    @classmethod
    def branch(cls, config: Any, growth: Growth) -> float:
        return growth.depth**-config.alpha


EXPORT = CompleteP
