"""Linear attention with decay, computed in chunks by matrix products.

S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ and y_t = S_tᵀ q_t (Yang et al. 2024, arXiv:2312.06635, section 4).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stability.config.impl import Use
from stability.mechanisms._base import MixerShape
from stability.models.passes import at_least_float32, in_float32


def gated_linear_attention(
    q_BHNK: Float[Tensor, "... N K"],
    k_BHNK: Float[Tensor, "... N K"],
    v_BHNV: Float[Tensor, "B H N V"],
    log_decay: Float[Tensor, "... N width"],
    *,
    chunk: int,
) -> Float[Tensor, "B H N V"]:
    """Return y_t = Σ_{j ≤ t} (q_t ⊙ e^(L_t − L_j))·k_j v_j with L_t = Σ_{l ≤ t} ln a_l.

    Computed in float32 or wider. B and H may be 1 in all arguments but v. ln a = 0 and k = 0 (or v = 0) at padding
    leave the state unchanged. Time and memory are linear in N.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        log_decay: ln a ≤ 0, (B, H, N, K) per key feature, or (B, H, N, 1) shared by all, which is cheaper.
        chunk: positions computed at once; does not change the result.
    """
    # Within a chunk the sum is explicit; earlier positions enter by the state at the chunk's start. Only differences of
    # L are exponentiated, all of them ≤ 0, so nothing overflows however strong the decay.
    with in_float32(v_BHNV.device):
        num = v_BHNV.shape[2]
        chunk = min(chunk, num)
        parts = (q_BHNK, k_BHNK, v_BHNV, log_decay)
        q_BHMCK, k_BHMCK, v_BHMCV, log_decay = (_split_into_chunks(at_least_float32(part), chunk) for part in parts)
        until = log_decay.cumsum(-2)  # from the chunk's start, each position's own decay included
        whole, between = until[..., -1:, :], _sum_between(log_decay)
        y_BHMCV = _scores(q_BHMCK, k_BHMCK, between) @ v_BHMCV
        written_BHMKV = (k_BHMCK * between[..., -1, :, :].exp()).mT @ v_BHMCV
        before_BHMKV = _carry_states(whole.exp().mT, written_BHMKV)
        y_BHMCV = y_BHMCV + (q_BHMCK * until.exp()) @ before_BHMKV
        return y_BHMCV.flatten(2, 3)[:, :, :num]


def _split_into_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x (B, H, N, …) as (B, H, M, C, …), padded with zeros: no writes, no decay."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def _sum_between(log_decay: Float[Tensor, "B H M C width"]) -> Float[Tensor, "B H M C C width"]:
    """Return Σ_{j < l ≤ i} ln a_l for pairs j ≤ i in each chunk, −∞ for others."""
    num = log_decay.shape[-2]
    not_later_CC = torch.ones(num, num, dtype=torch.bool, device=log_decay.device).triu()  # [i, j]: i ≤ j
    of_i = log_decay[..., :, None, :].expand(*log_decay.shape[:-1], num, log_decay.shape[-1])
    # one sum per pair: after strong decay L_i − L_j would be a small difference between large numbers
    summed = of_i.masked_fill(not_later_CC[..., None], 0.0).cumsum(-3)
    return summed.masked_fill(not_later_CC.triu(1)[..., None], -torch.inf)


def _scores(q_BHMCK: Tensor, k_BHMCK: Tensor, between: Tensor) -> Float[Tensor, "B H M C C"]:
    """Return Σ_K q_i k_j e^(L_i − L_j) for pairs j ≤ i in each chunk, 0 for others."""
    if between.shape[-1] == 1:
        return (q_BHMCK @ k_BHMCK.mT) * between[..., 0].exp()
    return (q_BHMCK[..., :, None, :] * between.exp() * k_BHMCK[..., None, :, :]).sum(-1)


def _carry_states(kept: Tensor, written_BHMKV: Float[Tensor, "B H M K V"]) -> Float[Tensor, "B H M K V"]:
    """Return the state at each chunk's start: S ← a S + w, from zero.

    ``kept``: a, the chunk's total decay, (…, M, K, 1) or (…, M, 1, 1).
    """
    state_BHKV = torch.zeros_like(written_BHMKV[:, :, 0])
    states = [state_BHKV]
    for kept_of_one, written_BHKV in list(zip(kept.unbind(2), written_BHMKV.unbind(2), strict=True))[:-1]:
        state_BHKV = kept_of_one * state_BHKV + written_BHKV
        states.append(state_BHKV)
    return torch.stack(states, 2)


def products(heads: int, keys: int, values: int, num_positions: int, chunk: int) -> float:
    """Return the multiply-adds in `gated_linear_attention` for one sequence.

    Within a chunk: the scores and their product with the values. Between chunks: writing and reading the state. The
    last chunk counts in full, as computed.

    Args:
        heads: H.
        keys: key width per head.
        values: value width per head.
        num_positions: N.
        chunk: positions per chunk.
    """
    chunk = min(chunk, num_positions)
    computed = -(-num_positions // chunk) * chunk
    return float(computed * heads * (chunk * (keys + values) + 2 * keys * values))


def split_heads(x_BND: Tensor, heads: int) -> Float[Tensor, "B H N K"]:
    """Split head-major features into heads, (B, H, N, K)."""
    return x_BND.unflatten(-1, (heads, -1)).transpose(1, 2)


def share_of_head(share: float, shape: MixerShape | Use) -> int:
    """Return ``share`` times the head width, rounded, at least 1."""
    return max(1, round(share * shape.head_width))


def zero_padding(x_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return values or log-decays with zeros at padding, so that sums ignore padding."""
    return x_BHNK if mask_BN is None else x_BHNK.masked_fill(~mask_BN[:, None, :, None], 0.0)
