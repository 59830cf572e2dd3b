"""Rules of whole layers, composed from other rules.

Batch and instance norm, weight norm, max-pooling, and the rarer products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    Jet,
    NoRule,
    map_components,
    parts,
    register_aten_rule,
    register_rule,
    replace_value,
    value_of,
)
from stability.curvature._rules_pointwise import refuse_complex
from stability.curvature._rules_products import bilinear, matmul


@register_aten_rule("_native_batch_norm_legit_no_training")
def _batch_norm_eval(func, args, kwargs):
    """Return (x − running mean)·γ/√(running variance + ε) + β: affine in x."""
    x, weight, bias, mean, variance, _, eps = args
    unit = (x - _broadcast_channels(mean, x)) * _broadcast_channels((variance + eps).rsqrt(), x)
    return replace_value(func(*map(value_of, args))[0], _affine_of_channels(unit, weight, bias)), None, None


@register_aten_rule("_native_batch_norm_legit")
def _batch_norm_of_batch(func, args, kwargs):
    """Normalise with the batch's own mean and variance, without running ones."""
    # running statistics would be written to in training mode, and such a write is refused
    x, weight, bias, _, _, eps = args
    others = [axis for axis in range(x.ndim) if axis != 1]
    centred = x - x.mean(others, keepdim=True)
    scale = ((centred * centred).mean(others, keepdim=True) + eps).rsqrt()
    return replace_value(func(*map(value_of, args))[0], _affine_of_channels(centred * scale, weight, bias)), None, None


def _affine_of_channels(n: Tensor, weight: Any, bias: Any) -> Tensor:
    n = n if weight is None else n * _broadcast_channels(weight, n)
    return n if bias is None else n + _broadcast_channels(bias, n)


def _broadcast_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (like.ndim - 2))


@register_rule(torch._weight_norm)
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Return g·v/‖v‖ over every axis but ``dim``."""
    # torch's own second derivative is wrong, because it treats ‖v‖ as a constant (see `_graph`)
    axes = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    return v * (g / (v * v).sum(axes, keepdim=True).sqrt())


@register_aten_rule("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _max_pool(func, args, kwargs):
    """Gather the derivatives at the largest elements."""
    axes = 3 if "3d" in func.overloadpacket.__name__ else 2
    value, indices = func(args[0].value, *args[1:], **kwargs)
    chosen = map_components(
        lambda part: part.flatten(-axes).gather(-1, indices.flatten(-axes)).reshape(indices.shape), args[0]
    )
    return replace_value(value, chosen), indices


@register_aten_rule("vdot")
def _vdot(func, args, kwargs):
    refuse_complex("vdot", *args)
    return matmul(args[0], args[1])


@register_aten_rule("addbmm")
def _addbmm(func, args, kwargs):
    total = args[0] * kwargs.get("beta", 1) + matmul(args[1], args[2]).sum(0) * kwargs.get("alpha", 1)
    return replace_value(func(*map(value_of, args), **kwargs), total)


@register_aten_rule("addr")
def _addr(func, args, kwargs):
    return args[0] * kwargs.get("beta", 1) + args[1][:, None] * args[2] * kwargs.get("alpha", 1)


@register_aten_rule("linalg_cross")
def _cross(func, args, kwargs):
    return bilinear(lambda a, b: func(a, b, **kwargs), args[0], args[1])


@register_aten_rule("index_fill")
def _index_fill(func, args, kwargs):
    x, dim, index, filling = args
    if isinstance(filling, Jet) or not isinstance(x, Jet):
        raise NoRule("taylor has no rule for index_fill with a filling that depends on the parameters")
    mask = torch.zeros_like(x.value, dtype=torch.bool).index_fill_(dim, index, True)
    return replace_value(func(x.value, dim, index, filling), x.masked_fill(mask, filling))


@register_aten_rule("scatter_reduce")
def _scatter_reduce(func, args, kwargs):
    """Carry sums and means, linear in both tensors; their counts are constants."""
    x, dim, index, source, reduce = args
    if reduce not in ("sum", "mean"):
        raise NoRule(f"taylor has no rule for scatter_reduce with reduce={reduce!r}")
    return _apply_linear(lambda a, b: func(a, dim, index, b, reduce, **kwargs), x, source)


def _apply_linear(function: Any, x: Any, y: Any) -> Tensor:
    """Return function(x, 0) + function(0, y) for each component."""
    left = map_components(lambda part: function(part, torch.zeros_like(parts(y)[0])), x)
    return left + map_components(lambda part: function(torch.zeros_like(parts(x)[0]), part), y)


@register_aten_rule("fmax", "fmin")
def _fmax(func, args, kwargs):
    """Return the larger (smaller); a NaN loses, a tie goes to the first, as in autograd."""
    a, b = args
    a0, b0 = value_of(a), value_of(b)
    first = a0 >= b0 if "fmax" in func.overloadpacket.__name__ else a0 <= b0
    return torch.where(first | b0.isnan(), a, b)


@register_aten_rule("aminmax")
def _aminmax(func, args, kwargs):
    x, dim, keepdim = args[0], kwargs.get("dim"), kwargs.get("keepdim", False)
    axes = list(range(x.ndim)) if dim is None else [dim]
    return x.amin(axes, keepdim), x.amax(axes, keepdim)


@register_rule(F.bilinear, torch.bilinear)
def _bilinear_layer(x1, x2, weight, bias=None):
    """Return y_o = x1ᵀ W_o x2 + b_o; shapes (…, I), (O, I, J) and (…, J)."""
    inner = matmul(weight, x2.unsqueeze(-2).mT.unsqueeze(-3)).squeeze(-1)
    y = (inner * x1.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias
