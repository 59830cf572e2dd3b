"""The Taylor pass where rules go wrong unseen: at kinks, under other memory layouts, for complex numbers."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from stability.curvature import NoRule, directional
from stability.curvature._jet import Jet

from .operations import OPERATIONS

HALF, ONE = (torch.tensor([number], dtype=torch.float64) for number in (0.5, 1.0))
KINKS = {  # name -> (f, the points of one number at which it is not smooth)
    "relu": (F.relu, (0,)),
    "relu6": (F.relu6, (0, 6)),
    "hardtanh": (F.hardtanh, (-1, 1)),
    "hardtanh_of_bounds": (lambda x: F.hardtanh(x, -0.5, 0.5), (-0.5, 0.5)),
    "hardshrink": (F.hardshrink, (-0.5, 0.5)),
    "softshrink": (lambda x: F.softshrink(x, 0.25), (-0.25, 0.25)),
    "hardswish": (F.hardswish, (-3, 3)),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.7), (0.5,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (-0.5, 0.5)),
    "clamp_to_tensors": (lambda x: x.clamp(-HALF, HALF), (-0.5, 0.5)),
    "clip": (lambda x: x.clip(max=0.5), (0.5,)),
    "clamp_min": (lambda x: x.clamp_min(0), (0,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), (0,)),
    "elu": (lambda x: F.elu(x, 2.0), (0,)),
    "celu": (lambda x: F.celu(x, 0.5), (0,)),
    "selu": (F.selu, (0,)),
    "softplus": (lambda x: F.softplus(x, 2, 1), (0.5,)),
    "abs": (torch.abs, (0,)),
    "maximum": (lambda x: torch.maximum(x, HALF), (0.5,)),
    "minimum": (lambda x: torch.minimum(x, HALF), (0.5,)),
    "maximum_of_two": (lambda x: torch.maximum(x * x, 2 * x - 1), (1,)),
    "fmax": (lambda x: torch.fmax(x, HALF), (0.5,)),
    "fmax_of_a_constant": (lambda x: torch.fmax(HALF, x), (0.5,)),
    "fmin": (lambda x: torch.fmin(x, HALF), (0.5,)),
    "amax": (lambda x: torch.stack([x * x, 2 * x - 1, x - 1]).amax(0), (1,)),
    "max_of_all": (lambda x: torch.stack([x * x, 2 * x - 1]).max(), (1,)),
    "min_of_all": (lambda x: torch.stack([x * x * x, 2 * x - 1]).min(), (1,)),
    "median_of_all": (lambda x: torch.stack([x * x, 2 * x - 1, x]).median(), (1,)),
    "max_of_an_axis": (lambda x: torch.stack([x, 2 * x - 1]).max(0).values, (1,)),
    "logaddexp": (lambda x: torch.logaddexp(x, 2 * x), (0,)),
    "huber": (lambda x: F.huber_loss(x, HALF), (0.5, 1.5, -0.5)),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, HALF, beta=0.5), (0.5, 1, 0)),
    "l1": (lambda x: F.l1_loss(x, HALF), (0.5,)),
    "bce": (lambda x: F.binary_cross_entropy(x, ONE), (1, 0.5)),
    "frac": (torch.frac, (0, 1)),
}


@pytest.mark.parametrize(("function", "point"), [
    pytest.param(function, point, id=f"{name}-{point}") for name, (function, points) in KINKS.items() for point in points
])  # fmt: skip
def test_a_kink_has_the_derivatives_that_autograd_has_there(function, point):
    x, u = ({"x": torch.tensor([float(number)], dtype=torch.float64)} for number in (point, 1.3))

    def loss(p):
        y = function(p["x"] * 1.0)
        return (3 * y + 0.5 * y * y + 0.7 * p["x"] * y).sum()

    exact, ours = (directional(loss, x, u, method) for method in ("double_backward", "taylor"))
    for field in ("loss", "slope", "curvature"):
        assert getattr(ours, field) == pytest.approx(getattr(exact, field), rel=1e-12, abs=1e-12), field


@pytest.mark.parametrize("spread", [torch.std, lambda x: torch.std(x, 0, correction=0), lambda x: torch.std_mean(x)[0]])
def test_the_deviation_of_a_constant_has_the_slope_that_autograd_gives(spread):
    x = {"x": torch.full((4,), 0.5, dtype=torch.float64)}
    found = directional(lambda p: spread(p["x"]) + p["x"].sum(), x, {"x": torch.arange(4.0).double()}, "taylor")
    assert (found.slope, found.curvature) == (6, 0)


SINGLE = {"complex"}  # views as complex numbers, for which the last axis must be dense


def jets(*tensors):
    return [Jet(tensor, torch.ones_like(tensor)) for tensor in tensors]


def strides(function, *tensors):
    """Strides of function(tensors) as torch has it, and as its rules give the value."""
    torch.manual_seed(0)
    plain = function(*tensors)
    torch.manual_seed(0)
    with torch.enable_grad():
        return plain.stride(), function(*jets(*tensors)).value.stride()


def test_every_rule_gives_its_value_the_strides_that_torch_gives_it():
    """Dropout draws a mask in the order of memory, so that another layout would be another mask."""
    x, y = torch.randn(2, 4, 3, dtype=torch.float64).mul(0.8).unbind(0)
    wrong = {}
    for name, function in OPERATIONS.items():
        if name not in SINGLE:
            plain, ours = strides(function, x.T, y.T)
            if plain != ours:
                wrong[name] = plain, ours
    assert wrong == {}


IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
GAIN, KERNEL = torch.ones(6), torch.ones(4, 6, 3, 3)
CHANNELS_LAST = {
    "conv": lambda x: F.conv2d(x, KERNEL),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "group_norm": lambda x: F.group_norm(x, 2, GAIN, GAIN),
    "batch_norm": lambda x: F.batch_norm(x, 0 * GAIN, GAIN, GAIN, GAIN),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (6,)),
    "rms_norm": lambda x: F.rms_norm(x.permute(0, 2, 1, 3), (4,)),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_of_a_slice": lambda x: F.gelu(x[:, :, ::2]),
    "gelu_of_one_that_is_expanded": lambda x: F.gelu(x[:, :1].expand(2, 6, 5, 4)),
    "power": lambda x: x**3,
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
}


@pytest.mark.parametrize("function", CHANNELS_LAST.values(), ids=CHANNELS_LAST)
def test_a_layer_keeps_an_image_in_the_memory_order_that_torch_gives_it(function):
    plain, ours = strides(function, IMAGE)
    assert ours == plain


DROPPED = {
    "transposed": lambda x: F.dropout(F.gelu(x.T), 0.5),
    "permuted": lambda x: F.dropout(x.reshape(2, 3, 6).permute(2, 0, 1).tanh(), 0.5),
    "channels last": lambda x: F.dropout(
        F.gelu(F.conv2d(x.reshape(1, 2, 6, 3).to(memory_format=torch.channels_last), torch.ones(2, 2, 2, 2).double())),
        0.5,
    ),
}


@pytest.mark.parametrize("function", DROPPED.values(), ids=DROPPED)
def test_dropout_after_a_pointwise_operation_draws_the_mask_of_the_training_step(function):
    x, u = (
        {"x": torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))} for seed in (0, 1)
    )

    def loss(p):
        return (function(p["x"]) * 3).square().mean()

    torch.manual_seed(5)
    step = float(loss(x))
    torch.manual_seed(5)
    exact, ours = (directional(loss, x, u, method) for method in ("double_backward", "taylor"))
    assert ours.loss == pytest.approx(step, rel=1e-12)
    assert ours.curvature == pytest.approx(exact.curvature, rel=1e-10)


COMPLEX = {
    "norm": lambda z: z.norm(),
    "absolute norm": lambda z: z.norm(1),
    "abs": torch.abs,
    "var": torch.var,
    "sgn": lambda z: torch.sgn(z).real,
    "vdot": lambda z: torch.vdot(z.flatten(), (z * z).flatten()).real,
}


@pytest.mark.parametrize("function", COMPLEX.values(), ids=COMPLEX)
def test_a_function_of_complex_numbers_without_a_complex_derivative_is_left_to_double_backward(function):
    x = {"x": torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}

    def loss(p):
        return function(torch.fft.rfft(p["x"])).square().sum()

    with pytest.raises(NoRule):
        directional(loss, x, x, "taylor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = directional(loss, x, x)
    assert found.method == "double_backward"
    assert math.isfinite(found.curvature)


def test_a_scatter_that_multiplies_is_not_taken_for_a_linear_one():
    x = {"x": torch.ones(3, 4, dtype=torch.float64)}
    with pytest.raises(NoRule, match="reduce='multiply'"):
        directional(
            lambda p: p["x"].scatter(1, torch.tensor([[0], [1], [2]]), p["x"] * 2, reduce="multiply").sum(),
            x,
            x,
            "taylor",
        )


def test_a_product_with_the_logarithm_of_zero_has_torchs_value():
    x = {"x": torch.tensor([0.0, 0.3], dtype=torch.float64)}
    found = directional(lambda p: torch.xlogy(torch.zeros(2).double(), p["x"]).sum(), x, x, "taylor")
    assert found.loss == 0
