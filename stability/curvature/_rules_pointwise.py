"""Second-order rules of scalar functions: y = g(x), y′ = g′x′, y″ = g″x′² + g′x″.

They are computed piece by piece, so temporaries stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import (
    ATEN_RULES,
    AUTOCAST,
    Component,
    Jet,
    NoRule,
    Rule,
    fill_missing,
    jet,
    map_components,
    parts,
    register_aten_rule,
    replace_value,
    value_of,
)


def compute_in_float32(rule: Rule) -> Rule:
    """Compute a rule of x in float32 if x is bfloat16 or float16.

    The result is rounded once, as in torch's kernels.
    """

    @wraps(rule)
    def compute_rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return rule(x, *args, **kwargs)
        result = rule(map_components(Tensor.float, x), *args, **kwargs)
        return map_components(lambda part: part.to(x.dtype), result)

    return compute_rule


def refuse_complex(name: str, *tensors: Any) -> None:
    """Raise `NoRule` if a tensor is complex and the function has no complex derivative.

    For such a function, f(z + t·u) is not g(t).
    """
    if any(isinstance(x, Tensor) and x.is_complex() for x in tensors):
        raise NoRule(f"taylor has no rule for {name} of complex numbers")


def _cast(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a floating tensor in ``dtype`` (default: autocast's) if autocast is on; float64 unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x
    wanted = torch.get_autocast_dtype(device) if dtype is None else dtype
    return map_components(lambda part: part.to(wanted), x)


def _cast_on_gpus(x: Any) -> Any:
    return _cast(x, torch.float32) if isinstance(x, Tensor) and x.device.type != "cpu" else x


_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm)
AUTOCAST.update(dict.fromkeys((*_MATRIX_PRODUCTS, Tensor.bmm, F.linear, F.scaled_dot_product_attention), _cast))
AUTOCAST[F.cross_entropy] = partial(_cast, dtype=torch.float32)
_WIDE_ON_GPUS = (F.cosine_similarity, torch.cosine_similarity, F.rms_norm, torch.rms_norm)
AUTOCAST.update(dict.fromkeys(_WIDE_ON_GPUS, _cast_on_gpus))
# these also have an ATen rule; torch calls it with arguments cast by autocast
_LEFT = (torch.einsum, F.layer_norm, torch.layer_norm, torch.sum, Tensor.sum)
AUTOCAST.update(dict.fromkeys((*_LEFT, torch.cumsum, Tensor.cumsum), None))


PIECE = 1 << 15  # elements at a time: about eight temporaries of 128 KiB in float32
Formula = Callable[..., tuple[Tensor, Any, Any]]  # x, *args -> g, g′, g″, each a tensor or a number; None is zero


@compute_in_float32
def compose(x: Jet, formula: Formula, *args: Any, **kwargs: Any) -> Tensor:
    """Return g(x) as a jet, with the strides of torch's own result.

    The strides matter because dropout draws its mask in the order of memory.

    Args:
        x: a jet.
        formula: (x, *args) -> (g, g′, g″).
        *args: further arguments of the formula.
        **kwargs: its keyword arguments.
    """
    out = [torch.empty_like(x.value) for _ in range(3)]
    order = sorted(range(x.ndim), key=out[0].stride, reverse=True)
    x0, x1, x2 = parts(map_components(lambda part: part.permute(order).reshape(-1), x))
    y0, y1, y2 = (part.permute(order).view(-1) for part in out)
    for start in range(0, max(len(x0), 1), PIECE):
        piece = slice(start, start + PIECE)
        g, slope, bend = formula(x0[piece], *args, **kwargs)
        y0[piece] = g
        _chain(None if x1 is None else x1[piece], None if x2 is None else x2[piece], slope, bend, y1[piece], y2[piece])
    return jet(*out)


def _chain(x1: Component, x2: Component, slope: Any, bend: Any, y1: Tensor, y2: Tensor) -> None:
    """Write y1 ← g′x′ and y2 ← g″x′² + g′x″."""
    if x1 is None or slope is None:
        y1.zero_()
    else:
        torch.mul(x1, slope, out=y1)
    if x1 is None or bend is None:
        y2.zero_()
    else:
        torch.mul(x1, bend, out=y2).mul_(x1)
    if x2 is not None and slope is not None:
        y2.addcmul_(x2, slope) if isinstance(slope, Tensor) else y2.add_(x2, alpha=slope)


def register_pointwise(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula (x, *args) -> (g, g′, g″) for ATen operations.

    They have one tensor argument; the others are numbers.
    """

    def register(formula: Formula) -> Formula:
        def rule(func: Any, args: Any, kwargs: Any) -> Any:
            if any(isinstance(other, Tensor) for other in (*args[1:], *kwargs.values())) or not isinstance(
                args[0], Jet
            ):
                raise NoRule(f"taylor has no rule for {func} with tensors as parameters")
            return compose(args[0], formula, *args[1:], **kwargs)

        ATEN_RULES.update({getattr(torch.ops.aten, name): rule for name in names})
        return formula

    return register


@register_pointwise("exp")
def _exp(x):
    y = x.exp()
    return y, y, y


@register_pointwise("expm1")
def _expm1(x):
    y = x.exp()
    return x.expm1(), y, y


@register_pointwise("exp2")
def _exp2(x):
    y, log2 = x.exp2(), math.log(2)
    return y, y * log2, y * log2**2


@register_pointwise("log")
def _log(x):
    r = x.reciprocal()
    return x.log(), r, -r * r


@register_pointwise("log2")
def _log2(x):
    r = x.reciprocal() / math.log(2)
    return x.log2(), r, -r / x


@register_pointwise("log1p")
def _log1p(x):
    r = (x + 1).reciprocal()
    return x.log1p(), r, -r * r


@register_pointwise("sqrt")
def _sqrt(x):
    y = x.sqrt()
    slope = 0.5 / y
    return y, slope, -0.5 * slope / x


@register_pointwise("rsqrt")
def _rsqrt(x):
    y = x.rsqrt()
    slope = -0.5 * y / x
    return y, slope, -1.5 * slope / x


@register_pointwise("reciprocal")
def _reciprocal(x):
    y = x.reciprocal()
    return y, -y * y, 2 * y * y * y


@register_pointwise("sin")
def _sin(x):
    y = x.sin()
    return y, x.cos(), -y


@register_pointwise("cos")
def _cos(x):
    y = x.cos()
    return y, -x.sin(), -y


@register_pointwise("sinh")
def _sinh(x):
    y = x.sinh()
    return y, x.cosh(), y


@register_pointwise("cosh")
def _cosh(x):
    y = x.cosh()
    return y, x.sinh(), y


@register_pointwise("atan")
def _atan(x):
    slope = (x * x + 1).reciprocal()
    return x.atan(), slope, -2 * x * slope * slope


@register_pointwise("tanh")
def _tanh(x):
    y = x.tanh()
    slope = 1 - y * y
    return y, slope, -2 * y * slope


@register_pointwise("sigmoid")
def _sigmoid(x):
    y = x.sigmoid()
    slope = y * (1 - y)
    return y, slope, slope * (1 - 2 * y)


@register_pointwise("erf")
def _erf(x):
    slope = (-x * x).exp() * (2 / math.sqrt(math.pi))
    return x.erf(), slope, -2 * x * slope


@register_pointwise("abs")
def _abs(x):
    refuse_complex("abs", x)
    return x.abs(), x.sign(), None


@register_pointwise("square")
def _square(x):
    return x * x, 2 * x, 2.0


@register_aten_rule("pow")
def _pow(func, args, kwargs):
    """Return x^p for a number p, or exp(p·log x) for a jet p."""
    base, exponent = args
    if isinstance(base, Jet) and not isinstance(exponent, Tensor):
        return compose(base, _pow_number, exponent)
    if not isinstance(exponent, Jet):
        raise NoRule("taylor has no rule for a power whose exponent is a constant tensor")
    # needs x > 0 where p has a derivative, as in autograd
    power = (exponent * (base.log() if isinstance(base, Tensor) else math.log(base))).exp()
    return replace_value(func(value_of(base), exponent.value), power)


def _pow_number(x, exponent):
    return x.pow(exponent), _power(x, exponent, exponent - 1), _power(x, exponent * (exponent - 1), exponent - 2)


def _power(x: Tensor, factor: float, exponent: float) -> Any:
    """Return factor·x^exponent; a number if constant, so x = 0 gives no 0·∞."""
    if factor == 0 or exponent == 0:
        return float(factor) if factor else None
    return factor * (x if exponent == 1 else x.pow(exponent))


def _make_clamp_rule(name: str) -> Callable[..., Tensor]:
    """Return the rule of clamping to constants."""

    def rule(func, args, kwargs):
        if not isinstance(args[0], Jet) or any(isinstance(bound, Jet) for bound in (*args[1:], *kwargs.values())):
            raise NoRule(f"taylor has no rule for {name} with bounds that depend on the parameters")
        value = args[0].value
        clamped = func(value, *args[1:], **kwargs)
        # derivatives of clamped elements are cut: multiplied by 0, a NaN would remain
        _, first, second = parts(map_components(lambda part: torch.where(clamped == value, part, 0), args[0]))
        return jet(clamped, first, second)

    return rule


ATEN_RULES.update(
    {getattr(torch.ops.aten, name): _make_clamp_rule(name) for name in ("clamp", "clamp_min", "clamp_max")}
)


@register_aten_rule("remainder", "fmod", "frac")
def _remainder(func, args, kwargs):
    """Pass the derivatives of the first argument; refuse a modulus with derivatives."""
    if not isinstance(args[0], Jet) or any(isinstance(other, Jet) for other in args[1:]):
        raise NoRule(f"taylor has no rule for {func} with a modulus that depends on the parameters")
    value, first, second = parts(args[0])
    return jet(func(value, *args[1:]), first, second)


@register_aten_rule("nan_to_num")
def _nan_to_num(func, args, kwargs):
    """Replace non-finite elements by numbers of derivative zero."""
    value = args[0].value
    _, first, second = parts(map_components(lambda part: torch.where(value.isfinite(), part, 0), args[0]))
    return jet(func(value, *args[1:], **kwargs), first, second)


@register_aten_rule("maximum", "minimum")
def _extreme(func, args, kwargs):
    """Return the larger (smaller) of two; ties average both derivatives, as in autograd."""
    (a, a1, a2), (b, b1, b2) = parts(args[0]), parts(args[1])
    value = func(a, b)
    share = ((a == value).to(value.dtype) + 1 - (b == value).to(value.dtype)) / 2
    derivatives = []
    for x, y in ((a1, b1), (a2, b2)):
        both = (
            None
            if x is None and y is None
            else torch.where(share > 0, fill_missing(x, a) * share, 0)
            + torch.where(share < 1, fill_missing(y, b) * (1 - share), 0)
        )
        derivatives.append(both)
    return jet(value, *derivatives)
