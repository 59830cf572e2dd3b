"""Second-order rules of losses and of F.scaled_dot_product_attention.

Cross entropy is computed in blocks of rows, without a second matrix of logits; attention in blocks of query rows, so
that no N×N matrix of derivatives is ever stored whole. In the causal case a block's keys end at its last row.
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
    Jet,
    NoRule,
    add,
    fill_missing,
    jet,
    map_components,
    multiply,
    parts,
    register_aten_rule,
    register_rule,
    value_of,
)
from stability.curvature._rules_pointwise import PIECE
from stability.curvature._rules_products import matmul
from stability.curvature._rules_reductions import softmax_parts


@register_rule(F.cross_entropy)
def _cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """Carry the cross entropy of class indices along a matrix's last axis."""
    # torch decomposes the rarer forms
    plain = not isinstance(weight, Jet) and size_average is None and reduce is None and target.dtype == torch.int64
    if not plain or input.ndim != 2 or not isinstance(input, Jet):
        return NotImplemented
    if label_smoothing:
        return _smooth(input, target, weight, ignore_index, reduction, label_smoothing)
    if weight is not None:
        return NotImplemented
    kept = target != ignore_index
    safe = torch.where(kept, target, 0)
    losses = [torch.empty(len(target), dtype=input.dtype, device=input.device) for _ in range(3)]
    z0, z1, z2 = parts(input)
    wide = torch.promote_types(input.dtype, torch.float32)
    step = max(PIECE // input.shape[1], 1)
    for start in range(0, len(target), step):
        rows = slice(start, start + step)
        first, second = (None if z is None else z[rows].to(wide) for z in (z1, z2))
        block = _nll_rows(z0[rows].to(wide), first, second, safe[rows, None])
        for out, piece in zip(losses, block, strict=True):
            out[rows] = piece
    value, first, second = (loss.masked_fill_(~kept, 0) for loss in losses)
    return _total(jet(value, first, second), kept, reduction)


def _smooth(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, smoothing: float
) -> Any:
    """Return (1 − s)·w_y(−log p_y) + s/C·Σ_c w_c(−log p_c) by row, or reduced."""
    log_p, kept = logits.log_softmax(-1), target != ignore_index
    safe = torch.where(kept, target, 0)
    counts = kept.to(logits.dtype) if weight is None else weight[safe] * kept
    chosen = log_p.gather(-1, safe[:, None]).squeeze(-1)
    spread = (log_p if weight is None else log_p * weight).mean(-1)
    loss = (-(1 - smoothing) * chosen * counts - smoothing * spread).masked_fill(~kept, 0)
    return _total(loss, counts, reduction)  # a mean divides by Σ w_y of the rows counted


def _total(loss: Tensor, counts: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / counts.sum()


def _nll_rows(z0: Tensor, z1: Component, z2: Component, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (L, L′, L″) of each row."""
    # L = lse(z) − z_y, L′ = ⟨p,z′⟩ − z′_y, L″ = ⟨p, z″ + (z′ − ⟨p,z′⟩)²⟩ − z″_y (facts 8)
    log_p = torch.log_softmax(z0, -1)
    value = -log_p.gather(-1, target).squeeze(-1)
    p = log_p.exp_()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    if z1 is not None:
        mean = (p * z1).sum(-1, keepdim=True)
        first = (mean - z1.gather(-1, target)).squeeze(-1)
        second = (z1 - mean).square_().mul_(p).sum(-1)
    if z2 is not None:
        second = second + (p * z2).sum(-1) - z2.gather(-1, target).squeeze(-1)
    return value, first, second


@register_aten_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(func, args, kwargs):
    """Carry the negative log-likelihood, linear in the log-probabilities."""
    x, target, weight, reduction, ignore_index = args
    value, first, second = parts(x)
    result, total = func(value, target, weight, reduction, ignore_index)
    pieces = (
        None if part is None else func(part, target, weight, reduction, ignore_index)[0] for part in (first, second)
    )
    return jet(result, *pieces), total


@register_aten_rule("mse_loss")
def _mse_loss(func, args, kwargs):
    return _reduce((args[0] - args[1]).square(), args[2] if len(args) > 2 else 1)


@register_aten_rule("binary_cross_entropy")
def _bce(func, args, kwargs):
    """Return the binary cross entropy without weights."""
    (p0, p1, p2), target = parts(args[0]), args[1]
    if (len(args) > 2 and args[2] is not None) or isinstance(target, Jet):
        raise NoRule("taylor has no rule for binary_cross_entropy with weights or with targets that move")
    # 1e-12: torch's own, in its first and in its second derivative
    slope = (p0 - target) / (p0 * (1 - p0)).clamp_min(1e-12)
    bend = (p0 * p0 - 2 * p0 * target + target) / ((p0 + 1e-12) * (1 - p0 + 1e-12)) ** 2
    second = add(multiply(slope, p2), multiply(multiply(bend, p1), p1))
    loss = jet(F.binary_cross_entropy(p0, target, reduction="none"), multiply(slope, p1), second)
    return _reduce(loss, args[3] if len(args) > 3 else 1)


@register_aten_rule("smooth_l1_loss", "huber_loss")
def _huber(func, args, kwargs):
    """Return the Huber loss: quadratic within δ, linear beyond; smooth_l1 is huber / δ."""
    delta = args[3] if len(args) > 3 else 1.0
    gap = args[0] - args[1]
    size = gap.abs()  # its derivative at 0 is 0, so the square uses the gap itself
    loss = torch.where(value_of(size) < delta, 0.5 * gap * gap, delta * (size - 0.5 * delta))
    return _reduce(loss if "huber" in func.overloadpacket.__name__ else loss / delta, args[2] if len(args) > 2 else 1)


@register_aten_rule("binary_cross_entropy_with_logits")
def _bce_with_logits(func, args, kwargs):
    """Return max(x, 0) − xy + log(1 + e^−|x|) = softplus(x) − xy."""
    x, target = args[:2]
    weight, positive = (args[index] if len(args) > index else None for index in (2, 3))
    # with weights w of the positives: (1 − y)x + (1 + (w − 1)y)·softplus(−x)
    loss = (
        F.softplus(x) - x * target
        if positive is None
        else (1 - target) * x + (1 + (positive - 1) * target) * F.softplus(-x)
    )
    return _reduce(loss if weight is None else loss * weight, args[4] if len(args) > 4 else 1)


def _reduce(loss: Any, reduction: int) -> Any:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


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
        """Return the softmax of masked scores, overwriting them; a row without any key gives zeros."""
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
