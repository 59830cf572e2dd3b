"""`hgrn2`: gated linear recurrence with an expanded state (HGRN2, Qin et al. 2024, arXiv:2404.07904)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.impl import ImplOrFla, Use
from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._decayed import products, share_of_head, split_heads, zero_padding
from stability.mechanisms._fla import AbstractWithKernels
from stability.mechanisms._recurrent import HeadNorm
from stability.models.backbone import SharedByLayers
from stability.models.passes import at_least_float32, in_float32


class LowerBounds(SharedByLayers):
    """Lower bound of each feature's forget gate per layer, lb_l = Σ_{0 < j ≤ l} softmax(Γ)_j.

    The softmax is over layers. The sum excludes the first term, so lb is 0 in the first layer and rises towards 1 with
    depth. ``logit_LK``: Γ, initially 0, so lb_l = l / L.
    """

    is_table = True  # logits, not a linear map: matrix optimizers skip them

    def __init__(self, num_layers: int, width: int):
        super().__init__()
        self.logit_LK = nn.Parameter(torch.zeros(num_layers, width))

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay: it would pull all layers' bounds to l / L."""
        return {"logit_LK": False}

    def forward(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return ln lb and ln(1 − lb) for a layer after the first, (K,) each.

        Computed in float32 or wider.
        """
        with in_float32(self.logit_LK.device):
            logit_LK = at_least_float32(self.logit_LK)
            above_LK = torch.cat([logit_LK[:1], logit_LK[layer + 1 :]])
            whole_K = logit_LK.logsumexp(0)
            return logit_LK[1 : layer + 1].logsumexp(0) - whole_K, above_LK.logsumexp(0) - whole_K


class ExpandedRecurrence(AbstractWithKernels):
    """Recurrence with tied forget and input gates: S_t = Diag(f_t) S_{t−1} + (1 − f_t) i_tᵀ per head.

    o_t = S_tᵀ q_t and y = W_o RMSNorm(o) + b_o (section 3.2), with f = lb + (1 − lb) ⊙ σ(W_f x + b_f), q = swish(W_q x
    + b_q) and i = W_i x + b_i.

    lb limits forgetting, more strongly in deeper layers (`LowerBounds`): one parameter for all layers in a model, or
    fixed at l / L in layer l = 0 … L − 1. A layer outside a model has its own parameter. Activations and norm (one over
    all heads) are those in the authors' second release, in flash-linear-attention; the first has i = swish, q = σ and
    LayerNorm. Nothing is rotated under any position scheme. At padding f = 1, and so 1 − f = 0.
    """

    class Config(Settings):
        """Settings for state size, bounds and implementation."""

        expand_k: float = Field(
            default=1.0, gt=0, le=16, description="width of queries and forget gates, in widths of the model"
        )
        bounds: Literal["learned", "fixed"] = Field(
            default="learned",
            description="least that a layer keeps: learned, by one parameter of the whole model, or l / L in layer l",
        )
        chunk: int = Field(default=8, ge=1, description="positions computed at once; 1: the recurrence")
        impl: ImplOrFla = "reference"

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        self.heads, self.config = shape.heads, config
        self.layer, self.num_layers = shape.layer, shape.num_layers
        keys = shape.heads * share_of_head(config.expand_k, shape)
        self.widths = (keys, shape.width)
        self.qi = nn.Linear(shape.width, sum(self.widths))
        self.forget = nn.Linear(shape.width, keys)
        nn.init.zeros_(self.forget.bias)
        # the first layer's bound is always 0
        is_learned = config.bounds == "learned" and shape.layer > 0
        self.bounds = LowerBounds(shape.num_layers, keys) if is_learned else None
        self.norm = HeadNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset({"forget.bias"})

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on gate biases: it would pull memory to that of σ = ½."""
        return {"forget.bias": False}

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qi`` is two matrices: queries and inputs."""
        return {"qi": self.widths}

    @classmethod
    def width_of_keys(cls, config: Any, use: Use) -> int:
        return share_of_head(config.expand_k, use)

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections, (2 + 2·expand_k) D², and the products in chunks and states.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        keys = share_of_head(config.expand_k, shape)
        projections = 2 * num_positions * shape.width * (shape.width + shape.heads * keys)
        return projections + products(shape.heads, keys, shape.head_width, num_positions, config.chunk)

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Return the size of the heads' states S, key width times value width each.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        return share_of_head(config.expand_k, shape) * shape.width

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        x_BND = without_padding(x_BND, mask_BN)
        q_BND, i_BND = self.qi(x_BND).split(self.widths, -1)
        log_f_BHNK, k_BHNK = (zero_padding(part, mask_BN) for part in self.gates(x_BND))
        q_BHNK, i_BHNV = split_heads(F.silu(q_BND), self.heads), split_heads(i_BND, self.heads)
        o_BHNV = self.run_linear_attention(self.config, q_BHNK, k_BHNK, i_BHNV, log_f_BHNK)
        return self.out(self.norm(o_BHNV.transpose(1, 2).flatten(2)))

    def gates(self, x_BND: Tensor) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H N K"]]:
        """Return ln f and 1 − f, in float32 or wider.

        They are computed separately, so that tiny values stay exact.
        """
        with in_float32(x_BND.device):
            score_BND = self.forget(at_least_float32(x_BND))
            log_f_BND, taken_BND = F.logsigmoid(score_BND), torch.sigmoid(-score_BND)
            if self.layer > 0:
                log_bound_K, log_rest_K = self.log_bounds(score_BND)
                # not logaddexp: its second derivative is NaN for terms 89 apart
                both_2BND = torch.stack([log_bound_K.expand_as(log_f_BND), log_rest_K + log_f_BND])
                log_f_BND = both_2BND.logsumexp(0)
                taken_BND = taken_BND * log_rest_K.exp()
            return split_heads(log_f_BND, self.heads), split_heads(taken_BND, self.heads)

    def log_bounds(self, like: Tensor) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Return ln lb and ln(1 − lb) for this layer, unless it is the first.

        ``like``: (…, K), dtype and device for fixed bounds.
        """
        if self.bounds is not None:
            return self.bounds(self.layer)
        share = self.layer / self.num_layers
        return like.new_full(like.shape[-1:], math.log(share)), like.new_full(like.shape[-1:], math.log1p(-share))


EXPORT = ExpandedRecurrence
