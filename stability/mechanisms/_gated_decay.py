"""A mixer reads a decaying state, norms what each head reads, and gates it."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._decayed import nothing_at_padding, of_heads, products
from stability.mechanisms._fla import AbstractWithKernels
from stability.mechanisms._recurrent import HeadNorm


class AbstractGatedDecay(AbstractWithKernels):
    """A recurrence with decay whose output is normed and gated: per head S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ and
    o_t = S_tᵀ q_t / √K, then y = W_o (swish(W_g x + b_g) ⊙ norm(o)) + b_o. At padding a = 1 and v = 0.

    ``qkvg`` gives queries, keys, values and gates. A subclass says in `head_widths` how wide those are, implements
    `log_decay`, `turned` where queries and keys are rotated, and `projected` where they are more than linear maps of a
    position. ``centred``: whether the norm of each head takes the mean away.
    """

    def __init__(self, config: Any, shape: MixerShape, *, centred: bool):
        super().__init__()
        self.heads, self.config = shape.heads, config
        keys, values = self.head_widths(config, shape)
        self.widths = tuple(shape.heads * width for width in (keys, keys, values, values))
        self.qkvg = nn.Linear(shape.width, sum(self.widths))
        self.norm = HeadNorm(values, centred=centred)
        self.out = nn.Linear(shape.heads * values, shape.width)

    @classmethod
    def head_widths(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        """Return how many features keys and values have in each head."""
        raise NotImplementedError

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B H N width"]:
        """Return ln a ≤ 0 in float32 or wider, with an entry for each feature of the keys or with one; what it says of
        padding is not read."""
        raise NotImplementedError

    def projected(self, x_BND: Tensor, mask_BN: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, (B, N, ·) each, as wide as `widths` says. At padding, which x holds
        as zeros, they may be anything."""
        return self.qkvg(x_BND).split(self.widths, -1)

    def turned(self, u_BHNK: Tensor) -> Tensor:
        """Return queries or keys as positions turn them: here not at all."""
        return u_BHNK

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkvg`` holds four matrices, those of queries, keys, values and gates."""
        return {"qkvg": self.widths}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, and what a chunk and the states take."""
        keys, values = cls.head_widths(config, shape)
        projections = num_positions * shape.width * shape.heads * (2 * keys + 3 * values)
        return projections + products(shape.heads, keys, values, num_positions, config.chunk)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of the heads' states S, keys by values each."""
        keys, values = cls.head_widths(config, shape)
        return shape.heads * keys * values

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Return the mixed positions; what padding holds is not read."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNV, g_BHNV = (of_heads(part, self.heads) for part in self.projected(x_BND, mask_BN))
        o_BHNV = self.decayed_by(
            self.config,
            self.turned(q_BHNK) / math.sqrt(q_BHNK.shape[-1]),
            self.turned(k_BHNK),
            nothing_at_padding(v_BHNV, mask_BN),
            nothing_at_padding(self.log_decay(x_BND), mask_BN),
        )
        y_BHNV = F.silu(g_BHNV) * self.norm(o_BHNV)
        return self.out(y_BHNV.transpose(1, 2).flatten(2))
