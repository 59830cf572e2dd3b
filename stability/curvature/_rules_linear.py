"""Rules of operations that are linear in the differentiated argument.

Each component passes through the operation itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    ATEN_RULES,
    FUNCTION_RULES,
    Component,
    Jet,
    NoRule,
    fill_missing,
    jet,
    map_components,
    parts,
    register_aten_rule,
    register_rule,
)

_LINEAR = """
expand slice select t transpose permute unsqueeze squeeze diagonal unfold alias sum mean cumsum flip roll repeat tril triu index_select gather index clone
_to_copy neg split split_with_sizes unsafe_split unbind trace diag_embed avg_pool1d avg_pool2d im2col _fft_r2c _fft_c2c _fft_c2r view_as_real
view_as_complex real imag _conj movedim pixel_shuffle lift_fresh take_along_dim rot90 _neg_view select_backward slice_backward nansum
take masked_select _unsafe_index col2im deg2rad rad2deg reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
upsample_nearest1d upsample_nearest2d upsample_nearest3d
"""
# The same operations as called by users. Caught here, they skip torch's dispatcher, which costs more than an operation
# on small tensors.
_LINEAR_CALLS = """
__getitem__ unflatten flatten t transpose permute unsqueeze squeeze split chunk unbind narrow select flip sum mean expand repeat roll cumsum neg
"""
# Comparisons, indices and other operations with derivative zero: a plain tensor results, from the values alone.
_CONSTANT = """
eq ne lt le gt ge isnan isinf isfinite sign floor ceil round trunc argmax argmin argsort bitwise_not logical_not logical_and logical_or
logical_xor zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full new_empty_strided
bernoulli signbit searchsorted bucketize count_nonzero nonzero any all isclose floor_divide histc multinomial heaviside
"""


def components(x: Any, index: int) -> Any:
    """Return component ``index`` of every jet in a nested argument.

    A missing component becomes zeros. Anything but a jet is unchanged.
    """
    if isinstance(x, Jet):
        return fill_missing(parts(x)[index], x.value)
    return type(x)(components(item, index) for item in x) if isinstance(x, (list, tuple)) else x


def _has_jet(x: Any) -> bool:
    return isinstance(x, Jet) or (isinstance(x, (list, tuple)) and any(map(_has_jet, x)))


def _linear(func, args, kwargs):
    if not isinstance(args[0], Jet) or any(map(_has_jet, (*args[1:], *kwargs.values()))):
        raise NoRule(f"taylor has no rule for {func} with derivatives in its other arguments")
    return _apply_by_component(func, args, kwargs)


def _apply_by_component(func, args, kwargs):
    results: list[Any] = [None if part is None else func(part, *args[1:], **kwargs) for part in parts(args[0])]
    if isinstance(results[0], Tensor):
        return jet(*results)
    pieces = ([None] * len(results[0]) if result is None else result for result in results)
    return type(results[0])(jet(*piece) for piece in zip(*pieces, strict=True))


def _linear_call(func, x, *args, **kwargs):
    if not isinstance(x, Jet) or any(map(_has_jet, (*args, *kwargs.values()))):
        return NotImplemented
    return _apply_by_component(func, (x, *args), kwargs)


def _constant(func, args, kwargs):
    return func(*(components(arg, 0) for arg in args), **kwargs)


for _rule, _names in ((_linear, _LINEAR), (_constant, _CONSTANT)):
    ATEN_RULES.update(
        {getattr(torch.ops.aten, name): _rule for name in _names.split() if hasattr(torch.ops.aten, name)}
    )
for _name in _LINEAR_CALLS.split():
    FUNCTION_RULES.update(
        {call: partial(_linear_call, call) for home in (Tensor, torch) if (call := getattr(home, _name, None))}
    )


@register_aten_rule("view", "_unsafe_view", "_reshape_alias", "reshape")
def _view(func, args, kwargs):
    if isinstance(args[1], torch.dtype):
        raise NoRule("taylor has no rule for a view as another dtype")
    return map_components(
        lambda part: part.reshape(args[1]), args[0]
    )  # no view: the components may be strided otherwise


@register_aten_rule("constant_pad_nd")
def _pad(func, args, kwargs):
    padded = map_components(lambda part: func(part, args[1]), args[0])
    _, first, second = parts(padded)
    return jet(func(parts(args[0])[0], *args[1:], **kwargs), first, second)


@register_aten_rule("add", "sub", "rsub")
def _add(func, args, kwargs):
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    value = func(a, b, alpha=alpha)
    signs = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[func.overloadpacket.__name__.split(".")[-1]]
    return jet(value, *(_combine(x, y, signs) for x, y in ((a1, b1), (a2, b2))))


@register_rule(Tensor.add, torch.add)
def _add_call(a, b, **kwargs):
    return (
        _add(torch.ops.aten.add.Tensor, (a, b), kwargs)
        if isinstance(a, Tensor) and "out" not in kwargs
        else NotImplemented
    )


@register_rule(Tensor.sub, torch.sub)
def _sub_call(a, b, **kwargs):
    return (
        _add(torch.ops.aten.sub.Tensor, (a, b), kwargs)
        if isinstance(a, Tensor) and "out" not in kwargs
        else NotImplemented
    )


def _combine(x: Component, y: Component, signs: tuple[float, float]) -> Component:
    if x is None or y is None:
        part, sign = (y, signs[1]) if x is None else (x, signs[0])
        return part if part is None or sign == 1 else part * sign
    return torch.add(x if signs[0] == 1 else x * signs[0], y, alpha=signs[1])


@register_aten_rule("cat", "stack")
def _cat(func, args, kwargs):
    """Concatenate each component; a tensor without derivatives contributes zeros."""
    derivatives = (
        None if all(parts(x)[k] is None for x in args[0]) else _apply_with_zeros(func, args, kwargs, k) for k in (1, 2)
    )
    return jet(func(components(args[0], 0), *args[1:], **kwargs), *derivatives)


def _apply_with_zeros(func, args, kwargs, index: int) -> Tensor:
    pieces = [components(x, index) if isinstance(x, Jet) else torch.zeros_like(x) for x in args[0]]
    return func(pieces, *args[1:], **kwargs)


@register_aten_rule("where")
def _where(func, args, kwargs):
    if len(args) < 3 or isinstance(args[0], Jet):
        raise NoRule("taylor has no rule for torch.where without two branches")
    condition, a, b = args
    derivatives = []
    for index in (1, 2):
        x, y = parts(a)[index], parts(b)[index]
        derivatives.append(
            None if x is None and y is None else torch.where(condition, 0 if x is None else x, 0 if y is None else y)
        )
    return jet(torch.where(condition, parts(a)[0], parts(b)[0]), *derivatives)


@register_aten_rule("masked_fill")
def _masked_fill(func, args, kwargs):
    """Replace masked elements by the filling; their derivatives, even −inf or NaN, are lost."""
    x, mask, filling = args
    value = func(parts(x)[0], mask, parts(filling)[0])
    derivatives = []
    for index in (1, 2):
        a, b = parts(x)[index], parts(filling)[index]
        derivatives.append(
            None if a is None and b is None else func(fill_missing(a, value), mask, 0 if b is None else b)
        )
    return jet(value, *derivatives)


@register_aten_rule("embedding")
def _embedding(func, args, kwargs):
    """Gather rows of a table; the padding row has no gradient, as in torch."""
    weight, indices, *rest = args
    value, first, second = parts(weight)
    padding = rest[0] if rest else kwargs.get("padding_idx", -1)
    rows = [None if part is None else torch.embedding(part, indices) for part in (first, second)]
    if padding >= 0:
        rows = [None if part is None else part.masked_fill_((indices == padding)[..., None], 0) for part in rows]
    return jet(torch.embedding(value, indices), *rows)


@register_aten_rule(
    "index_add",
    "scatter_add",
    "index_put",
    "scatter",
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "index_copy",
)
def _write_into(func, args, kwargs):
    """Write a tensor into a copy of another; linear in both."""
    if kwargs.get("reduce", "add") != "add":
        raise NoRule(f"taylor has no rule for {func} with reduce={kwargs['reduce']!r}")
    named = {name: item for name, item in kwargs.items() if not isinstance(item, Jet)}
    if len(named) < len(kwargs):
        raise NoRule(f"taylor has no rule for {func} with derivatives in keyword arguments")
    derivatives = []
    for index in (1, 2):
        some = any(isinstance(arg, Jet) and parts(arg)[index] is not None for arg in args)
        derivatives.append(func(*(_derivative(arg, index) for arg in args), **named) if some else None)
    return jet(func(*(components(arg, 0) for arg in args), **named), *derivatives)


def _derivative(arg: Any, index: int) -> Any:
    if isinstance(arg, Tensor) and not isinstance(arg, Jet) and arg.is_floating_point():
        return torch.zeros_like(arg)
    if isinstance(arg, float):
        return 0.0
    return components(arg, index)


@register_rule(F.dropout, torch.dropout)
def _dropout(x, p=0.5, training=True, inplace=False, *, train=None):
    """Draw torch's mask and apply it to all components; identity outside training."""
    if not (training if train is None else train) or p == 0:
        return x
    if inplace or not isinstance(x, Jet):
        raise NoRule("taylor has no rule for dropout in place")
    mask = torch.dropout(torch.ones_like(x.value), p, True)
    return map_components(lambda part: part * mask, x)


@register_rule(Tensor.contiguous)
def _contiguous(x, memory_format=torch.contiguous_format):
    return map_components(lambda part: part.contiguous(memory_format=memory_format), x)
