"""`fox`: softmax attention with a forget gate.

From the Forgetting Transformer (Lin et al. 2025, arXiv:2503.02130).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.mechanisms._attention import DotProductSettings
from stability.mechanisms._base import CAUSAL, MixerShape
from stability.mechanisms._written_out import AbstractWrittenOutAttention
from stability.models.passes import at_least_float32, in_float32

Time = Annotated[float, Field(gt=0)]


class ForgettingAttention(AbstractWrittenOutAttention):
    """Causal attention with decay: y_i = W_o Σ_{j ≤ i} softmax_j(q_i·k_j / √K + D_ij) v_j + b_o.

    Per head D_ij = Σ_{l = j+1..i} ln f_l and f_l = σ(w_f·x_l + b_f) (section 3, Forgetting Attention). At padding ln f
    = 0, so padding causes no decay. The gates encode positions. So by default queries and keys are not rotated under
    any position scheme, and position=rope and none are the same model. With ``rope="absolute"`` they are rotated as in
    `sa` under position=rope. This is the paper's plain block (FoX, LLaMA). Its Pro block also has an output gate and
    norm, normed q and k (``qk_norm``), and a shift of keys and values.

    b_f starts at 0, as in the paper's released code: about half is forgotten per position. With ``decay_times`` the
    heads start with f = e^(−1/T), so b_f = −ln(e^(1/T) − 1). T is log-spaced from the first head's to the last's, as in
    the paper for gates that do not read x.
    """

    class Config(DotProductSettings):
        """Settings for rotation and initial gates."""

        rope: Literal["none", "absolute"] = Field(
            default="none", description="whether queries and keys are rotated, too (with position=rope)"
        )
        decay_times: tuple[Time, Time] | None = Field(
            default=None,
            description="positions over which the first and the last head begin to forget; null: gates begin at ½",
        )

    directions = frozenset({CAUSAL})
    rows_sum_to_one = True

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape, shape.rope if config.rope == "absolute" else None)
        self.forget = nn.Linear(shape.width, shape.heads)
        nn.init.zeros_(self.forget.bias)
        if config.decay_times is not None:
            first, last = (math.log(time) for time in config.decay_times)
            time_H = torch.linspace(first, last, shape.heads, dtype=torch.float64).exp()
            with torch.no_grad():
                self.forget.bias.copy_(-torch.expm1(1 / time_H).log())

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"forget.bias"})

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on gate biases: it would pull memory to that of f = ½."""
        return {"forget.bias": False}

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the gates' map in addition to the attention.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        return super().cost(config, shape, num_positions) + num_positions * shape.width * shape.heads

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int | None:
        """Count Σ ln f per position and head, in addition to keys and values.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        of_keys = super().state_size(config, shape, num_positions)
        return None if of_keys is None else of_keys + shape.heads * num_positions

    def weigh(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        visible = self.find_visible(x_BND, mask_BN)
        # A padded row may be empty, and its derivative NaN: let the row see all keys, then zero its output.
        given = visible | ~visible.any(-1, keepdim=True)
        decayed_BHNN = logits_BHNN + self.decay(x_BND, mask_BN)
        return decayed_BHNN.masked_fill(~given, -math.inf).softmax(-1).masked_fill(~visible, 0.0)

    def decay(self, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        """Return D, (B, H, N, N), in float32 or wider; meaningful only for j ≤ i."""
        with in_float32(x_BND.device):
            log_f_BNH = F.logsigmoid(self.forget(at_least_float32(x_BND)))
        if mask_BN is not None:
            log_f_BNH = log_f_BNH.masked_fill(~mask_BN[..., None], 0.0)
        until_BHN = log_f_BNH.cumsum(1).transpose(1, 2)
        return until_BHN[..., :, None] - until_BHN[..., None, :]


EXPORT = ForgettingAttention
