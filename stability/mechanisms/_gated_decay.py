"""Base class for mixers with a decaying state, a norm per head and an output gate."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._decayed import products, split_heads, zero_padding
from stability.mechanisms._fla import AbstractWithKernels
from stability.mechanisms._recurrent import HeadNorm


class AbstractGatedDecay(AbstractWithKernels):
    """A recurrence with decay and a normed, gated output.

    Per head S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ and o_t = S_tᵀ q_t / √K; then y = W_o (swish(W_g x + b_g) ⊙ norm(o)) +
    b_o. At padding a = 1 and v = 0.

    ``qkvg`` projects to queries, keys, values and gates. A subclass implements `head_widths` and `log_decay`. It
    overrides `rotate` to rotate queries and keys, and `project` if they are not linear in one position. ``centred``:
    whether each head's norm subtracts the mean.
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
        """Return the key width and the value width per head."""
        raise NotImplementedError

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "B H N width"]:
        """Return ln a ≤ 0 in float32 or wider, per key feature or one per head.

        Values at padding are ignored.
        """
        raise NotImplementedError

    def project(self, x_BND: Tensor, mask_BN: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, (B, N, ·) each, with the sizes in `widths`.

        x must be zero at padding. Results at padding are arbitrary.
        """
        return self.qkvg(x_BND).split(self.widths, -1)

    def rotate(self, u_BHNK: Tensor) -> Tensor:
        """Return queries or keys rotated by position; by default unchanged."""
        return u_BHNK

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkvg`` is four matrices: queries, keys, values and gates."""
        return {"qkvg": self.widths}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, and the products in chunks and states.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        keys, values = cls.head_widths(config, shape)
        projections = num_positions * shape.width * shape.heads * (2 * keys + 3 * values)
        return projections + products(shape.heads, keys, values, num_positions, config.chunk)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of the heads' states S, key width times value width each.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        keys, values = cls.head_widths(config, shape)
        return shape.heads * keys * values

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Return the mixed positions; values at padding are ignored."""
        x_BND = without_padding(x_BND, mask_BN)
        q_BHNK, k_BHNK, v_BHNV, g_BHNV = (split_heads(part, self.heads) for part in self.project(x_BND, mask_BN))
        o_BHNV = self.run_linear_attention(
            self.config,
            self.rotate(q_BHNK) / math.sqrt(q_BHNK.shape[-1]),
            self.rotate(k_BHNK),
            zero_padding(v_BHNV, mask_BN),
            zero_padding(self.log_decay(x_BND), mask_BN),
        )
        y_BHNV = F.silu(g_BHNV) * self.norm(o_BHNV)
        return self.out(y_BHNV.transpose(1, 2).flatten(2))
