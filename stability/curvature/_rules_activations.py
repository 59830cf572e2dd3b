"""Second-order rules of activations and rarer elementary functions: formulas for (g, g′, g″)."""

from __future__ import annotations

import math

import torch

from stability.curvature._jet import NoRule, jet, parts, register_aten_rule, replace_value, value_of
from stability.curvature._rules_pointwise import compose, register_pointwise


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


@register_pointwise("silu")
def _silu(x):
    s = x.sigmoid()
    t = s * (1 - s)
    return x * s, s + x * t, t * (2 + x * (1 - 2 * s))


@register_pointwise("log_sigmoid")
def _log_sigmoid(x):
    s = x.neg().sigmoid()
    return torch.nn.functional.logsigmoid(x), s, -s * (1 - s)


@register_aten_rule("log_sigmoid_forward")
def _log_sigmoid_forward(func, args, kwargs):
    # the second output is a buffer for a backward pass only
    return replace_value(func(value_of(args[0]))[0], compose(args[0], _log_sigmoid)), None


@register_pointwise("softplus")
def _softplus(x, beta=1, threshold=20):
    scaled = x * beta
    s = scaled.sigmoid()
    bend = (s * (1 - s)).mul_(beta).masked_fill_(scaled >= threshold, 0)  # at the threshold itself as in autograd
    return torch.nn.functional.softplus(x, beta, threshold), s.masked_fill_(scaled > threshold, 1), bend


@register_pointwise("gelu")
def _gelu(x, *, approximate="none"):
    if approximate == "tanh":
        return _gelu_tanh(x)
    square = x * x
    density = torch.add(x.new_full((), -0.5 * math.log(2 * math.pi)), square, alpha=-0.5).exp_()
    share = torch.add(x.new_full((), 0.5), torch.mul(x, math.sqrt(0.5)).erf_(), alpha=0.5)
    return x * share, share.addcmul(x, density), torch.rsub(square, 2).mul_(density)


def _gelu_tanh(x):
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    inner = (square * cubic + 1) * x * scale
    inner_slope = (square * (3 * cubic) + 1) * scale
    t = inner.tanh()
    t_slope = (1 - t * t) * inner_slope
    t_bend = (1 - t * t) * (6 * cubic * scale * x) - 2 * t * t_slope * inner_slope
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * t_slope), t_slope + 0.5 * x * t_bend


@register_pointwise("mish")
def _mish(x):
    s, t = x.sigmoid(), torch.nn.functional.softplus(x).tanh()
    t_slope = (1 - t * t) * s
    t_bend = t_slope * (1 - s - 2 * t * s)
    return x * t, t + x * t_slope, 2 * t_slope + x * t_bend


@register_pointwise("relu")
def _relu(x):
    return x.relu(), (x > 0).to(x.dtype), None


@register_pointwise("leaky_relu")
def _leaky_relu(x, negative_slope=0.01):
    return (
        torch.nn.functional.leaky_relu(x, negative_slope),
        torch.full_like(x, negative_slope).masked_fill_(x > 0, 1),
        None,
    )


@register_pointwise("elu")
def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    tail = (x.clamp(max=0) * input_scale).exp() * (alpha * scale * input_scale)
    positive = x > 0
    value = torch.where(positive, x * scale, (x.clamp(max=0) * input_scale).expm1() * (alpha * scale))
    # autograd has no second derivative at 0
    return value, tail.masked_fill(positive, scale), (tail * input_scale).masked_fill(x >= 0, 0)


@register_pointwise("celu")
def _celu(x, alpha=1.0):
    return _elu(x, alpha, 1.0, 1 / alpha)


@register_pointwise("hardswish")
def _hardswish(x):
    inside = (x > -3) & (x < 3)
    return (
        torch.nn.functional.hardswish(x),
        torch.where(inside, (2 * x + 3) / 6, (x >= 3).to(x.dtype)),
        inside.to(x.dtype) / 3,
    )


@register_pointwise("hardsigmoid")
def _hardsigmoid(x):
    return torch.nn.functional.hardsigmoid(x), ((x > -3) & (x < 3)).to(x.dtype) / 6, None


@register_pointwise("hardtanh")
def _hardtanh(x, min_val=-1.0, max_val=1.0):
    """Pass derivatives between the bounds, but not at them, as autograd does."""
    return torch.nn.functional.hardtanh(x, min_val, max_val), ((x > min_val) & (x < max_val)).to(x.dtype), None


@register_pointwise("threshold")
def _threshold(x, threshold, value):
    return torch.nn.functional.threshold(x, threshold, value), (x > threshold).to(x.dtype), None


@register_pointwise("hardshrink")
def _hardshrink(x, lambd=0.5):
    return torch.nn.functional.hardshrink(x, lambd), _mark_outside(x, lambd), None


@register_pointwise("softshrink")
def _softshrink(x, lambd=0.5):
    return torch.nn.functional.softshrink(x, lambd), _mark_outside(x, lambd), None


def _mark_outside(x, lambd):
    """Return 1 beyond ±λ, else 0; at ±λ as in autograd."""
    return ((x > lambd) | (x < -lambd)).to(x.dtype)


@register_aten_rule("glu")
def _glu(func, args, kwargs):
    a, b = args[0].chunk(2, args[1] if len(args) > 1 else -1)
    return a * b.sigmoid()


@register_aten_rule("_prelu_kernel")
def _prelu(func, args, kwargs):
    x, slope = args
    return torch.where(x > 0, x, x * slope)
