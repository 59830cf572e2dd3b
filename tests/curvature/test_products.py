"""Slope and curvature against a dense float64 Hessian, closed forms, and themselves in pieces."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from stability.curvature import GradientWithGraph, directional, hvp
from tests.within import assert_within

from .nets import dense_hessian, flatten, random_direction, tiny, token_loss, unflatten


@pytest.fixture(scope="module", params=[1.0, 4.0], ids=["weights", "weights_times_4"])
def dense(request):
    """(loss, params, direction, gradient, Hessian) of the tiny transformer, everything flat and float64."""
    net, params, tokens = tiny(scale=request.param)
    loss = token_loss(net, tokens)
    value = loss(params)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(params.values()))])
    return loss, params, random_direction(params), gradient, dense_hessian(loss, params)


def test_double_backward_equals_the_dense_hessian(dense):
    loss, params, direction, gradient, hessian = dense
    result, u = directional(loss, params, direction, "double_backward"), flatten(direction)
    assert result.loss == pytest.approx(loss(params).item(), rel=1e-12)
    assert result.slope == pytest.approx(float(gradient @ u), rel=1e-9)
    assert result.curvature == pytest.approx(float(u @ hessian @ u), rel=1e-9)
    assert sum(result.shares.values()) == pytest.approx(result.curvature, rel=1e-12)
    assert result.method == "double_backward"
    assert result.rel_error is None


def test_hvp_equals_the_dense_hessian_and_h_is_symmetric_through_layer_norm(dense):
    loss, params, direction, _, hessian = dense
    u, w = flatten(direction), flatten(random_direction(params, seed=2))
    product = flatten(hvp(loss, params, direction))
    torch.testing.assert_close(product, hessian @ u, rtol=1e-9, atol=1e-9 * float((hessian @ u).abs().max()))
    assert float(w @ product) == pytest.approx(float(u @ flatten(hvp(loss, params, unflatten(w, params)))), rel=1e-9)


def test_float32_stays_within_1e_5_of_float64(dense):
    loss, params, direction, _, hessian = dense
    small = {name: param.detach().float() for name, param in params.items()}
    u = flatten(direction)
    assert directional(loss, small, direction).curvature == pytest.approx(float(u @ hessian @ u), rel=1e-5)


def test_finite_differences_error_bar_covers_the_truth_in_both_precisions(dense):
    loss, params, _, _, hessian = dense
    for seed in range(8):
        direction = random_direction(params, seed=seed)
        scaled = {name: (10.0 ** (seed - 4)) * step for name, step in direction.items()}  # ε scales with ‖u‖
        truth = float(flatten(scaled) @ hessian @ flatten(scaled))
        for dtype in (torch.float64, torch.float32):
            cast = {name: param.detach().to(dtype) for name, param in params.items()}
            result = directional(loss, cast, scaled, "finite_difference")
            assert result.method == "finite_difference"
            assert_within(abs(result.curvature - truth), result.error_bar)
            assert result.error_bar < 0.2 * abs(truth) + 1e-3 * float(flatten(scaled) @ flatten(scaled))


def test_check_stores_the_relative_error_against_central_differences(dense):
    loss, params, direction, *_ = dense
    result = directional(loss, params, direction, check=True)
    assert result.rel_error > 0
    assert_within(result.rel_error, 1e-2)
    assert directional(loss, params, direction, "parity").method == "parity"


def quadratic(matrix, offset=None):
    return lambda params: 0.5 * params["x"] @ matrix @ params["x"] + (0 if offset is None else offset @ params["x"])


def spd(seed=0, n=6):
    torch.manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    return basis @ torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64)) @ basis.T, basis


@pytest.mark.parametrize("method", ["taylor", "double_backward", "finite_difference", "parity", "auto"])
def test_alpha_max_is_two_over_lambda_along_an_eigenvector_of_a_quadratic(method):
    matrix, basis = spd()
    for index in range(6):
        x = {"x": 3 * basis[:, index]}
        gradient = matrix @ x["x"]
        result = directional(quadratic(matrix), x, {"x": -gradient}, method)
        assert result.alpha_max == pytest.approx(2 / (index + 1), rel=1e-7)


def test_a_saddle_gives_infinity_and_an_ascent_direction_zero():
    matrix = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    x = {"x": torch.tensor([0.1, 1.0], dtype=torch.float64)}
    down = {"x": torch.tensor([0.0, 1.0], dtype=torch.float64)}
    assert directional(quadratic(matrix), x, down).alpha_max == math.inf
    assert directional(quadratic(matrix), x, {"x": -down["x"]}).alpha_max == 0
    assert math.isnan(directional(quadratic(matrix), x, {"x": torch.zeros(2)}).alpha_max), (
        "no step is neither stable nor unstable"
    )


def test_sgd_never_falls_below_two_over_the_spectral_norm(dense):
    loss, params, _, gradient, hessian = dense
    top = torch.linalg.eigvalsh(hessian).abs().max()
    assert directional(loss, params, unflatten(-gradient, params)).alpha_max >= 2 / float(top)
    matrix, _ = spd(3)
    for seed in range(20):
        x = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert directional(quadratic(matrix), {"x": x}, {"x": -(matrix @ x)}).alpha_max >= 2 / 6 - 1e-12


def pieces(tokens):
    return [tokens[:1], tokens[1:3], tokens[3:7], tokens[7:]]


@pytest.mark.parametrize("method", ["double_backward", "finite_difference", "parity"])
def test_microbatches_of_unequal_counts_equal_the_whole_batch(method):
    net, params, _ = tiny()
    tokens = torch.randint(0, 7, (9, 6), generator=torch.Generator().manual_seed(5))
    direction = random_direction(params)
    whole = directional(token_loss(net, tokens), params, direction, method)
    parts = directional(
        lambda p, rows: (token_loss(net, rows, "sum")(p), rows[:, 1:].numel()),
        params,
        direction,
        method,
        batches=pieces(tokens),
    )
    rel = 1e-12 if method == "double_backward" else 1e-8
    for name in ("loss", "slope", "curvature"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=rel)
    product = hvp(
        lambda p, rows: (token_loss(net, rows, "sum")(p), rows[:, 1:].numel()),
        params,
        direction,
        batches=iter(pieces(tokens)),
    )
    torch.testing.assert_close(
        flatten(product), flatten(hvp(token_loss(net, tokens), params, direction)), rtol=1e-10, atol=1e-12
    )


def test_one_microbatch_graph_lives_at_a_time():
    net, params, _ = tiny()
    tokens = torch.randint(0, 7, (9, 6), generator=torch.Generator().manual_seed(5))
    alive, most = [0], [0]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Token:
        def __del__(self):
            alive[0] -= 1

    def loss(p, rows):
        return Counted.apply(token_loss(net, rows, "sum")(p)), rows[:, 1:].numel()

    for call in (directional, hvp):
        call(loss, params, random_direction(params), batches=pieces(tokens))
    directional(loss, params, random_direction(params), "finite_difference", batches=pieces(tokens))
    GradientWithGraph(loss, params, batches=pieces(tokens)).along(random_direction(params))
    assert (most[0], alive[0]) == (1, 0)


@pytest.mark.parametrize("method", ["auto", "double_backward"])
@pytest.mark.parametrize("batched", [False, True])
def test_gradient_with_graph_gives_the_curvature_after_the_optimizer_moved(batched, method):
    net, params, tokens = tiny()
    direction = random_direction(params)
    expected = directional(token_loss(net, tokens), params, direction)
    gradient = torch.autograd.grad(token_loss(net, tokens)(params), list(params.values()))
    if batched:
        parts = [tokens[:1], tokens[1:]]
        held = GradientWithGraph(
            lambda p, rows: (token_loss(net, rows, "sum")(p), rows[:, 1:].numel()), params, parts, method
        )
    else:
        held = GradientWithGraph(token_loss(net, tokens), params, method=method)
    own = held.gradient()
    for (name, param), reference in zip(params.items(), gradient, strict=True):
        torch.testing.assert_close(own[name], reference, rtol=1e-10, atol=1e-13)
        param.grad = own[name].mul_(0.5)  # the caller clips in place: the formula keeps the true gradient
    torch.optim.AdamW(params.values(), lr=0.1).step()
    for attempt in range(2):  # the second call evaluates again
        result = held.along(direction)
        for field in dataclasses.fields(result)[:4]:
            assert getattr(result, field.name) == pytest.approx(getattr(expected, field.name), rel=1e-10), attempt
    with pytest.raises(RuntimeError, match="handed out already"):
        held.gradient()


@pytest.mark.parametrize("method", ["auto", "double_backward"])
def test_each_gradient_is_the_callers_own_memory(method):
    params = {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}
    gradient = GradientWithGraph(lambda p: (p["x"] + p["y"]).sum(), params, method=method).gradient()
    gradient["x"].mul_(5)
    assert gradient["y"].tolist() == [[1] * 3] * 2
    halves = GradientWithGraph(lambda p, n: (n * (p["x"] + p["y"]).sum(), n), params, [1, 2], method).gradient()
    halves["x"].mul_(5)
    assert (halves["x"].sum(), halves["y"].sum()) == (30, 6)


def test_a_parameter_that_the_loss_does_not_use_has_gradient_and_curvature_zero():
    params = {"x": torch.tensor([2.0]), "unused": torch.ones(3)}
    direction = {"x": torch.tensor([-1.0]), "unused": torch.ones(3)}
    for method in ("taylor", "double_backward", "finite_difference"):
        result = directional(lambda p: (p["x"] ** 3).sum(), params, direction, method)
        assert result.slope == pytest.approx(-12)
        assert result.curvature == pytest.approx(12, rel=1e-3)
    assert float(hvp(lambda p: (p["x"] ** 3).sum(), params, direction)["unused"].abs().sum()) == 0
    assert float(GradientWithGraph(lambda p: (p["x"] ** 3).sum(), params).gradient()["unused"].abs().sum()) == 0


def test_a_linear_loss_has_curvature_zero():
    for method in ("taylor", "double_backward"):
        result = directional(lambda p: 3 * p["x"].sum(), {"x": torch.ones(2)}, {"x": -torch.ones(2)}, method)
        assert (result.slope, result.curvature, result.alpha_max) == (-6, 0, math.inf)


def test_dropout_repeats_within_a_measurement_and_the_global_generator_is_untouched():
    net, params, tokens = tiny(dropout=0.5)
    net.train()
    loss, direction = token_loss(net, tokens), random_direction(params)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    exact = directional(loss, params, direction, check=True)
    assert_within(exact.rel_error, 1e-2)
    assert torch.equal(torch.get_rng_state(), state)
    assert directional(loss, params, direction) == dataclasses.replace(exact, rel_error=None, difference=None)
    held = GradientWithGraph(loss, params)
    assert not torch.equal(torch.get_rng_state(), state)  # it is the training step's own forward pass
    assert held.along(direction).curvature == pytest.approx(exact.curvature, rel=1e-12)
    assert held.along(direction).curvature == pytest.approx(exact.curvature, rel=1e-12)


def test_plain_tensors_work_and_gradients_of_the_callers_parameters_stay_untouched():
    net, params, tokens = tiny()
    directional(token_loss(net, tokens), {name: p.detach() for name, p in params.items()}, random_direction(params))
    with torch.no_grad():
        directional(token_loss(net, tokens), params, random_direction(params), check=True)
    assert all(param.grad is None and param.requires_grad for param in params.values())


def test_a_large_tensor_is_dotted_in_float64():
    generator = torch.Generator().manual_seed(0)
    x, u = (torch.randn(2_500_000, generator=generator) + shift for shift in (100, 1))
    result = directional(lambda p: 0.5 * (p["x"] * p["x"]).sum(), {"x": x}, {"x": u}, "double_backward")
    assert result.slope == pytest.approx(float(x.double() @ u.double()), rel=1e-12)
    assert result.curvature == pytest.approx(float(u.double() @ u.double()), rel=1e-12)


def test_the_sdpa_choice_of_the_caller_survives():
    before = torch.backends.cuda.flash_sdp_enabled()
    net, params, tokens = tiny()
    directional(token_loss(net, tokens), params, random_direction(params))
    assert torch.backends.cuda.flash_sdp_enabled() == before
    logits = torch.randn(2, 3, requires_grad=True)
    assert F.cross_entropy(logits, torch.tensor([0, 1])).requires_grad
