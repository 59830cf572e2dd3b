"""`sigmoid`: attention with sigmoid weights, not normalised (Ramapuram et al. 2024, arXiv:2409.04431)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from jaxtyping import Float
from pydantic import BeforeValidator, Field, PlainSerializer
from torch import Tensor, nn

from stability.mechanisms._attention import QK_NORM, DotProductSettings
from stability.mechanisms._base import BIDIRECTIONAL, CAUSAL, MixerShape
from stability.mechanisms._written_out import AbstractWrittenOutAttention
from stability.models.passes import at_least_float32

# Older runs have a bool, which their ids contain; it is written as before.
OLDER = {"none": False, "layernorm": True}


def _read_older(value: Any) -> Any:
    return {False: "none", True: "layernorm"}[value] if isinstance(value, bool) else value


class SigmoidAttention(AbstractWrittenOutAttention):
    """Attention without softmax: y_i = W_o Σ_j σ(q̃_i·k̃_j / √K + b) v_j + b_o, b = −ln n, per head.

    From the paper's section 2. RoPE on q and k; j ≤ i if causal. Masked pairs have weight 0; rows are not normalised.
    With b = −ln n the weights of n positions with score 0 sum to n/(n + 1), about 1 as for a softmax; without b, to
    n/2.

    n is the model's training length (`model.positions`), a constant as in the paper. So a causal position's output does
    not depend on the final sequence length. If that length is unknown (a layer built by hand, a tokenizer's), n is each
    sequence's number of valid positions, so that padding changes nothing. ``norm="after"`` is the hybrid norm needed by
    the paper's longer language models, W_o norm(AV): a root mean square norm over all heads together. The paper's norm
    of queries and keys is ``qk_norm=layernorm``.
    """

    class Config(DotProductSettings):
        """Settings for the bias and the norms."""

        length: int | None = Field(
            default=None, ge=1, description="n of the bias −ln n; null: the sequence length that the model is made for"
        )
        norm: Literal["none", "after"] = Field(
            default="none", description="root mean square norm of what the heads give, before the output map, or none"
        )
        qk_norm: Annotated[
            Literal["none", "layernorm", "rmsnorm"],
            BeforeValidator(_read_older),
            PlainSerializer(lambda value: OLDER.get(value, value)),
        ] = Field(default="none", description=QK_NORM)

    directions = frozenset({BIDIRECTIONAL, CAUSAL})
    rows_sum_to_one = False

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__(config, shape, shape.rope)
        self.length = shape.num_positions if config.length is None else config.length
        # after ``norm``, the parameters' order in older checkpoints
        q_norm, k_norm = self.q_norm, self.k_norm
        del self.q_norm, self.k_norm
        self.norm = nn.RMSNorm(shape.width, eps=1e-5) if config.norm == "after" else None
        self.q_norm, self.k_norm = q_norm, k_norm

    def weigh(self, logits_BHNN: Tensor, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N N"]:
        a_BHNN = (logits_BHNN + self.bias(x_BND, mask_BN)).sigmoid()
        return a_BHNN.masked_fill(~self.find_visible(x_BND, mask_BN), 0.0)

    def bias(self, x_BND: Tensor, mask_BN: Tensor | None) -> float | Float[Tensor, "B 1 1 1"]:
        """Return b = −ln n."""
        if self.length is not None or mask_BN is None:
            return -math.log(self.length or x_BND.shape[1])
        valid_B = mask_BN.sum(-1).clamp_min(1)
        return -at_least_float32(valid_B.to(x_BND.dtype)).log()[:, None, None, None]

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Float[Tensor, "B N D"]:
        """Return the concatenated heads, normed with ``norm="after"``, through W_o."""
        y_BND = y_BHNK.transpose(1, 2).flatten(2)
        return self.out(y_BND if self.norm is None else self.norm(at_least_float32(y_BND)))


EXPORT = SigmoidAttention
