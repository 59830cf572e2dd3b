"""Second-order rules of softmax, norms and other reductions over an axis.

The most frequent ones run in blocks of rows, so temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    Component,
    Jet,
    NoRule,
    add,
    jet,
    map_components,
    parts,
    register_aten_rule,
    register_rule,
    replace_value,
    value_of,
)
from stability.curvature._rules_pointwise import PIECE, compute_in_float32, refuse_complex


def softmax_parts(
    s0: Tensor, s1: Component, s2: Component, dim: int = -1, dead: Tensor | None = None
) -> tuple[Tensor, Component, Component]:
    """Return p = softmax(s), p′ = p∘c₁ and p″ = p∘(q − ⟨p,q⟩).

    Here c₁ = s′ − ⟨p,s′⟩ and q = s″ + c₁² (facts 8). No argument is overwritten.

    Args:
        s0: s.
        s1: s′; None is zero.
        s2: s″; None is zero.
        dim: axis of the softmax.
        dead: rows without any finite score, which give zeros; None: all have one.
    """
    p = torch.softmax(s0, dim) if dead is None else torch.softmax(s0, dim).masked_fill_(dead, 0)
    if s1 is None:
        return p, None, None if s2 is None else _centre(s2, p, dim)
    centred = s1 - (p * s1).sum(dim, keepdim=True)
    q = centred * centred if s2 is None else torch.addcmul(s2, centred, centred)
    return p, centred.mul_(p), _centre(q, p, dim)


def _centre(q: Tensor, p: Tensor, dim: int) -> Tensor:
    """Return p∘(q − ⟨p,q⟩), softmax's own backward pass."""
    return torch._softmax_backward_data(q, p, dim, q.dtype)


@register_aten_rule("_softmax")
def _softmax(func, args, kwargs):
    x, dim, half_to_float = args
    return _softmax_of(x.float() if half_to_float else x, dim)


@compute_in_float32
def _softmax_of(x: Tensor, dim: int) -> Tensor:
    return jet(*softmax_parts(*parts(x), dim))


@register_aten_rule("_safe_softmax")
def _safe_softmax(func, args, kwargs):
    """Return a softmax with zeros, not NaN, for rows of −inf."""
    x, dim = args[0], args[1]
    dead = (x.value == -torch.inf).all(dim, keepdim=True)
    value, first, second = parts(x)
    return map_components(
        lambda part: part.masked_fill(dead, 0), jet(*softmax_parts(value.masked_fill(dead, 0), first, second, dim))
    )


@register_aten_rule("_log_softmax")
def _log_softmax(func, args, kwargs):
    """Return y = s − lse(s): lse′ = ⟨p,s′⟩, lse″ = ⟨p, s″ + (s′ − ⟨p,s′⟩)²⟩."""
    x, dim, half_to_float = args
    wide = x.float() if half_to_float else x
    return replace_value(func(x.value, dim, half_to_float), wide - _logsumexp_of(wide, [dim], True))


@register_aten_rule("logsumexp")
def _logsumexp(func, args, kwargs):
    return _logsumexp_of(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("keepdim", False))


@compute_in_float32
def _logsumexp_of(x: Tensor, dims: Any, keepdim: bool) -> Tensor:
    """Return lse(s) over ``dims`` as a jet: lse′ = ⟨p,s′⟩, lse″ = ⟨p, s″ + (s′ − ⟨p,s′⟩)²⟩, p = softmax(s)."""
    s0, s1, s2 = parts(x)
    dims = [dims] if isinstance(dims, int) else list(dims)
    value = torch.logsumexp(s0, dims, keepdim=True)
    p = (s0 - value).exp()
    mean, q = None, s2
    if s1 is not None:
        mean = (p * s1).sum(dims, keepdim=True)
        q = add(s2, (s1 - mean).square())
    result = jet(value, mean, None if q is None else (p * q).sum(dims, keepdim=True))
    if keepdim:
        return result
    kept = [size for axis, size in enumerate(value.shape) if axis not in {dim % value.ndim for dim in dims}]
    return map_components(lambda part: part.reshape(kept), result)


def _rows(x: Tensor, width: int) -> Iterator[tuple[slice, tuple[Tensor, Component, Component]]]:
    """Yield blocks of rows of ``width`` elements, each with its slice."""
    value, first, second = parts(map_components(lambda part: part.reshape(-1, width), x))
    step = max(PIECE // width, 1)
    for start in range(0, value.shape[0], step):
        block = slice(start, start + step)
        yield block, (value[block], None if first is None else first[block], None if second is None else second[block])


@register_rule(F.layer_norm, torch.layer_norm)
def _layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return _normalize(x, normalized_shape, weight, bias, eps, centred=True)


@register_aten_rule("native_layer_norm")
def _native_layer_norm(func, args, kwargs):
    x, shape, weight, bias, eps = args
    # mean and 1/σ serve a backward pass only
    return _normalize(x, shape, weight, bias, eps, centred=True), None, None


@register_rule(F.rms_norm, torch.rms_norm)
def _rms_norm(x, normalized_shape, weight=None, eps=None):
    return _normalize(
        x, normalized_shape, weight, None, torch.finfo(x.dtype).eps if eps is None else eps, centred=False
    )


@register_aten_rule("_fused_rms_norm")
def _fused_rms_norm(func, args, kwargs):
    return _rms_norm(*args), None


@compute_in_float32
def _normalize(x: Any, shape: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Tensor:
    """Return n·γ + β with n = x/rms(x), or (x − mean)/deviation if ``centred``."""
    width = 1
    for size in shape:
        width *= size
    carries = isinstance(x, Jet)
    gains, biases = ([None if part is None else part.reshape(-1) for part in parts(item)] for item in (weight, bias))
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(3)]
    flat = [part.view(-1, width) for part in out]
    for block, (x0, x1, x2) in _rows(x, width):
        n0, n1, n2 = _unit_rows(x0, x1, x2, eps, centred)
        y0, y1, y2 = (part[block] for part in flat)
        _affine(n0, n1, n2, gains, biases, y0, y1, y2)
    return jet(*out) if carries or isinstance(weight, Jet) or isinstance(bias, Jet) else out[0]


def _unit_rows(
    x0: Tensor, x1: Component, x2: Component, eps: float, centred: bool
) -> tuple[Tensor, Component, Component]:
    """Return n, n′, n″ of n = c·r with r = (⟨c²⟩ + ε)^(−1/2)."""
    mean = x0.mean(-1, keepdim=True) if centred else None
    c = x0 if mean is None else x0 - mean
    scale = (c.square().mean(-1, keepdim=True) + eps).rsqrt_()
    n = c * scale

    def differentiate(x: Tensor) -> Tensor:
        """Return the derivative of n along x; it is symmetric, so with a mean torch has it as a backward pass."""
        if mean is None:
            return torch.addcmul(x * scale, n, (n * x).mean(-1, keepdim=True) * -scale)
        given = x.contiguous(), x0.contiguous(), x0.shape[-1:], mean, scale, None, None
        return torch.ops.aten.native_layer_norm_backward(*given, [True, False, False])[0]

    bent = None if x2 is None else differentiate(x2)
    if x1 is None:
        return n, None, bent
    # with s = r⟨nx′⟩: n″ = (derivative of n along x″) − 2sn′ − n(⟨n′²⟩ + εr²s²)
    n1, s = differentiate(x1), (n * x1).mean(-1, keepdim=True) * scale
    pull = n1.square().mean(-1, keepdim=True).addcmul_(scale * s, scale * s, value=eps)
    bent = n1 * (-2 * s) if bent is None else bent.addcmul_(n1, s, value=-2)
    return n, n1, bent.addcmul_(n, pull, value=-1)


def _affine(n0, n1, n2, gains, biases, y0, y1, y2) -> None:
    """Write y = nγ + β and its derivatives into y0, y1, y2."""
    # y′ = n′γ + nγ′ + β′, y″ = n″γ + 2n′γ′ + nγ″ + β″
    (g0, g1, g2), (b0, b1, b2) = gains, biases
    one = 1 if g0 is None else g0
    _sum_of(y0, b0, (n0, one, 1))
    _sum_of(y1, b1, (n1, one, 1), (n0, g1, 1))
    _sum_of(y2, b2, (n2, one, 1), (n1, g1, 2), (n0, g2, 1))


def _sum_of(out: Tensor, bias: Component, *terms: tuple[Component, Any, int]) -> None:
    """Write bias + Σ factor·n·gain into ``out``; None is zero."""
    total: Any = bias
    for n, gain, factor in terms:
        if n is None or gain is None:
            continue
        if not isinstance(gain, Tensor):
            total = torch.mul(n, gain, out=out) if total is None else torch.add(total, n, alpha=gain, out=out)
        elif total is None:
            total = torch.mul(n, gain, out=out)
            total = total if factor == 1 else total.mul_(factor)
        else:
            total = torch.addcmul(total, n, gain, value=factor, out=out)
    if total is None:
        out.zero_()
    elif total is not out:
        out.copy_(total)


@register_aten_rule("native_group_norm")
def _group_norm(func, args, kwargs):
    x, weight, bias, batch, channels, size, groups, eps = args
    shape = x.shape
    n = _normalize(x.reshape(batch, groups, -1), [channels // groups * size], None, None, eps, centred=True).reshape(
        shape
    )
    broadcast = (1, channels, *[1] * (len(shape) - 2))
    n = n if weight is None else n * weight.reshape(broadcast)
    n = n if bias is None else n + bias.reshape(broadcast)
    return replace_value(func(*map(value_of, args))[0], n), None, None


@register_aten_rule("var", "std")
def _var(func, args, kwargs):
    x, dims = args[0], args[1] if len(args) > 1 else None
    refuse_complex("the variance", x)
    dims = list(range(x.ndim)) if not dims else [dims] if isinstance(dims, int) else list(dims)
    correction, keepdim = kwargs.get("correction", 1), kwargs.get("keepdim", False)
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    centred = x - x.mean(dims, keepdim=True)
    variance = (centred * centred).sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))
    return _root(variance) if "std" in func.overloadpacket.__name__ else variance


def _root(square: Tensor) -> Tensor:
    """Return √square with zero derivatives at 0; a norm or deviation has none there."""
    zero = value_of(square) == 0
    return map_components(lambda part: part.masked_fill(zero, 0), square.sqrt())


@register_aten_rule("var_mean", "std_mean")
def _var_mean(func, args, kwargs):
    x, *rest = args
    spread = torch.std if "std" in func.overloadpacket.__name__ else torch.var
    dims = rest[0] if rest else None
    return spread(x, dims, **kwargs), x.mean(dims, keepdim=kwargs.get("keepdim", False))


@register_aten_rule("logcumsumexp")
def _logcumsumexp(func, args, kwargs):
    """Return the running log-sum-exp from running sums of e^(x − max)."""
    x, dim = args
    top = x.value.amax(dim, keepdim=True)  # of the whole axis, as a constant
    return (x - top).exp().cumsum(dim).log() + top


@register_aten_rule("linalg_vector_norm", "norm")
def _vector_norm(func, args, kwargs):
    """Return the Euclidean or absolute norm, with zero derivatives at a zero vector."""
    x, order = args[0], args[1] if len(args) > 1 else 2
    refuse_complex("the norm", x)
    dims = args[2] if len(args) > 2 else None
    dims = list(range(x.ndim)) if dims is None else dims
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if order == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if order not in (2, None):
        raise NoRule(f"taylor has no rule for norms of order {order}")
    return _root((x * x).sum(dims, keepdim=keepdim))


@register_rule(F.cosine_similarity, torch.cosine_similarity)
def _cosine_similarity(x1, x2, dim=1, eps=1e-8):
    lengths = [torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (x1, x2)]
    return ((x1 / lengths[0]) * (x2 / lengths[1])).sum(dim)


@register_aten_rule("amax", "amin")
def _amax(func, args, kwargs):
    """Return the largest (smallest); ties share its derivative equally, as in autograd."""
    x, dims = args[0], list(args[1]) if len(args) > 1 else []
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return _share_ties(x, func(x.value, dims, keepdim), [dim % x.ndim for dim in dims or range(x.ndim)], keepdim)


def _share_ties(x: Jet, chosen: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Return ``chosen`` with the mean derivative of the elements equal to it along ``dims``."""
    whole = chosen if keepdim else chosen.reshape([1 if axis in dims else n for axis, n in enumerate(x.shape)])
    share = ((x.value == whole) | x.value.isnan() & whole.isnan()).to(x.dtype)
    share = share / share.sum(dims, keepdim=True)
    return replace_value(
        chosen, map_components(lambda part: torch.where(share > 0, part * share, 0).sum(dims, keepdim=keepdim), x)
    )


@register_aten_rule("max", "min", "topk", "sort", "kthvalue", "cummax", "cummin", "median", "nanmedian", "mode")
def _gather_chosen(func, args, kwargs):
    """Return (values, indices) with the derivatives at the chosen indices."""
    x = args[0]
    result = func(x.value, *args[1:], **kwargs)
    if isinstance(result, Tensor):  # over all elements: ties share the derivative, as in autograd
        return _share_ties(x, result, list(range(x.ndim)), False)
    indices = result[1]
    default = -1 if func.overloadpacket in (torch.ops.aten.topk, torch.ops.aten.sort) else 0
    position = {"topk": 2, "kthvalue": 2}.get(func.overloadpacket.__name__, 1)
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    if indices.ndim == x.ndim:
        chosen = map_components(lambda part: part.gather(dim, indices), x)
    else:
        chosen = map_components(lambda part: part.gather(dim, indices.unsqueeze(dim)).squeeze(dim), x)
    return type(result)((replace_value(result[0], chosen), indices))
