"""Second-order rule of F.scaled_dot_product_attention, in blocks of query rows.

No N×N matrix of derivatives is ever stored whole. In the causal case a block's keys end at its last row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    Component,
    fill_missing,
    jet,
    map_components,
    parts,
    register_aten_rule,
    register_rule,
)
from stability.curvature._rules_products import matmul
from stability.curvature._rules_reductions import softmax_parts

# scores of one block, all heads and sequences together: 1 MiB in float32, for each of about eight buffers
SCORES = 1 << 18
_MIN_ROWS = 16


@register_aten_rule("_fused_sdp_choice")
def _math_backend(func, args, kwargs):
    return 0  # SDPBackend.MATH: torch decomposes the calls declined by the rule below


@register_rule(F.scaled_dot_product_attention)
def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Return softmax(qKᵀ·scale + mask) V, or decline a call with dropout."""
    # with dropout, torch's own decomposition draws the same mask, on whole matrices
    if dropout_p > 0 or min(query.ndim, key.ndim, value.ndim) < 3:
        return NotImplemented
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (
        _flatten_batch(map_components(lambda part: part * factor, query), batch),
        _flatten_batch(key, batch),
        _flatten_batch(value, batch),
    )
    mask = _Mask(parts(attn_mask), batch, is_causal)
    num_rows, num_keys = q.shape[-2], k.shape[-2]
    step = max(SCORES // max(q.shape[0] * num_keys, 1), _MIN_ROWS)
    starts = range(0, max(num_rows, 1), step)
    blocks = [_block(q, k, v, mask, slice(start, min(start + step, num_rows))) for start in starts]
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
    return map_components(lambda part: part.reshape(*batch, *part.shape[-2:]).to(query.dtype), out)


def _flatten_batch(x: Tensor, batch: torch.Size) -> Tensor:
    """Return a jet with one batch axis, in float32 at least, like the scores of fused kernels."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return map_components(lambda part: part.expand(*batch, *part.shape[-2:]).reshape(-1, *part.shape[-2:]).to(wide), x)


def _block(q: Tensor, k: Tensor, v: Tensor, mask: _Mask, rows: slice) -> Tensor:
    """Return the outputs of some query rows."""
    seen = min(rows.stop, k.shape[-2]) if mask.causal else k.shape[-2]
    scores = matmul(map_components(lambda part: part[:, rows], q), map_components(lambda part: part[:, :seen].mT, k))
    return matmul(mask.softmax(scores, rows, seen), map_components(lambda part: part[:, :seen], v))


@dataclass
class _Mask:
    """A mask added to the scores: boolean, additive or causal.

    Boolean: False hides a key. Additive: with derivatives if it is learned. Causal: row i attends to keys up to i.
    """

    parts: tuple[Component, Component, Component]
    batch: torch.Size
    causal: bool

    def softmax(self, scores: Tensor, rows: slice, keys: int) -> Tensor:
        """Return the softmax of masked scores, overwriting them; a row without any key gives zeros.

        Args:
            scores: one block's.
            rows: the block's query rows.
            keys: number of leading keys in the block.
        """
        s0, *moves = parts(scores)
        found: list[Any] = [s0, *moves]
        for index, part in enumerate(self.parts):
            if part is None:
                continue
            if part.ndim > 1:
                part = part[..., rows if part.shape[-2] > 1 else slice(None), :keys]
            found[index] = fill_missing(found[index], s0)
            whole = found[index].view(*self.batch, *s0.shape[-2:])
            whole.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else whole.add_(part)
        if self.causal:
            row, column = (torch.arange(*span, device=s0.device) for span in ((rows.start, rows.stop), (0, keys)))
            s0.masked_fill_(column > row[:, None], -torch.inf)
        dead = None if self.parts[0] is None else s0.amax(-1, keepdim=True) == -torch.inf
        return jet(*softmax_parts(*found, dead=dead))
