"""Second-order rule of F.scaled_dot_product_attention, in blocks of query rows.

No N×N matrix of derivatives is ever stored whole.

With scores s = qKᵀ: s′ = [q′, q]·[K, K′]ᵀ and s″ = [q″, 2q′, q]·[K, K′, K″]ᵀ are one product each over concatenated
features. The outputs o′ = [p′, p]·[V; V′] and o″ = [p″, p′, p]·[V; 2V′; V″] are one each over concatenated keys. In the
causal case a block's keys end at its last row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import Component, filled, jet, on, on_aten, parts

# scores of one block, all heads and sequences together: 1 MiB in float32, for each of about eight buffers
SCORES = 1 << 18
_MIN_ROWS = 16


@on_aten("_fused_sdp_choice")
def _math_backend(func, args, kwargs):
    return 0  # SDPBackend.MATH: torch decomposes the calls declined by the rule below


@on(F.scaled_dot_product_attention)
def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Return softmax(qKᵀ·scale + mask) V, or decline a call with dropout."""
    # with dropout, torch's own decomposition draws the same mask, on whole matrices
    if dropout_p > 0 or min(query.ndim, key.ndim, value.ndim) < 3:
        return NotImplemented
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    # in float32 at least, like the scores of fused kernels
    (q, q_moves), (k, k_moves), (v, v_moves) = (_flat(x, batch) for x in (query, key, value))
    mask = _Mask(parts(attn_mask), batch, is_causal)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = _blocks([part * factor for part in q], k, v, mask)
    out = [part.reshape(*batch, *part.shape[-2:]).to(query.dtype) for part in out]
    return jet(*out) if q_moves or k_moves or v_moves or mask.moves else out[0]


def _flat(x: Tensor, batch: torch.Size) -> tuple[list[Tensor], bool]:
    """Return (f, f′, f″) with one batch axis, and whether it has a derivative."""
    found = parts(x)
    full = [filled(part, found[0]) for part in found]
    wide = torch.promote_types(x.dtype, torch.float32)
    flat = [part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:]).to(wide) for part in full]
    return flat, any(part is not None for part in found[1:])


@dataclass
class _Mask:
    """A mask added to the scores: boolean, additive or causal.

    Boolean: False hides a key. Additive: with derivatives if it is learned. Causal: row i attends to keys up to i.
    """

    parts: tuple[Component, Component, Component]
    batch: torch.Size
    causal: bool

    @property
    def moves(self) -> bool:
        return any(part is not None for part in self.parts[1:])

    def add_to(self, scores: list[Tensor], rows: slice, keys: int) -> None:
        """Add the mask to s, s′ and s″ in place.

        Args:
            scores: s, s′ and s″ of one block.
            rows: the block's query rows.
            keys: number of leading keys in the block.
        """
        for score, part in zip(scores, self.parts, strict=True):
            if part is not None:
                block = (
                    part[..., rows if part.ndim > 1 and part.shape[-2] > 1 else slice(None), :keys]
                    if part.ndim > 1
                    else part[:keys]
                )
                whole = score.view(*self.batch, *score.shape[-2:])
                whole.masked_fill_(~block, -torch.inf) if block.dtype == torch.bool else whole.add_(block)
        if self.causal:
            row, column = (
                torch.arange(*span, device=scores[0].device) for span in ((rows.start, rows.stop), (0, keys))
            )
            scores[0].masked_fill_(column > row[:, None], -torch.inf)


def _blocks(q: list[Tensor], k: list[Tensor], v: list[Tensor], mask: _Mask) -> list[Tensor]:
    """Return o, o′, o″, each (batch, rows, width), computed in blocks of query rows."""
    keys, values = torch.cat(k, -1), torch.stack(v, 1)
    out = [torch.empty(*q[0].shape[:-1], v[0].shape[-1], dtype=v[0].dtype, device=v[0].device) for _ in range(3)]
    num_rows, num_keys = q[0].shape[-2], k[0].shape[-2]
    step = max(SCORES // max(q[0].shape[0] * num_keys, 1), _MIN_ROWS)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        seen = min(rows.stop, num_keys) if mask.causal else num_keys
        scores = _scores([part[:, rows] for part in q], keys[:, :seen])
        mask.add_to(scores, rows, seen)
        weights = _softmax_of(scores)
        del scores
        _write_outputs(weights, values[:, :, :seen], [part[:, rows] for part in out])
    return out


def _scores(q: list[Tensor], keys: Tensor) -> list[Tensor]:
    """Return s, s′ and s″ of one block; ``keys``: [K, K′, K″] along the features."""
    q0, q1, q2 = q
    width = q0.shape[-1]
    return [
        q0 @ keys[..., :width].mT,
        torch.cat([q1, q0], -1) @ keys[..., : 2 * width].mT,
        torch.cat([q2, 2 * q1, q0], -1) @ keys.mT,
    ]


def _softmax_of(scores: list[Tensor]) -> Tensor:
    """Return [p″, p′, p] as (batch, rows, 3, keys) by `softmax_parts`, overwriting the scores."""
    s0, s1, s2 = scores
    weights = torch.empty(*s0.shape[:-1], 3, s0.shape[-1], dtype=s0.dtype, device=s0.device)
    p2, p1, p = weights.unbind(-2)
    dead = s0.amax(-1, keepdim=True) == -torch.inf  # a row without any key gives zeros
    p.copy_(torch.softmax(s0, -1))
    if dead.any():
        p.masked_fill_(dead, 0)
    s1 -= torch.mul(p, s1, out=s0).sum(-1, keepdim=True)
    torch.mul(p, s1, out=p1)
    s2.addcmul_(s1, s1)
    s2 -= torch.mul(p, s2, out=s0).sum(-1, keepdim=True)
    torch.mul(p, s2, out=p2)
    return weights


def _write_outputs(weights: Tensor, values: Tensor, out: list[Tensor]) -> None:
    """Write o, o′ and o″; ``values``: V, V′ and V″ as (batch, 3, keys, width)."""
    o0, o1, o2 = out
    o0.copy_(weights[:, :, 2] @ values[:, 0])
    o1.copy_(weights[:, :, 1:].flatten(-2) @ values[:, :2].flatten(1, 2))
    doubled = values.clone()
    doubled[:, 1] *= 2
    o2.copy_(weights.flatten(-2) @ doubled.flatten(1, 2))
