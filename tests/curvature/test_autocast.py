"""Curvature under autocast: the Taylor pass has torch's dtypes, and every method the derivatives of the float64 loss to
the narrow type's rounding."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stability.curvature import NoSecondDerivative, directional, hvp
from stability.curvature._jet import Jet
from tests.within import assert_within

from .nets import TinyTransformer, random_direction
from .test_taylor_models import huggingface

G = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 7, (8, 12), generator=G)
IMAGES, CLASSES = torch.randn(16, 3, 8, 8, generator=G), torch.randint(0, 5, (16,), generator=G)
SIGNAL = torch.randn(4, 6, 16, generator=G)


def transformer():
    net = TinyTransformer(width=32)
    return net, lambda p: F.cross_entropy(
        functional_call(net, p, (TOKENS[:, :-1],)).flatten(0, 1), TOKENS[:, 1:].flatten()
    )


def convolutional():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    return net, lambda p: F.cross_entropy(functional_call(net, p, (IMAGES.to(next(iter(p.values())).dtype),)), CLASSES)


def encoder():
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def loss(p):
        signal = SIGNAL.to(next(iter(p.values())).dtype)
        return F.mse_loss(functional_call(net, p, (signal,)), signal.sin())

    return net, loss


def llama():
    net = huggingface("llama")
    inputs = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    return net, lambda p: functional_call(net, p, (), inputs).loss


@pytest.mark.parametrize(("build", "dtype"), [
    (transformer, torch.bfloat16),
    (transformer, torch.float16),
    (convolutional, torch.bfloat16),
    (encoder, torch.bfloat16),
    (llama, torch.bfloat16),
])  # fmt: skip
def test_a_loss_under_autocast_gets_the_taylor_pass_and_float64s_derivatives(build, dtype):
    torch.manual_seed(0)
    net, plain = build()
    params = {name: param.detach().float() for name, param in net.named_parameters()}
    u = random_direction(params)
    wide, wide_u = ({name: tensor.double() for name, tensor in tensors.items()} for tensors in (params, u))
    net.double()
    exact = directional(plain, wide, wide_u, "double_backward")
    net.float()

    def loss(p):
        with torch.autocast("cpu", dtype):
            return plain(p)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = directional(loss, params, u)
    assert found.method == "taylor"
    # some ten roundings of the narrow type, each of which moves the terms, not their sum
    bound = 10 * torch.finfo(dtype).eps
    assert abs(found.loss - exact.loss) < bound * abs(exact.loss)
    assert abs(found.curvature - exact.curvature) < bound * sum(map(abs, exact.shares.values()))


W, B = torch.randn(4, 4, generator=G), torch.randn(4, generator=G)
KEYS = torch.randn(1, 2, 4, 4, generator=G)
CALLS = {
    "linear": lambda x: F.linear(x, W, B),
    "matmul": lambda x: x @ W,
    "rmatmul": lambda x: W @ x,
    "mm": lambda x: torch.mm(x, W),
    "bmm": lambda x: x[None].bmm(W[None]),
    "addmm": lambda x: torch.addmm(B, x, W),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, W),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None] * KEYS, KEYS, KEYS),
    "conv": lambda x: F.conv1d(x[None], W[..., None]),
    "layer_norm": lambda x: F.layer_norm(F.linear(x, W), (4,), B, B),
    "rms_norm": lambda x: F.rms_norm(F.linear(x, W), (4,), B),
    "softmax": lambda x: F.linear(x, W).softmax(-1),
    "gelu": lambda x: F.gelu(F.linear(x, W)),
    "add": lambda x: F.linear(x, W) + x,
    "mul": lambda x: F.linear(x, W) * 2,
    "sum": lambda x: F.linear(x, W).sum(0),
    "cross_entropy": lambda x: F.cross_entropy(F.linear(x, W), torch.tensor([0, 1, 2, 3])),
    "mse": lambda x: F.mse_loss(F.linear(x, W), W),
    "float64": lambda x: x.double() @ W.double(),
    "switched_off": lambda x: switched_off(x),
}


def switched_off(x):
    with torch.autocast("cpu", enabled=False):
        return x @ W


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of torch's own rms_norm
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_rule_has_the_dtype_and_the_value_that_autocast_gives(call):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        plain, ours = call(x), call(Jet(x, torch.ones_like(x)))
    assert ours.dtype == plain.dtype
    assert {part.dtype for part in (ours.value, ours.first, ours.second) if part is not None} == {plain.dtype}
    # to a rounding of the terms, which may cancel
    torch.testing.assert_close(ours.value, plain, rtol=2**-7, atol=2**-8 * float(plain.abs().max()))


def in_autocast(plain):
    def loss(p):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(p)

    return loss


class GoodGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
        return grad * (0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * density)


class WrongGelu(torch.autograd.Function):
    """Right in its first derivative; the second is cut off but for the incoming gradient's."""

    forward = staticmethod(GoodGelu.forward)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach()
        density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
        return grad * (0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * density)


class HalfSlope(torch.autograd.Function):
    """tanh with half of its derivative, which is differentiated rightly."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh() ** 2) / 2


def perceptron(seed, act=F.gelu, cast=None):
    """(loss, params, u), in float32 or what the parameters have. ``cast``: a type that each layer's input and weight
    are brought to by hand."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = [(32, 24), (32, 32), (5, 32)]
    params = {f"w{i}": torch.randn(*size, generator=drawn) / size[1] ** 0.5 for i, size in enumerate(sizes)}
    u = {name: torch.randn(param.shape, generator=drawn) for name, param in params.items()}
    inputs = torch.randn(16, 24, generator=drawn)

    def loss(p):
        h = inputs.to(p["w0"].dtype)
        for index, weight in enumerate(p.values()):
            h = h if index == 0 else act(h)
            h = F.linear(h, weight) if cast is None else F.linear(h.to(cast), weight.to(cast)).to(weight.dtype)
        return F.cross_entropy(h.float() if h.dtype != torch.float64 else h, CLASSES)

    return loss, params, u


def double(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["by_autocast", "by_hand"])
@pytest.mark.parametrize("inside", [True, False])
def test_the_bar_of_differences_covers_what_a_narrow_type_loses(inside, cast):
    for seed in range(20):
        plain, params, u = perceptron(seed)
        exact = directional(plain, double(params), double(u), "double_backward").curvature
        narrow = perceptron(seed, cast=cast)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=cast is None and not inside):
            found = directional(
                in_autocast(narrow) if cast is None and inside else narrow, params, u, "finite_difference"
            )
        assert_within(abs(found.curvature - exact), found.error_bar)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_right_custom_function_is_believed_under_autocast(dtype):
    for seed in range(20):
        plain, params, u = perceptron(seed, GoodGelu.apply)
        wide = directional(plain, params, u, "finite_difference")
        with torch.autocast("cpu", dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = directional(plain, params, u, "double_backward")
            hvp(plain, params, u)
        # what float32's differences can tell is checked
        assert found.note is None or abs(wide.curvature) < wide.error_bar


def test_a_wrong_custom_function_is_refused_under_autocast():
    for seed in range(5):
        plain, params, u = perceptron(seed, WrongGelu.apply)
        for loss in (plain, in_autocast(plain)):
            with pytest.raises(NoSecondDerivative, match="WrongGelu"), torch.autocast("cpu", torch.bfloat16):
                directional(loss, params, u, "double_backward")
            with pytest.raises(NoSecondDerivative, match="WrongGelu"), torch.autocast("cpu", torch.bfloat16):
                hvp(loss, params, u)


def test_a_custom_function_in_a_type_too_narrow_for_differences_is_noted_as_unchecked():
    plain, params, u = perceptron(0, GoodGelu.apply, cast=torch.bfloat16)
    found = directional(plain, params, u, "double_backward")
    assert found.note == (
        "GoodGelu (a custom autograd.Function): differences are too coarse here to check its derivatives"
    )
    with pytest.warns(RuntimeWarning, match="GoodGelu .* too coarse"):
        hvp(plain, params, u)


def test_a_wrong_gradient_of_a_custom_function_is_noted_under_autocast():
    for seed in (0, 1, 3, 4):  # the slope of 2 is nearly 0
        plain, params, u = perceptron(seed)
        for act, is_noted in ((HalfSlope.apply, True), (torch.tanh, False)):
            with torch.autocast("cpu", torch.bfloat16):
                note = directional(lambda p, f=act, inner=plain: f(inner(p)), params, u, "double_backward").note
            assert (note is not None and "its gradient is not its derivative" in note) == is_noted


def test_autocast_is_on_again_after_a_check_without_it():
    plain, params, u = perceptron(0, GoodGelu.apply)
    with torch.autocast("cpu", torch.bfloat16):
        directional(plain, params, u, "double_backward")
        assert torch.is_autocast_enabled("cpu")
        assert (params["w0"] @ params["w0"].mT).dtype == torch.bfloat16


@pytest.mark.parametrize("seed", [0, 33, 43, 58])  # of the first 60, three below bfloat16's noise
def test_no_slope_is_contradicted_by_differences_coarser_than_itself(seed):
    plain, params, u = perceptron(seed)
    assert directional(in_autocast(plain), params, u, "finite_difference").note is None
