"""Gauss–Newton part, block shares and gradient noise against dense matrices and slow loops."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.curvature import NoSecondDerivative
from stability.curvature.decompose import block_shares, gauss_newton, gradient_noise_scale
from tests.curvature.nets import dense_hessian, flatten, random_direction, tiny, token_loss, unflatten


def two_parts(net, tokens):
    def model(params):
        return torch.func.functional_call(net, params, (tokens[:, :-1],))

    def output_loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, output_loss


def test_the_gauss_newton_part_is_that_of_the_dense_jacobian():
    net, params, tokens = tiny(width=4)
    model, output_loss = two_parts(net, tokens)
    u = random_direction(params)
    found = gauss_newton(model, output_loss, params, u)
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(params).detach()
        jacobian = torch.autograd.functional.jacobian(
            lambda vector: model(unflatten(vector, params)).flatten(), flatten(params)
        )
        outer = torch.autograd.functional.hessian(lambda z: output_loss(z.reshape(logits.shape)), logits.flatten())
    moved = jacobian @ flatten(u)
    assert found.part == pytest.approx(float(moved @ outer @ moved), rel=1e-10)
    vector = flatten(u)
    assert found.curvature == pytest.approx(
        float(vector @ dense_hessian(token_loss(net, tokens), params) @ vector), rel=1e-9
    )
    assert found.share == pytest.approx(found.part / found.curvature)


def test_of_a_linear_model_all_curvature_is_gauss_newton_and_of_a_linear_loss_none():
    x, params = torch.randn(5, 3, dtype=torch.float64), {"w": torch.randn(3, 2, dtype=torch.float64)}
    u = random_direction(params)
    assert gauss_newton(lambda at: x @ at["w"], lambda z: (z**3).sum(), params, u).share == pytest.approx(1, rel=1e-12)
    assert gauss_newton(lambda at: (x @ at["w"]) ** 2, lambda z: z.sum(), params, u).part == pytest.approx(0, abs=1e-12)
    assert math.isnan(gauss_newton(lambda at: x @ at["w"], lambda z: z.sum(), params, u).share)


def test_the_gauss_newton_part_of_microbatches_is_that_of_the_batch():
    net, params, tokens = tiny(width=4)
    model, output_loss = two_parts(net, tokens)
    u = random_direction(params)

    def model_of(at, rows):
        return torch.func.functional_call(net, at, (rows[:, :-1],))

    def loss_of(logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), rows[:, 1:].numel()

    whole, parts = (
        gauss_newton(model, output_loss, params, u),
        gauss_newton(model_of, loss_of, params, u, batches=iter([tokens[:1], tokens[1:]])),
    )
    assert parts.part == pytest.approx(whole.part, rel=1e-10)
    assert parts.curvature == pytest.approx(whole.curvature, rel=1e-10)


def cube_of(factor):
    """x³ as a custom Function with a forward mode that is ``factor`` times the right one."""

    class OwnCube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

        @staticmethod
        def jvp(ctx, tangent):
            return factor * 3 * ctx.saved_tensors[0] ** 2 * tangent

    return OwnCube.apply


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_the_forward_mode_of_a_custom_function_is_checked_under_autocast_too(factor):
    """Differences in bfloat16 would contradict the right one, too."""
    cube, drawn = cube_of(factor), torch.Generator().manual_seed(0)
    x, target = torch.randn(16, 24, generator=drawn), torch.randint(5, (16,), generator=drawn)
    params = {"w": torch.randn(24, 32, generator=drawn) / 5, "v": torch.randn(32, 5, generator=drawn) / 6}
    u = {name: torch.randn(param.shape, generator=drawn) for name, param in params.items()}

    def model(at):
        with torch.autocast("cpu", torch.bfloat16):
            return (cube(x @ at["w"]) @ at["v"]).float()

    def measure():
        return gauss_newton(model, lambda logits: F.cross_entropy(logits, target), params, u)

    if factor == 1.0:
        assert math.isfinite(measure().part)
    else:
        with pytest.raises(NoSecondDerivative, match="OwnCube .* has a wrong forward-mode derivative"):
            measure()


def test_block_shares_add_up_to_the_curvature_and_are_rows_of_the_dense_hessian():
    net, params, tokens = tiny(width=4)
    loss, u = token_loss(net, tokens), random_direction(params)
    dense, vector = dense_hessian(loss, params), flatten(u)
    shares = block_shares(loss, params, u, block=1)
    assert set(shares) == {"embed", "norm1", "norm2", "norm3", "qkv", "out", "up", "down"}
    assert sum(shares.values()) == pytest.approx(float(vector @ dense @ vector), rel=1e-10)
    inside = torch.cat(
        [
            torch.full((param.numel(),), float(name.startswith("qkv")), dtype=torch.float64)
            for name, param in params.items()
        ]
    )
    assert shares["qkv"] == pytest.approx(float((inside * vector) @ dense @ vector), rel=1e-9)
    by_rule = block_shares(loss, params, u, block=lambda name: "norms" if name.startswith("norm") else "rest")
    assert by_rule["norms"] == pytest.approx(shares["norm1"] + shares["norm2"] + shares["norm3"])
    with pytest.raises(ValueError, match="block is 0"):
        block_shares(loss, params, u, block=0)


def regression(rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(rows, 3, generator=generator, dtype=torch.float64) + 1,
        torch.randn(rows, generator=generator, dtype=torch.float64),
    )
    params = {"w": torch.randn(3, generator=generator, dtype=torch.float64)}

    def loss(at, index):
        return ((x[index] @ at["w"] - y[index]) ** 2).sum(), len(index)

    return loss, params, 2 * (x @ params["w"] - y)[:, None] * x


def test_the_noise_scale_of_single_items_is_that_of_the_sample_covariance():
    """One item a microbatch: tr Σ is the trace of the sample covariance (n − 1), |G|² = |mean|² − tr Σ/n."""
    loss, params, gradients = regression()
    found = gradient_noise_scale(loss, params, [[index] for index in range(12)])
    covariance = float(torch.cov(gradients.T).trace())
    squared = float(gradients.mean(0).square().sum()) - covariance / 12
    assert found.trace == pytest.approx(covariance, rel=1e-10)
    assert found.gradient_sq == pytest.approx(squared, rel=1e-10)
    assert found.value == pytest.approx(covariance / squared, rel=1e-10)
    assert found.microbatches == 12


def test_the_noise_scale_of_equal_microbatches_is_the_papers_formula():
    loss, params, gradients = regression()
    groups = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    small = sum(float(gradients[group].mean(0).square().sum()) for group in groups) / 4
    large = float(gradients.mean(0).square().sum())
    found = gradient_noise_scale(loss, params, groups)
    assert found.gradient_sq == pytest.approx((12 * large - 3 * small) / (12 - 3), rel=1e-10)
    assert found.trace == pytest.approx((small - large) / (1 / 3 - 1 / 12), rel=1e-10)


def test_the_noise_scale_of_unequal_microbatches_is_without_bias():
    rng, estimates = torch.Generator().manual_seed(0), []
    mean, spread = (
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
        torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),
    )
    for _ in range(600):
        items = mean + spread * torch.randn(9, 3, generator=rng, dtype=torch.float64)
        groups = [items[:1], items[1:4], items[4:]]
        found = gradient_noise_scale(
            lambda at, rows: ((rows @ at["w"]).sum(), len(rows)), {"w": torch.zeros(3, dtype=torch.float64)}, groups
        )
        estimates.append((found.trace, found.gradient_sq))
    means = torch.tensor(estimates).mean(0)
    assert float(means[0]) == pytest.approx(5.25, rel=0.15)
    assert float(means[1]) == pytest.approx(5.25, rel=0.15)


def test_a_gradient_lost_in_noise_has_an_infinite_scale_and_one_microbatch_none():
    rows = torch.tensor([[1.0], [-1.0]])
    found = gradient_noise_scale(
        lambda at, index: ((rows[index] @ at["w"]).sum(), len(index)), {"w": torch.zeros(1)}, [[0], [1]]
    )
    assert found.value == math.inf
    assert found.gradient_sq < 0
    with pytest.raises(ValueError, match="at least two microbatches that count something; there are 1"):
        gradient_noise_scale(lambda at, index: ((rows[index] @ at["w"]).sum(), 1), {"w": torch.zeros(1)}, [[0]])
