"""Compute linear attention with decay, S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t, chunk by chunk in matrix
products (Yang et al. 2024, arXiv:2312.06635, section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stability.mechanisms._base import MixerShape
from stability.mechanisms._impl import Use
from stability.models.precision import at_least_float32, in_float32


def decayed(
    q_BHNK: Float[Tensor, "... N K"],
    k_BHNK: Float[Tensor, "... N K"],
    v_BHNV: Float[Tensor, "B H N V"],
    log_decay: Float[Tensor, "... N width"],
    *,
    chunk: int,
) -> Float[Tensor, "B H N V"]:
    """Return y_t = Σ_{j ≤ t} (q_t ⊙ e^(L_t − L_j))·k_j v_j, where L_t = Σ_{l ≤ t} ln a_l: what each position reads of
    the state that its past has written, in float32 or wider.

    ``log_decay``: ln a ≤ 0, (B, H, N, K) with a decay of its own for each feature of the keys or (B, H, N, 1) with one
    for all of them, which is cheaper; B and H of all but v may be 1. ln a = 0 and k = 0 (or v = 0) at padding leave the
    state as it is. ``chunk``: how many positions are computed at once; the result does not depend on it. Only
    differences of L are raised to powers, all of them ≤ 0, so that nothing overflows however much is forgotten.

    Source: within a chunk the sum is written out; what lies before it is the state at its beginning, which goes from
    chunk to chunk. Time and memory are linear in N.
    """
    with in_float32(v_BHNV.device):
        num = v_BHNV.shape[2]
        chunk = min(chunk, num)
        parts = (q_BHNK, k_BHNK, v_BHNV, log_decay)
        q_BHMCK, k_BHMCK, v_BHMCV, log_decay = (_in_chunks(at_least_float32(part), chunk) for part in parts)
        until = log_decay.cumsum(-2)  # from the chunk's beginning, each position's own decay included
        whole, between = until[..., -1:, :], _between(log_decay)
        y_BHMCV = _scores(q_BHMCK, k_BHMCK, between) @ v_BHMCV
        written_BHMKV = (k_BHMCK * between[..., -1, :, :].exp()).mT @ v_BHMCV
        before_BHMKV = _at_the_beginnings(whole.exp().mT, written_BHMKV)
        y_BHMCV = y_BHMCV + (q_BHMCK * until.exp()) @ before_BHMKV
        return y_BHMCV.flatten(2, 3)[:, :, :num]


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return x (B, H, N, …) as (B, H, M, C, …), with zeros after the end: nothing is written there, and nothing
    forgotten."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def _between(log_decay: Float[Tensor, "B H M C width"]) -> Float[Tensor, "B H M C C width"]:
    """Return Σ_{j < l ≤ i} ln a_l of the pairs j ≤ i of each chunk, −∞ of the others. Each is a sum of its own: after
    one strong forgetting L_i − L_j would be a small difference of large numbers."""
    num = log_decay.shape[-2]
    not_later_CC = torch.ones(num, num, dtype=torch.bool, device=log_decay.device).triu()  # [i, j]: i ≤ j
    of_i = log_decay[..., :, None, :].expand(*log_decay.shape[:-1], num, log_decay.shape[-1])
    summed = of_i.masked_fill(not_later_CC[..., None], 0.0).cumsum(-3)
    return summed.masked_fill(not_later_CC.triu(1)[..., None], -torch.inf)


def _scores(q_BHMCK: Tensor, k_BHMCK: Tensor, between: Tensor) -> Float[Tensor, "B H M C C"]:
    """Return Σ_K q_i k_j e^(L_i − L_j) of the pairs j ≤ i of each chunk, 0 of the others."""
    if between.shape[-1] == 1:
        return (q_BHMCK @ k_BHMCK.mT) * between[..., 0].exp()
    return (q_BHMCK[..., :, None, :] * between.exp() * k_BHMCK[..., None, :, :]).sum(-1)


def _at_the_beginnings(kept: Tensor, written_BHMKV: Float[Tensor, "B H M K V"]) -> Float[Tensor, "B H M K V"]:
    """Return the state at each chunk's beginning, zero at the first's: S ← a S + w from chunk to chunk. ``kept``: a
    (…, M, K, 1) or (…, M, 1, 1), the whole chunk's decay."""
    state_BHKV = torch.zeros_like(written_BHMKV[:, :, 0])
    states = [state_BHKV]
    for kept_of_one, written_BHKV in list(zip(kept.unbind(2), written_BHMKV.unbind(2), strict=True))[:-1]:
        state_BHKV = kept_of_one * state_BHKV + written_BHKV
        states.append(state_BHKV)
    return torch.stack(states, 2)


def products(heads: int, keys: int, values: int, num_positions: int, chunk: int) -> float:
    """Return the multiply-adds of `decayed` for one sequence, of keys and values so wide in each head: within a chunk
    the scores and their product with the values, between chunks the state that is written and read; of whole chunks,
    as is computed."""
    chunk = min(chunk, num_positions)
    computed = -(-num_positions // chunk) * chunk
    return float(computed * heads * (chunk * (keys + values) + 2 * keys * values))


def of_heads(x_BND: Tensor, heads: int) -> Float[Tensor, "B H N K"]:
    """Return features that stand head by head as (B, H, N, K)."""
    return x_BND.unflatten(-1, (heads, -1)).transpose(1, 2)


def share_of_head(share: float, shape: MixerShape | Use) -> int:
    """Return how many features a head has of what is ``share`` times as wide as the model: a whole number, 1 or
    more."""
    return max(1, round(share * shape.head_width))


def nothing_at_padding(x_BHNK: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return what each position adds to a sum over the past, values or log-decays, with zeros where the mask is
    False."""
    return x_BHNK if mask_BN is None else x_BHNK.masked_fill(~mask_BN[:, None, :, None], 0.0)
