"""Second-order rules of activation functions: formulas for (g, g′, g″)."""

from __future__ import annotations

import math

import torch

from stability.curvature._jet import register_aten_rule, replace_value, value_of
from stability.curvature._rules_pointwise import compose, register_pointwise


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
