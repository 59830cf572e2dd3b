"""`retnet`: multi-scale retention, the mixer in RetNet (Sun et al. 2023, arXiv:2307.08621)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.config.impl import ImplOrFla
from stability.mechanisms._base import MixerShape
from stability.mechanisms._decayed import share_of_head
from stability.mechanisms._gated_decay import AbstractGatedDecay


class MultiScaleRetention(AbstractGatedDecay):
    """Retention with one fixed decay per head: S_n = γ S_{n−1} + k_n v_nᵀ, o_n = S_nᵀ q_n / √K.

    These are eqs. 5 and 6, so o_n = Σ_{m ≤ n} γ^(n−m) q_n·k_m / √K v_m; y = W_o (swish(W_g x) ⊙ GroupNorm(o)) + b_o
    (eq. 8).

    γ_h = 1 − 2^(−5−h) for heads h = 0, 1, … is not learned, and there is no other decay. Of xPos, the paper's
    positions, only the rotation remains: queries and keys are rotated as in `sa` if position=rope. With any other
    position scheme they are not, and γ^(n−m) alone encodes positions. GroupNorm is over each head's features at one
    position, with one weight per feature and no bias. The paper's other score norms (its section 2.2) have no effect
    after GroupNorm (except for ε), and are omitted. At padding γ = 1 and v = 0.

    ``expand_v``: the paper has values twice as wide, 8 D² parameters; here 1 (5 D²).
    """

    class Config(Settings):
        """Settings for value width and chunk size; the sum is the same."""

        expand_v: float = Field(
            default=1.0, gt=0, le=16, description="width of the values, in widths of the model; the paper's: 2"
        )
        chunk: int = Field(
            default=64,
            ge=1,
            description="positions computed at once; 1: the recurrence, the whole sequence: the parallel form",
        )
        impl: ImplOrFla = "reference"

    def __init__(self, config: Config, shape: MixerShape):
        if shape.rope is not None:
            shape.require_pairs()
        super().__init__(config, shape, centred=True)
        self.rope = shape.rope

    @classmethod
    def head_widths(cls, config: Any, shape: MixerShape) -> tuple[int, int]:
        return shape.head_width, share_of_head(config.expand_v, shape)

    def rotate(self, u_BHNK: Tensor) -> Tensor:
        return u_BHNK if self.rope is None else self.rope(u_BHNK)

    def log_decay(self, x_BND: Tensor) -> Float[Tensor, "1 H N 1"]:
        """Return ln γ per head, in float32 or wider, equal at every position."""
        head_H = torch.arange(self.heads, device=x_BND.device, dtype=torch.promote_types(x_BND.dtype, torch.float32))
        return torch.log1p(-torch.exp2(-5 - head_H))[None, :, None, None].expand(1, -1, x_BND.shape[1], 1)


EXPORT = MultiScaleRetention
