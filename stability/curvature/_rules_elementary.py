"""Second-order rules of the rarer elementary functions, as formulas for (g, g′, g″)."""

from __future__ import annotations

import math

from stability.curvature._rules_pointwise import pointwise


@pointwise("log10")
def _log10(x):
    r = x.reciprocal() / math.log(10)
    return x.log10(), r, -r / x


@pointwise("erfc")
def _erfc(x):
    slope = (-x * x).exp() * (-2 / math.sqrt(math.pi))
    return x.erfc(), slope, -2 * x * slope


@pointwise("tan")
def _tan(x):
    y = x.tan()
    slope = 1 + y * y
    return y, slope, 2 * y * slope


@pointwise("asin")
def _asin(x):
    slope = (1 - x * x).rsqrt()
    return x.asin(), slope, x * slope**3


@pointwise("acos")
def _acos(x):
    slope = -(1 - x * x).rsqrt()
    return x.acos(), slope, x * slope**3


@pointwise("asinh")
def _asinh(x):
    slope = (x * x + 1).rsqrt()
    return x.asinh(), slope, -x * slope**3


@pointwise("acosh")
def _acosh(x):
    slope = (x * x - 1).rsqrt()
    return x.acosh(), slope, -x * slope**3


@pointwise("atanh")
def _atanh(x):
    slope = (1 - x * x).reciprocal()
    return x.atanh(), slope, 2 * x * slope * slope
