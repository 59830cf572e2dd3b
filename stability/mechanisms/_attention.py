"""Softmax attention with rotary positions, the base class of `sa`, `sw`, `attentionx` and others."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from stability.config import Settings
from stability.config.identity import Since
from stability.config.impl import Use
from stability.mechanisms._base import CAUSAL, MixerShape, without_padding
from stability.mechanisms._observed import AbstractAttention
from stability.models.passes import at_least_float32
from stability.models.position import Decays

WIDEST_HEAD = 128  # of kernels.band_attention
QK_NORM = (
    "norm of each head's queries and keys before rotation, its gains learned and shared by heads; model.qk_bias acts "
    "before it"
)


class QKNormSettings(Settings):
    """Setting of the norms of queries and keys, shared by the mechanisms with a softmax of q·k."""

    qk_norm: Annotated[Literal["none", "layernorm", "rmsnorm"], Since("none")] = Field(
        default="none", description=QK_NORM
    )

    def make_norms(self, head_width: int) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the norms of one head's queries and keys, with ε = 1e-5 and gains of 1; None without ``qk_norm``."""
        kinds = {"layernorm": nn.LayerNorm, "rmsnorm": _RMSNorm}
        kind = kinds.get(self.qk_norm)
        return (None, None) if kind is None else (kind(head_width, eps=1e-5), kind(head_width, eps=1e-5))


class DotProductSettings(QKNormSettings):
    """Settings of the logits, shared by the mechanisms with an `AbstractDotProductAttention`."""

    softcap: Annotated[float | None, Since(None)] = Field(
        default=None,
        gt=0,
        description="c: each logit z becomes c·tanh(z/c) before the mask, by explicit weights; Gemma 2: 50; null: none",
    )

    @model_validator(mode="after")
    def _check_one_factor(self) -> DotProductSettings:
        if self.qk_norm != "none" and getattr(self, "temperature", "fixed") == "learned":
            raise ValueError(
                f"qk_norm={self.qk_norm} learns the size of q·k by its gains, and so does temperature=learned; leave "
                "one of the two out"
            )
        return self


class AbstractDotProductAttention(AbstractAttention):
    """Attention that scores pairs by `logits`, q̃·k̃ / √K.

    ``qkv`` projects to queries, keys and values. A subclass implements `forward` with torch's fused attention. It
    overrides `visible` unless all pairs, or j ≤ i if causal, are visible. `weights` computes the same softmax
    explicitly, N² numbers per head. Dropout on A applies in training mode only (`dropped`), and never in `weights`. A
    subclass that changes `split`, `logits` or `mixed` must also adapt `projections` or ``gamma``.

    Attributes:
        gamma: γ, one number, if the heads' output is the discrepancy v − γAv; None if it is Av.
        mask_diagonal: True if no position attends to itself.
        log_temperature: t, if q·k has a learned factor e^t instead of 1/√K (Lee et al. 2021, arXiv:2112.13492, 3.2);
            else None.
        q_norm: norm of each head's queries before rotation (``qk_norm``); None without.
        k_norm: that of its keys.
        softcap: bound c of the logits, which are then c·tanh(z/c); None without.
        decays: decays of q·k by distance (position=hope); None without.
        kv_heads: number of key and value heads, smaller than ``heads`` for grouped queries (Ainslie et al. 2023,
            arXiv:2305.13245). Query head h then uses key-value head h // (heads / kv_heads), and ``qkv`` has D +
            2·kv_heads·K rows. All exposed tensors have all heads.
    """

    rows_sum_to_one = True
    gamma: float | Tensor | None
    mask_diagonal: bool = False
    decays: Decays | None = None
    log_temperature: nn.Parameter | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, config: Any, shape: MixerShape):
        super().__init__()
        if shape.rope is not None:
            shape.require_pairs()
        self.rope, self.heads, self.causal = shape.rope, shape.heads, shape.direction == CAUSAL
        self.dropout = shape.dropout
        self.kv_heads = self.kv_heads_of(config, shape.heads)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * self.kv_heads * shape.head_width)
        self.out = nn.Linear(shape.width, shape.width)
        # set per instance: a class attribute would prevent registering a parameter under this name
        self.gamma = self.log_temperature = None
        own = config if isinstance(config, DotProductSettings) else DotProductSettings()
        self.softcap = own.softcap
        self.q_norm, self.k_norm = own.make_norms(shape.head_width)

    @classmethod
    def kv_heads_of(cls, config: Any, heads: int) -> int:
        """Return the number of key and value heads, by default ``heads``."""
        return heads

    def learn_temperature(self) -> None:
        """Make the factor on q·k a parameter shared by all heads, initially 1/√K."""
        head_width = self.out.in_features // self.heads
        self.log_temperature = nn.Parameter(torch.full((1,), -0.5 * math.log(head_width)))

    @property
    def is_bilinear(self) -> bool:
        """Whether the logits are bilinear in W_q and W_k, apart from biases: not with ``qk_norm``."""
        return self.q_norm is None

    @property
    def own_decay(self) -> dict[str, bool]:
        """No weight decay on the learned factor: decay would pull it to 1."""
        return {} if self.log_temperature is None else {"log_temperature": False}

    @property
    def own_splits(self) -> dict[str, tuple[int, ...]]:
        """``qkv`` is three matrices: queries, keys and values."""
        of_queries = self.qkv.in_features
        of_keys = (self.qkv.out_features - of_queries) // 2
        return {"qkv": (of_queries, of_keys, of_keys)}

    @torch.no_grad()
    def start_local(self, bias: float) -> None:
        """Set equal biases of q and k, so that scores fall with distance.

        Under RoPE every pair gets the score b²·Σ_k cos θ_k(i − j) / √K.
        """
        of_values = self.own_splits["qkv"][-1]
        self.qkv.bias[:-of_values] = bias

    @property
    def dropped(self) -> float:
        """Dropout rate of attention weights now: 0 outside training mode."""
        return self.dropout if self.training else 0.0

    @classmethod
    def num_pairs(cls, config: Any, shape: MixerShape, num_positions: int) -> int | float:
        """Return the number of computed (query, key) pairs per sequence.

        A masked diagonal is computed like the rest.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        return num_positions * (num_positions + 1) // 2 if shape.direction == CAUSAL else num_positions**2

    @classmethod
    def cost(cls, config: Any, shape: MixerShape, num_positions: int) -> float:
        """Count the projections and two products with D per pair.

        The projections are 4·D² without grouped queries.

        Args:
            config: the mechanism's settings.
            shape: width, heads and direction.
            num_positions: N.
        """
        pairs = cls.num_pairs(config, shape, num_positions)
        of_keys = cls.kv_heads_of(config, shape.heads) * shape.head_width
        projections = 2 * num_positions * shape.width * (shape.width + of_keys)
        return float(projections + 2 * pairs * shape.width)

    @classmethod
    def num_kept(cls, config: Any, shape: MixerShape, num_positions: int) -> int:
        return cls.kv_heads_of(config, shape.heads) * num_positions

    def visible(self, num_positions: int, device: torch.device) -> Bool[Tensor, "N N"]:
        """Return the visible pairs (N, N): True if query i (first axis) sees key j.

        Assumes no padding. The shape is (H, N, N) if heads differ.
        """
        causal, mask_diagonal = self.causal, self.mask_diagonal
        return visible_pairs(num_positions, None, causal=causal, mask_diagonal=mask_diagonal, device=device)[0, 0]

    def projections(self) -> tuple[Float[Tensor, "H K D"], Float[Tensor, "H K D"]]:
        """Return W_q and W_k per head.

        Without rotation, biases and norms the logits are (W_q x)·(W_k x′) times 1/√K, or times e^t if learned.
        """
        of_heads_SKD = self.qkv.weight.unflatten(0, (self.heads + 2 * self.kv_heads, -1))
        w_q_HKD, w_k_GKD, _ = of_heads_SKD.split((self.heads, self.kv_heads, self.kv_heads))
        return w_q_HKD, self._repeat_per_query_head(w_k_GKD, 0)

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv`` into queries, keys and values, (B, H, N, K) each.

        Queries and keys are normed with ``qk_norm``, then rotated if the run uses RoPE. With a learned temperature
        queries are scaled by √K·e^t, since `logits` divides by √K.
        """
        qkv_BNSK = qkv_BND.unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        qk_BNSK, v_BNGK = qkv_BNSK.split((self.heads + self.kv_heads, self.kv_heads), 2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BNHK, k_BNGK = qk_BNSK.split((self.heads, self.kv_heads), 2)
            qk_BNSK = torch.cat([self.q_norm(q_BNHK), self.k_norm(k_BNGK)], 2)
        turned = qk_BNSK if self.rope is None else self.rope(qk_BNSK, position_dim=1)
        q_BHNK, k_BGNK = (
            part.transpose(1, 2) for part in turned.to(v_BNGK.dtype).split((self.heads, self.kv_heads), 2)
        )
        if self.log_temperature is not None:
            q_BHNK = q_BHNK * (self.log_temperature.exp() * math.sqrt(q_BHNK.shape[-1]))
        return q_BHNK, self._repeat_per_query_head(k_BGNK, 1), self._repeat_per_query_head(v_BNGK.transpose(1, 2), 1)

    def _repeat_per_query_head(self, of_kv_heads: Tensor, dim: int) -> Tensor:
        """Repeat key-value heads along ``dim``, one per query head."""
        group = self.heads // self.kv_heads
        return of_kv_heads if group == 1 else of_kv_heads.repeat_interleave(group, dim)

    def logits(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Float[Tensor, "... N J"]:
        """Return q̃_i·k̃_j / √K for all pairs, visible or not, capped with ``softcap``.

        The arguments are outputs of `split`.
        """
        return cap(multiply(q_BHNK, k_BHNK, self.decays) / math.sqrt(q_BHNK.shape[-1]), self.softcap)

    def values(self, x_BND: Tensor) -> Float[Tensor, "B H N K"]:
        return self.split(self.qkv(x_BND))[2]


class AbstractSoftmaxAttention(AbstractDotProductAttention):
    """Attention with A = softmax(`logits`) over visible keys; visibility does not depend on x."""

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Float[Tensor, "B H N N"]:
        q_BHNK, k_BHNK, _ = self.split(self.qkv(without_padding(x_BND, mask_BN)))
        visible = self.visible(x_BND.shape[1], x_BND.device)
        if mask_BN is not None:
            visible = visible & mask_BN[:, None, None]
        return self.logits(q_BHNK, k_BHNK).masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible, 0.0)


class _RMSNorm(nn.RMSNorm):
    """RMSNorm in float32 or wider, as torch's LayerNorm sums by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(at_least_float32(x))


def prepare(u: Tensor, norm: nn.Module | None, rope: Any, position_dim: int = -2) -> Tensor:
    """Return queries or keys, normed and then rotated, in their own dtype.

    Args:
        u: any shape with features last.
        norm: of each head's features; None without.
        rope: rotation; None without.
        position_dim: axis of the positions.
    """
    normed = u if norm is None else norm(u)
    return (normed if rope is None else rope(normed, position_dim=position_dim)).to(u.dtype)


def require_groups(mechanism: str, kv_heads: int | None, heads: int) -> None:
    """Raise if the query heads cannot be divided evenly among key-value heads.

    Args:
        mechanism: name for the message.
        kv_heads: number of key and value heads; None if not grouped.
        heads: number of query heads.

    Raises:
        ValueError: ``kv_heads`` does not divide ``heads``.
    """
    if kv_heads is not None and heads % kv_heads:
        choices = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ValueError(
            f"mechanism.{mechanism}.kv_heads={kv_heads} does not divide heads={heads}; choices: {choices}, null"
        )


def visible_pairs(
    num_positions: int, mask_BN: Tensor | None, *, causal: bool, mask_diagonal: bool, device: torch.device
) -> Bool[Tensor, "B 1 N N"]:
    """Return the visible pairs: True if a query (third axis) sees a key (fourth).

    Args:
        num_positions: N.
        mask_BN: True at valid positions; None without padding.
        causal: True if only keys j ≤ i are visible.
        mask_diagonal: True if only keys j ≠ i are visible.
        device: device for the result.

    Returns:
        (B, 1, N, N) booleans; B is 1 without padding.
    """
    visible_NN = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device)
    visible_NN = visible_NN.tril() if causal else visible_NN
    if mask_diagonal:
        visible_NN = visible_NN & ~torch.eye(num_positions, dtype=torch.bool, device=device)
    return visible_NN[None, None] if mask_BN is None else visible_NN & mask_BN[:, None, None]


def find_unsupported(use: Use) -> str | None:
    """Return the feature not supported by `kernels.band_attention`, or None."""
    if use.dropout > 0:
        return f"dropout of an attention's weights, {use.dropout:g}"
    return f"heads of width {use.head_width} > {WIDEST_HEAD}" if use.head_width > WIDEST_HEAD else None


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return c·tanh(z/c), between −c and c; z itself if ``softcap`` is None (Gemma 2, arXiv:2408.00118, 2)."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def multiply(q_BHNK: Tensor, k_BHNK: Tensor, decays: Decays | None) -> Tensor:
    """Return q̃k̃ᵀ, or its decayed form.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        decays: decays of the products by distance; None without.
    """
    return q_BHNK @ k_BHNK.mT if decays is None else decays(q_BHNK, k_BHNK)


def attend(
    q_BHNK: Tensor,
    k_BHNK: Tensor,
    v_BHNK: Tensor,
    visible: Tensor,
    dropped: float = 0.0,
    softcap: float | None = None,
    decays: Decays | None = None,
) -> Float[Tensor, "... N K"]:
    """Return softmax(q̃k̃ᵀ/√K) v over visible keys by torch's scaled_dot_product_attention.

    It can neither cap nor decay logits: with ``softcap`` or ``decays`` the weights are explicit. Rows without visible
    keys are zero, the empty sum.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNK: values.
        visible: booleans that broadcast to (…, N, N).
        dropped: dropout rate on softmax weights.
        softcap: bound of the logits, as in `cap`.
        decays: decays of the products by distance.
    """
    empty = ~visible.any(-1, keepdim=True)
    # Some softmaxes give NaN for an empty row: let the row see everything, then zero its output.
    seen = visible | empty
    if softcap is None and decays is None:
        attended_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=seen, dropout_p=dropped)
    else:
        logits = cap(at_least_float32(multiply(q_BHNK, k_BHNK, decays)) / math.sqrt(q_BHNK.shape[-1]), softcap)
        a_BHNN = F.dropout(logits.masked_fill(~seen, -math.inf).softmax(-1), dropped)
        attended_BHNK = a_BHNN.to(v_BHNK.dtype) @ v_BHNK
    return attended_BHNK.masked_fill(empty, 0.0)
