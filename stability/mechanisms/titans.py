"""`titans`: a memory trained while it reads, alone or as a gate on sliding-window attention.

From Behrouz et al. 2025, arXiv:2501.00663.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config import Settings
from stability.mechanisms._base import MixerShape, without_padding
from stability.mechanisms._grouped import attend_window, window_block
from stability.mechanisms._neural_memory import Gates, linear_block, linear_memory, mlp_memory
from stability.mechanisms._recurrent import AbstractRecurrent, HeadNorm, ShortConvolution, l2_normalise
from stability.models.passes import at_least_float32, in_float32

MLP_CHUNK = 16
FORGOTTEN_AT_FIRST = 0.01  # initial α per position


class Titans(AbstractRecurrent):
    """A memory M per head, trained at every position to return v_t for k_t.

    Training is one gradient step on ℓ = ‖M(k_t) − v_t‖² with momentum and weight decay (section 3.1, Eqs. 12–15):

        S_t = η_t S_{t−1} − θ_t ∇ℓ(M_{t′}; k_t, v_t),  M_t = (1 − α_t) M_{t−1} + S_t,  y_t = M_t(q_t).

    M is a matrix, or W₂ φ(W₁ x)/√F. q, k, v = silu(conv(W x)), with q and k scaled to length 1 (section 4.4). t′ is the
    last position before t's chunk (section 3.2). With ``chunk=1`` it is t − 1, and the gradient is that of the current
    memory.

    α = σ(w_α·x + b_α) starts near 0.01, η = η̄ σ(w_η·x + b_η) at η̄/2, and θ = θ̄ σ(w_θ·x + b_θ) at θ̄/2. The paper
    leaves the ranges open; here η̄ is the setting ``momentum``, and 2θ̄ = (1 − η̄)/(1 + η̄)/chunk. Keys have length 1.
    Without momentum a chunk's steps multiply a linear memory's error by 1 − Σ 2θ kkᵀ, which never increases it. With
    momentum none of 96,000 random periodic sequences of keys, η and θ increased it. (A step of (1 − η_t) does not bound
    it: writes at a low η continue at the next, higher one.) In a network 1/√F and a bounded φ replace the effect of
    unit keys; with silu, values of 30 and more can explode.

    The matrix starts at 0: an empty memory. So does W₂. W₁ starts at a parameter drawn from N(0, 1), since with both at
    0 all gradients would stay 0.

    - memory_only (LMM, section 4.4): W_o norm(y).
    - gated_attention (MAG, section 4.2, Eqs. 26–28): W_o (norm(a) ⊙ σ(norm(y))) with causal attention a to i − w ≤ j ≤
      i. Attention has its own projections and is rotated as in `sw`; the paper's persistent tokens are omitted. With
      ``memory=none`` it is W_o norm(a): the difference is the memory's effect.

    At padding θ = 0, α = 0, η = 1, and S is not added to M. So both stay unchanged, and later positions read nothing
    from padding. Chunks are counted in positions, padded ones included.
    """

    class Config(Settings):
        """Settings for the layer's form, the memory and its update."""

        form: Literal["memory_only", "gated_attention"] = Field(
            default="memory_only", description="memory_only (LMM) | gated_attention: sliding window, gated (MAG)"
        )
        memory: Literal["none", "linear", "mlp"] = Field(
            default="linear", description="none (gated_attention alone) | linear: a matrix | mlp: two layers"
        )
        momentum: float = Field(
            default=0.5, ge=0, lt=1, description="η̄: the most of earlier surprise that is carried on; 0: none"
        )
        forgetting: bool = Field(default=True, description="whether the memory decays; false: α = 0")
        chunk: int | None = Field(
            default=None,
            ge=1,
            description="positions whose gradients are taken at one memory; 1: each at the last; null: 1, of mlp 16",
        )
        hidden: int = Field(default=2, ge=1, description="features between mlp's layers, in units of a head's width")
        activation: Literal["tanh", "silu"] = Field(default="tanh", description="φ between mlp's layers")
        conv: int = Field(default=4, ge=1, description="positions that the short convolution reads, its own included")
        window: int = Field(default=16, ge=1, description="gated_attention: positions seen before, besides oneself")

        @model_validator(mode="after")
        def _is_something(self) -> Titans.Config:
            """Refuse a memory_only layer without memory."""
            if self.form == "memory_only" and self.memory == "none":
                raise ValueError(
                    "mechanism.titans.memory=none leaves nothing of form=memory_only; use form=gated_attention"
                )
            return self

        @property
        def chunk_length(self) -> int:
            """Positions per chunk, with the default filled in."""
            return self.chunk or (MLP_CHUNK if self.memory == "mlp" else 1)

        @property
        def states(self) -> int:
            """Stored matrices per memory matrix: M, and S with momentum."""
            return 2 if self.momentum else 1

        @property
        def largest_rate(self) -> float:
            """The largest rate, θ̄."""
            return (1 - self.momentum) / (1 + self.momentum) / (2 * self.chunk_length)

    def __init__(self, config: Config, shape: MixerShape):
        super().__init__()
        self.config, self.heads, self.dropout, self.rope = config, shape.heads, shape.dropout, None
        width, head_width = shape.width, shape.head_width
        if config.memory != "none":
            self.qkv = nn.Linear(width, 3 * width)
            self.conv = ShortConvolution(3 * width, config.conv)
            self.rate = nn.Linear(width, shape.heads)
            nn.init.zeros_(self.rate.bias)
            if config.momentum:
                self.momentum = nn.Linear(width, shape.heads)
                nn.init.zeros_(self.momentum.bias)
            if config.forgetting:
                self.forget = nn.Linear(width, shape.heads)
                nn.init.constant_(self.forget.bias, math.log(FORGOTTEN_AT_FIRST / (1 - FORGOTTEN_AT_FIRST)))
            if config.memory == "mlp":
                self.first_HFK = nn.Parameter(torch.randn(shape.heads, hidden_width(config, shape), head_width))
            self.norm = HeadNorm(head_width)
        if config.form == "gated_attention":
            if shape.rope is not None:
                shape.require_pairs()
            self.rope = shape.rope
            self.attention = nn.Linear(width, 3 * width)
            self.attention_norm = HeadNorm(head_width)
        self.out = nn.Linear(width, width)

    @property
    def gate_maps(self) -> tuple[str, ...]:
        """Names of the existing gate maps."""
        return tuple(name for name in ("rate", "momentum", "forget") if hasattr(self, name))

    @property
    def own_init(self) -> frozenset[str]:
        return frozenset(f"{name}.bias" for name in self.gate_maps)

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on gate biases and on the memory's initial network.

        It would pull gates to α = ½, and the memory to one without gradient.
        """
        biases = {f"{name}.bias": False for name in self.gate_maps}
        return biases | ({"first_HFK": False} if self.config.memory == "mlp" else {})

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` and ``attention`` are three matrices each."""
        width = self.out.in_features
        return {name: (width,) * 3 for name in ("qkv", "attention") if hasattr(self, name)}

    @classmethod
    def state_size(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        """Count M, S, the convolution's last inputs, and the window's keys and values.

        With chunks longer than 1, M at the chunk's start counts too.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: positions read so far.
        """
        size = 0
        if config.memory != "none":
            memory = shape.heads * shape.head_width * shape.head_width
            if config.memory == "mlp":
                memory = 2 * shape.heads * shape.head_width * hidden_width(config, shape)
            size += memory * (config.states + (config.chunk_length > 1)) + (config.conv - 1) * 3 * shape.width
        if config.form == "gated_attention":
            size += 2 * shape.width * min(config.window, num_positions)
        return size

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count projections, convolution, the memory's block products and the window's band.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        width, count = shape.width, num_positions * shape.width**2
        if config.form == "gated_attention":
            block = window_block(config.window, num_positions)
            pairs = -(-num_positions // block) * block * (block + min(config.window, num_positions))
            count += 3 * num_positions * width**2 + 2 * pairs * width
        if config.memory != "none":
            num_gates = config.states + config.forgetting
            count += num_positions * width * (3 * width + 3 * min(config.conv, num_positions) + num_gates * shape.heads)
            count += shape.heads * memory_cost(config, shape, num_positions)
        return float(count)

    def forward(self, x_BND: Float[Tensor, "B N D"], *, mask_BN: Tensor | None = None) -> Float[Tensor, "B N D"]:
        """Return the recall, or attention gated by the recall: (B, N, D) → (B, N, D)."""
        x_BND = without_padding(x_BND, mask_BN)
        if self.config.form == "memory_only":
            return self._join_heads(self.norm(self.recall(x_BND, mask_BN=mask_BN)))
        y_BHNK = self.attention_norm(self._attend(x_BND, mask_BN))
        if self.config.memory != "none":
            with in_float32(x_BND.device):
                y_BHNK = y_BHNK * self.norm(self.recall(x_BND, mask_BN=mask_BN)).sigmoid()
        return self._join_heads(y_BHNK)

    def recall(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N K"]:
        """Return M_t(q_t) per head, in float32 or wider."""
        read_BNE = F.silu(at_least_float32(self.conv(self.qkv(x_BND), mask_BN=mask_BN)))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in read_BNE.chunk(3, -1))
        gates, chunk = self.gates(x_BND, mask_BN), min(self.config.chunk_length, x_BND.shape[1])
        with in_float32(x_BND.device):
            q, k = l2_normalise(q), l2_normalise(k)
            if self.config.memory == "linear":
                return linear_memory(q, k, v, gates, chunk)
            return mlp_memory(q, k, v, self.first_HFK, gates, chunk, self.config.activation)

    def gates(self, x_BND: Tensor, mask_BN: Tensor | None) -> Gates:
        """Return α, η and θ per head, in float32 or wider; padding has no effect."""
        with in_float32(x_BND.device):
            x_BND = at_least_float32(x_BND)
            rate_BNH = self.config.largest_rate * self.rate(x_BND).sigmoid()
            kept_BNH, carried_BNH = torch.zeros_like(rate_BNH), None
            if self.config.forgetting:
                kept_BNH = F.logsigmoid(-self.forget(x_BND))
            if self.config.momentum:
                carried_BNH = math.log(self.config.momentum) + F.logsigmoid(self.momentum(x_BND))
        gates = Gates(kept_BNH, carried_BNH, rate_BNH, torch.ones_like(rate_BNH))
        if mask_BN is not None:
            gates = gates.map(lambda part: part.masked_fill(~mask_BN[..., None], 0.0))
        return gates.map(lambda part: part.transpose(1, 2))

    def _attend(self, x_BND: Tensor, mask_BN: Tensor | None) -> Float[Tensor, "B H N K"]:
        parts = self.attention(x_BND).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.rope is not None:
            q, k = self.rope(q), self.rope(k)
        dropped = self.dropout if self.training else 0.0
        return attend_window(q[:, :, None], k, v, self.config.window, mask_BN, dropped)[:, :, 0]

    def _join_heads(self, y_BHNK: Tensor) -> Float[Tensor, "B N D"]:
        return self.out(y_BHNK.transpose(1, 2).flatten(2))


def hidden_width(config: Any, shape: MixerShape) -> int:
    """Return F, the hidden width of a two-layer memory."""
    return config.hidden * shape.head_width


def memory_cost(config: Any, shape: MixerShape, num_positions: int) -> int:
    """Return the multiply-adds of one head's memory.

    Per block: unrolled gates, products of keys and queries with the state and with each other, and writes.

    Args:
        config: the mechanism's settings.
        shape: width and heads.
        num_positions: N.
    """
    chunk, states, width = min(config.chunk_length, num_positions), config.states, shape.head_width
    length = linear_block(num_positions, chunk) if config.memory == "linear" else chunk
    unrolling = length**3 + length**2 if config.momentum else 0
    if config.memory == "linear":
        reading = length**2 * (2 * width if length > chunk else width) + 2 * length * states * width**2
        solving = length**3 + length**2 * width if length > chunk else 0  # the inverse, and its product
        writing = length**2 * width + length * states * width**2 + states**2 * width**2
        of_block = unrolling + reading + solving + writing
    else:
        hidden = hidden_width(config, shape)
        layers = width * hidden * (3 * length + 2 * length * states + 2 * length * states + 2 * states**2)
        pairs = length**2 * (width + hidden) + length**2 * (hidden + width)
        of_block = unrolling + layers + pairs
    return -(-num_positions // length) * of_block


EXPORT = Titans
