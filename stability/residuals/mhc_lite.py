"""mHC-lite: exactly doubly stochastic mixing without iterations.

Source: Yang & Gao 2026, arXiv:2601.05732.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from stability.config.impl import Use
from stability.residuals._streams import AbstractGatedStreams, StreamSettings

OTHERS = -8.0
# 120 permutations; the 720 of 6 streams would need more weights than their branch
MOST_STREAMS_OF_ALL = 5
MOST_PERMUTATIONS_OF_KERNELS = 128  # of kernels.streams


def _check_permutations(value: Any) -> Any:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"residual.mhc_lite.permutations={value!r}: give all, or how many as a whole number")


class LiteHyperConnections(AbstractGatedStreams):
    """Gated streams mixed by Σ_r softmax(logits)_r P_r over permutation matrices.

    The base is `AbstractGatedStreams`, the mixing mHC-lite's Eqs. 4 and 5: one product of the weights (…, R) with the
    constant matrix (R, n²). Rows and columns sum to 1 to the rounding of the dtype, at every depth and after any
    training: to 1e-15 in float64. bfloat16 loses 0.18 % per connection, unless streams are mixed by their differences.

    b_mix starts at 0 for the identity and −8 for every other permutation. The gates start as in mHC. An untrained model
    is as far from the plain one: 4.2 % with this project's embedding, 17.0 % with nanoGPT's, 24.6 % with eight tanh
    layers, 19 % in the authors' own model (see `ManifoldHyperConnections`; the same tests check this).
    """

    sums_to_one = True

    class Config(StreamSettings):
        permutations: Annotated[Literal["all"] | int, BeforeValidator(_check_permutations)] = Field(
            default="all",
            description=(
                "all n! of them, or how many: the identity and others drawn by chance, whose hull is a part of the "
                "Birkhoff polytope"
            ),
        )
        permutation_seed: int = Field(
            default=0, ge=0, description="seed of that draw, the same for all connections and seeds of a sweep"
        )

        @property
        def count(self) -> int | None:
            return None if self.permutations == "all" else self.permutations

        @model_validator(mode="after")
        def _check_count(self) -> LiteHyperConnections.Config:
            """Refuse a number of permutations out of range, and a seed without a draw."""
            total = math.factorial(self.streams)
            if self.permutations == "all" and self.streams > MOST_STREAMS_OF_ALL:
                raise ValueError(
                    f"residual.mhc_lite.permutations=all: {self.streams} streams have {total:,} of them; say how "
                    "many, e.g. residual.mhc_lite.permutations=64"
                )
            if self.permutations != "all" and not 1 <= self.permutations <= total:
                raise ValueError(
                    f"residual.mhc_lite.permutations={self.permutations}: {self.streams} streams have {total:,} of "
                    f"them; give 1 to {total:,}, or all"
                )
            if self.permutations == "all" and self.permutation_seed:
                given = f"residual.mhc_lite.permutation_seed={self.permutation_seed} changes nothing here"
                raise ValueError(
                    f"{given}: it draws a part of the permutations, e.g. residual.mhc_lite.permutations=16 "
                    "(residual.mhc_lite.permutations=all given)"
                )
            return self

    p_RO: Tensor

    def __init__(self, config: Config, *, width: int, layer: int):
        matrices_RO = permutation_matrices(config.streams, config.count, config.permutation_seed)
        bias_mix = torch.full((len(matrices_RO),), OTHERS)
        bias_mix[0] = 0.0
        super().__init__(config, width=width, layer=layer, bias_mix=bias_mix)
        self.register_buffer("p_RO", matrices_RO, persistent=False)  # determined by the settings

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        if (config.count or 0) > MOST_PERMUTATIONS_OF_KERNELS:
            return f"permutations={config.count}"
        return super().no_kernel(config, use)

    def mixing(self, logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)
        return (weights @ self.p_RO.to(weights.dtype)).unflatten(-1, (self.config.streams, self.config.streams))

    def kernel_mixing(self) -> dict[str, Any]:
        return {"p_RO": self.p_RO}


def permutations(num: int, count: int | None, seed: int) -> list[tuple[int, ...]]:
    """Return permutations of ``num`` items, the identity first.

    Args:
        num: number of items.
        count: number of permutations, the others drawn at random; None: all, in lexicographic order.
        seed: seed of the draw.
    """
    if count is None:
        return list(itertools.permutations(range(num)))
    chosen, draw = {tuple(range(num)): None}, random.Random(seed)
    while len(chosen) < count:
        chosen[tuple(draw.sample(range(num), num))] = None
    return list(chosen)


def permutation_matrices(num: int, count: int | None, seed: int) -> Tensor:
    """Return permutation matrices as rows, (R, S·T) in float32, with P_0 = I.

    The convex combinations of all of them are the doubly stochastic matrices (Birkhoff 1946, von Neumann 1953).

    Args:
        num: number of streams S = T.
        count: number of matrices R; None: all.
        seed: seed of the draw.
    """
    return torch.eye(num)[torch.tensor(permutations(num, count, seed))].flatten(1)


EXPORT = LiteHyperConnections
