"""Second-order rules of rarer elementary functions, with formulas for (g, g′, g″).

Functions of two numbers are included.
"""

from __future__ import annotations

import math

import torch

from stability.curvature._jet import NoRule, jet, parts, register_aten_rule, replace_value, value_of
from stability.curvature._rules_pointwise import register_pointwise


@register_pointwise("log10")
def _log10(x):
    r = x.reciprocal() / math.log(10)
    return x.log10(), r, -r / x


@register_pointwise("erfc")
def _erfc(x):
    slope = (-x * x).exp() * (-2 / math.sqrt(math.pi))
    return x.erfc(), slope, -2 * x * slope


@register_pointwise("tan")
def _tan(x):
    y = x.tan()
    slope = 1 + y * y
    return y, slope, 2 * y * slope


@register_pointwise("asin")
def _asin(x):
    slope = (1 - x * x).rsqrt()
    return x.asin(), slope, x * slope**3


@register_pointwise("acos")
def _acos(x):
    slope = -(1 - x * x).rsqrt()
    return x.acos(), slope, x * slope**3


@register_pointwise("asinh")
def _asinh(x):
    slope = (x * x + 1).rsqrt()
    return x.asinh(), slope, -x * slope**3


@register_pointwise("acosh")
def _acosh(x):
    slope = (x * x - 1).rsqrt()
    return x.acosh(), slope, -x * slope**3


@register_pointwise("atanh")
def _atanh(x):
    slope = (1 - x * x).reciprocal()
    return x.atanh(), slope, 2 * x * slope * slope


@register_aten_rule("logaddexp")
def _logaddexp(func, args, kwargs):
    """Return the larger plus softplus of the difference."""
    a, b = args
    above = parts(a)[0] >= parts(b)[0]  # a constant, so a tie has no kink
    larger, smaller = torch.where(above, a, b), torch.where(above, b, a)
    return larger + torch.nn.functional.softplus(smaller - larger)


@register_aten_rule("logit")
def _logit(func, args, kwargs):
    if len(args) > 1 and args[1] is not None:
        raise NoRule("taylor has no rule for logit with eps; clamp first")
    return args[0].log() - (-args[0]).log1p()


@register_aten_rule("xlogy")
def _xlogy(func, args, kwargs):
    return replace_value(func(*map(value_of, args)), args[0] * args[1].log())


@register_aten_rule("atan2")
def _atan2(func, args, kwargs):
    """Carry the angle of (x, y): θ′ = (y′x − yx′)/r²."""
    y, x = args
    (y0, *_), (x0, *_) = parts(y), parts(x)
    # up to a constant, θ is the arctangent of y/x, or minus that of x/y if |y| is larger
    steep = y0.abs() > x0.abs()
    ratio = torch.where(steep, x, y) / torch.where(steep, y, x)
    _, first, second = parts(torch.where(steep, -1.0, 1.0).to(y0.dtype) * ratio.atan())
    return jet(func(y0, x0), first, second)
