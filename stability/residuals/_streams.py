"""Base of the schemes with several residual streams.

Sources: Zhu et al. 2024, arXiv:2409.19606; Xie et al. 2025, arXiv:2512.24880.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from stability.config import Settings
from stability.config.impl import Impl, Use
from stability.models.passes import in_float32, rounds_products
from stability.residuals import AbstractResidual, Branch

INITIAL_SCALE = 0.01  # a of every dynamic part
MOST_STREAMS_OF_KERNELS = 8  # of kernels.streams


class StreamSettings(Settings):
    streams: int = Field(default=4, ge=1, le=256, description="number n of residual streams")
    same_for_all: ClassVar[tuple[str, ...]] = ("decay_static",)
    decay_static: bool = Field(
        default=False,
        description=(
            "whether weight decay reaches the static coefficients, which it draws to 0; else it never does; the "
            "same for all schemes swept"
        ),
    )
    impl: Impl = "reference"


class Coefficients(NamedTuple):
    """The coefficients of each token, in float32 or wider.

    Attributes:
        pre_BNS: weight of each stream in the branch's input.
        mix_BNST: [..., s, t] is the weight of stream s in the next stream t.
        post_BNS: weight of the branch's output in each stream.
    """

    pre_BNS: Tensor
    mix_BNST: Tensor
    post_BNS: Tensor


class AbstractStreams(AbstractResidual):
    """A residual connection of n streams per token, X (B, N, S, D).

    u = Σ_s pre_s X_s and X' = mixᵀX + post ⊗ F(u). X starts as n copies of the embedding. The head's input is the sum
    of the normed streams.

    Attributes:
        static: names of the coefficients that do not depend on the token.
        sums_to_one: whether each column of mix sums to 1 by construction, so mixing leaves equal streams unchanged.
    """

    static: ClassVar[tuple[str, ...]]
    sums_to_one: ClassVar[bool] = False
    kernels_second_order = True

    def __init__(self, config: Any, *, width: int, layer: int):
        super().__init__(config, width=width, layer=layer)
        for asked in self.kernels(config):
            asked.nest_in("residual").check(Use(width, heads=1))
        self.config = config
        self.first_stream = layer % config.streams

    @property
    def own_decay(self) -> dict[str, bool]:
        return dict.fromkeys(self.static, bool(self.config.decay_static))

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        if cls.read is AbstractStreams.read:
            return "coefficients of one's own"
        return f"streams={config.streams}" if config.streams > MOST_STREAMS_OF_KERNELS else None

    def coefficients(self, x_BNSD: Tensor) -> Coefficients:
        """Return pre, mix and post at each token, by torch's own operations."""
        raise NotImplementedError

    def read(self, x_PSD: Tensor, dtype: torch.dtype, precision: str) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the branch's input and the coefficients by kernels.

        Args:
            x_PSD: the streams of P tokens.
            dtype: dtype of the weights.
            precision: precision of the products, "tf32" or "ieee".

        Returns:
            u (P, D), the coefficients (P, S, S + 2) in the layout of `kernels.streams`, and X itself.
        """
        raise NotImplementedError

    def enter(self, x_BND: Tensor) -> Tensor:
        # contiguous, because a product with strides of 0 loops over the tokens
        return x_BND.unsqueeze(-2).expand(-1, -1, self.config.streams, -1).contiguous()

    def forward(self, state: Tensor, branch: Branch) -> Tensor:
        """Return X' (B, N, S, D) in the dtype of ``state``."""
        if self.config.impl == "triton":
            return self._run_kernels(state, branch)
        # Coefficients and their factors stay in float32: a matrix rounded to bfloat16 loses 0.18 % of a constant signal
        # at each connection. If products are rounded nevertheless, streams are mixed by their differences to the first:
        # X'_t = X_1 + Σ_s mix_st (X_s − X_1). Equal streams then remain exactly equal for any rounding of mix. Runs in
        # float32 use the plain form, with the same bits as before.
        by_differences = self.sums_to_one and rounds_products(state.device)
        with in_float32(state.device):
            pre_BNS, mix_BNST, post_BNS = self.coefficients(state)
            wide = state.to(pre_BNS.dtype)
            # One product reads the streams once. `split`, because the gradient of indexing is a full copy, mostly
            # zeros.
            if by_differences:
                first = wide.narrow(-2, 0, 1)
                u, mixed_BNSD = pre_BNS.unsqueeze(-2) @ wide, first + mix_BNST.mT @ (wide - first)
            else:
                both = torch.cat([pre_BNS.unsqueeze(-2), mix_BNST.mT], -2) @ wide
                u, mixed_BNSD = both.split([1, wide.shape[-2]], -2)
        added_BND = branch(u.squeeze(-2).to(state.dtype)).to(wide.dtype)
        return torch.addcmul(mixed_BNSD, post_BNS.unsqueeze(-1), added_BND.unsqueeze(-2)).to(state.dtype)

    def _run_kernels(self, state: Tensor, branch: Branch) -> Tensor:
        """Return the result of `forward`, computed by kernels."""
        # coefficients and sums stay in float32 under any autocast, mixed by differences if the columns of mix sum to 1
        from kernels.streams import join

        is_tf32 = state.is_cuda and torch.get_float32_matmul_precision() != "highest"
        with in_float32(state.device):
            x_PSD = state.flatten(0, 1)
            wide = torch.promote_types(state.dtype, torch.float32)
            u_PD, coefficients, x_PSD = self.read(x_PSD, wide, "tf32" if is_tf32 else "ieee")
        added_BND = branch(u_PD.unflatten(0, state.shape[:2]))
        with in_float32(state.device):
            added_PD = added_BND.flatten(0, 1).to(state.dtype)
            out = join(x_PSD, coefficients, added_PD, by_differences=self.sums_to_one)
        return out.unflatten(0, state.shape[:2])

    def leave(self, state: Tensor, final_norm: nn.Module) -> Tensor:
        return final_norm(state).sum(-2)


class AbstractGatedStreams(AbstractStreams):
    """The coefficients of mHC; mHC-lite shares all but the mixing.

    mHC-lite's Eqs. 2 and 4, with x̃ = RMSNorm(vec X) ∈ R^{nD}: pre = σ(a_pre·x̃W_pre + b_pre), post =
    2σ(a_post·x̃W_post + b_post), mix = `mixing` of a_mix·x̃W_mix + b_mix.

    W = [W_pre | W_post | W_mix] starts at 0, a at 0.01, b_pre and b_post at −1 except for 1 at the first stream.

    Args:
        config: settings of the scheme.
        width: the model's width D.
        layer: the connection's number in the model, from 0.
        bias_mix: initial value of b_mix.
    """

    static = ("bias_pre", "bias_post", "bias_mix")
    own_fan_in: ClassVar = {"weight": 0}

    def __init__(self, config: Any, *, width: int, layer: int, bias_mix: Tensor):
        super().__init__(config, width=width, layer=layer)
        num = config.streams
        bias = torch.full((num,), -1.0)
        bias[self.first_stream] = 1.0
        self.bias_pre, self.bias_post, self.bias_mix = (
            nn.Parameter(bias),
            nn.Parameter(bias.clone()),
            nn.Parameter(bias_mix),
        )
        self.gain = nn.Parameter(torch.zeros(num * width))
        self.weight = nn.Parameter(torch.zeros(num * width, 2 * num + bias_mix.numel()))
        self.scale = nn.Parameter(torch.full((3,), INITIAL_SCALE))

    def mixing(self, logits: Tensor) -> Tensor:
        """Return mix_BNST from logits (B, N, …), with the trailing shape of ``bias_mix``."""
        raise NotImplementedError

    def kernel_mixing(self) -> dict[str, Any]:
        """Return the arguments of `kernels.streams.read_gated` for this mixing."""
        raise NotImplementedError

    def read(self, x_PSD: Tensor, dtype: torch.dtype, precision: str) -> tuple[Tensor, Tensor, Tensor]:
        from kernels.streams import read_gated

        scale_O, bias_O = self._rows()
        weight = ((1 + self.gain).unsqueeze(-1) * (self.weight * scale_O)).to(dtype)
        told = self.kernel_mixing()
        return read_gated(x_PSD, weight, bias_O.to(dtype), told.pop("p_RO", None), **told, precision=precision)

    def coefficients(self, x_BNSD: Tensor) -> Coefficients:
        gates, mix = self._logits(x_BNSD)
        pre_BNS, post_BNS = gates.sigmoid().chunk(2, -1)
        return Coefficients(pre_BNS, self.mixing(mix), 2 * post_BNS)

    def _logits(self, x_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of pre and post, (B, N, 2n), and of the mixing."""
        num, size = self.config.streams, self.bias_mix.numel()
        scale_O, bias_O = self._rows()
        gates, mix = (multiply_normed(x_BNSD.flatten(-2), self.gain, self.weight * scale_O) + bias_O).split(
            [2 * num, size], -1
        )
        return gates, mix.unflatten(-1, self.bias_mix.shape)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the scales and the biases of all logits, one row each."""
        num, size = self.config.streams, self.bias_mix.numel()
        # few operations on all tokens, many on single rows
        scale_O = spread(self.scale, [num, num, size])
        return scale_O, torch.cat([self.bias_pre, self.bias_post, self.bias_mix.flatten()])


class AbstractSinkhornStreams(AbstractGatedStreams):
    """The mixing of mHC: exp(`mixing_logits`), normalised by Sinkhorn and Knopp.

    The scheme is mHC-lite's Eq. 2, with ``config.iterations`` iterations.
    """

    def mixing_logits(self, x_BNSD: Tensor) -> Tensor:
        """Return the initial logarithms of Sinkhorn and Knopp, (B, N, S, S)."""
        return self._logits(x_BNSD)[1]

    def mixing(self, logits: Tensor) -> Tensor:
        return sinkhorn(logits, self.config.iterations)

    def kernel_mixing(self) -> dict[str, Any]:
        return {"iterations": self.config.iterations}


def spread(scales: Tensor, sizes: list[int]) -> Tensor:
    """Repeat each scale by its size; concatenate the results."""
    return torch.cat([scale.expand(size) for scale, size in zip(scales.unbind(), sizes, strict=True)])


def multiply_normed(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm(x)·diag(1 + gain)·W over the last axis.

    Args:
        x: (…, G).
        gain: (G).
        weight: W, (G, O).

    Returns:
        (…, O), in float32 or wider.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # The norm divides the product, not x: O numbers per token instead of G (Xie et al. 2025, 4.3.1). Its ε is the
    # dtype's own, so any scale of x drops out.
    scale = (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt()
    return x @ ((1 + gain).unsqueeze(-1) * weight).to(x.dtype) * scale


def sinkhorn(logits_BNST: Tensor, iterations: int) -> Tensor:
    """Return exp(logits), normalised by Sinkhorn and Knopp; (…, S, T) → (…, S, T).

    Each iteration divides columns, then rows, by their sums: a log-softmax over s, then over t.

    Rows sum to 1 to rounding after every iteration, columns only in the limit. After 20 iterations, 1 % of 4 × 4
    matrices of normal logits have a column off by more than 0.044 / 0.082 / 0.37 at standard deviation 4 / 8 / 16; at
    16, some are off by nearly 1. Logits of 10³ neither overflow nor underflow to a row of zeros.
    """
    # tokens last: both reductions are then vectorised over them, six times as fast
    m_STP = logits_BNST.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations):
        m_STP = torch.log_softmax(torch.log_softmax(m_STP, 0), 1)
    return m_STP.exp().movedim((0, 1), (-2, -1))
