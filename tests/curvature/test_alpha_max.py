"""α_max's conventions and the paper's protocol pieces, against closed forms."""

import math
import warnings

import pytest
import torch

from stability.curvature import alpha_max, paper_state, step_direction
from stability.curvature.alpha_max import step_without_decay

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("slope", "curvature", "expected"),
    [(-1.0, 4.0, 0.5), (-1.0, 0.0, INF), (-1.0, -3.0, INF), (0.0, 4.0, 0.0), (2.0, 4.0, 0.0), (2.0, -4.0, 0.0)],
)
def test_alpha_max_follows_the_papers_conventions(slope, curvature, expected):
    assert alpha_max(slope, curvature) == expected


def test_no_slope_and_no_curvature_are_neither_stable_nor_unstable():
    """The step is zero, or the loss does not change along it: 0 would read as never stable."""
    assert math.isnan(alpha_max(0.0, 0.0)) and math.isnan(alpha_max(-0.0, 0.0))


@pytest.mark.parametrize(
    ("slope", "curvature"), [(NAN, 1.0), (-1.0, NAN), (1.0, NAN), (-INF, 1.0), (-1.0, INF), (INF, 1.0), (-1.0, -INF)]
)
def test_alpha_max_never_hides_a_broken_number(slope, curvature):
    assert math.isnan(alpha_max(slope, curvature))


def make(seed=0, count=5):
    torch.manual_seed(seed)
    params = {"w": torch.nn.Parameter(torch.randn(4, 3)), "b": torch.nn.Parameter(torch.randn(3))}
    gradients = [{name: torch.randn_like(param) for name, param in params.items()} for _ in range(count)]
    return params, gradients


def test_paper_state_makes_the_next_step_correct_bias_as_the_sixth():
    params, gradients = make()
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    paper_state(optimizer, gradients, params)
    new = {name: torch.randn_like(param) for name, param in params.items()}
    for name, param in params.items():
        param.grad = new[name].clone()
    u = step_direction(optimizer, params, 1e-2)
    for name in params:
        mean = torch.stack([g[name] for g in gradients]).double().mean(0)
        square = torch.stack([g[name] for g in gradients]).double().square().mean(0)
        first = (0.9 * mean + 0.1 * new[name]) / 0.468559  # 1 − 0.9⁶
        second = (0.999 * square + 0.001 * new[name].double() ** 2) / 0.00598502  # 1 − 0.999⁶
        torch.testing.assert_close(u[name].double(), -first / (second.sqrt() + 1e-8), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}])
def test_paper_state_fits_every_adam_of_torch(kind, options):
    params, gradients = make()
    optimizer = kind(params.values(), lr=1e-2, **options)
    paper_state(optimizer, ([g["w"], g["b"]] for g in gradients))
    for param in params.values():
        param.grad = torch.ones_like(param)
        assert float(optimizer.state[param]["step"]) == 5
    optimizer.step()
    assert all(float(optimizer.state[param]["step"]) == 6 for param in params.values())
    assert all(bool(torch.isfinite(param).all()) for param in params.values())


def test_paper_state_leaves_a_parameter_without_gradients_without_state():
    params, gradients = make()
    optimizer = torch.optim.AdamW(params.values())
    paper_state(optimizer, [[g["w"], None] for g in gradients])
    assert params["b"] not in optimizer.state
    assert "exp_avg" in optimizer.state[params["w"]]


def test_paper_state_errors_are_one_line_and_name_the_cause():
    params, gradients = make()
    with pytest.raises(ValueError, match="defined for Adam and AdamW, not for SGD"):
        paper_state(torch.optim.SGD(params.values(), lr=1e-2), gradients, params)
    adam = torch.optim.AdamW(params.values())
    for arguments, text in [
        (([], params), "gradients is empty"),
        ((gradients,), "gradients by name need params="),
        (([[None]],), "a list of 1 gradients does not fit the optimizer's 2 parameters"),
        ((gradients, {"w": params["w"]}), "does not name every tensor"),
    ]:
        with pytest.raises(ValueError, match=text) as raised:
            paper_state(adam, *arguments)
        assert "\n" not in str(raised.value)


def test_step_direction_is_adamws_closed_form_with_decoupled_decay():
    params, _ = make()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, weight_decay=0.3)
    for param in params.values():
        param.grad = torch.randn_like(param)
    u = step_direction(optimizer, params, 1e-2)
    for name, param in params.items():
        g = param.grad.double()
        expected = -g / (g.abs() + 1e-8) - 0.3 * before[name].double()  # the first step: m̂ = g, v̂ = g²
        torch.testing.assert_close(u[name].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(before[name] + 1e-2 * u[name], param.detach())


def test_step_direction_of_sgd_is_the_negative_gradient():
    params, _ = make()
    for param in params.values():
        param.grad = torch.randn_like(param)
    u = step_direction(torch.optim.SGD(params.values(), lr=0.5), params, 0.5)
    for name, param in params.items():
        torch.testing.assert_close(u[name], -param.grad, rtol=1e-5, atol=1e-6)


def test_step_direction_warns_where_rounding_eats_the_step():
    params, _ = make()
    for param in params.values():
        param.grad = torch.randn_like(param)
    with pytest.warns(RuntimeWarning, match="of this step is float rounding"):
        step_direction(torch.optim.AdamW(params.values(), lr=1e-7), params, 1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_direction(torch.optim.AdamW(params.values(), lr=1e-3), params, 1e-3)


@pytest.mark.parametrize("lr", [0.0, -1.0, NAN, INF, "1e-3"])
def test_step_direction_needs_a_positive_lr(lr):
    params, _ = make()
    with pytest.raises(ValueError, match="a positive finite number"):
        step_direction(torch.optim.SGD(params.values(), lr=0.5), params, lr)


def test_step_direction_refuses_tensors_that_the_optimizer_does_not_hold():
    params, _ = make()
    with pytest.raises(ValueError, match="params\\['w'\\] is not among the tensors of this SGD"):
        step_direction(torch.optim.SGD(params.values(), lr=0.5), {"w": params["w"].detach()}, 0.5)


def test_step_direction_takes_the_closure_of_lbfgs_and_asks_for_it():
    model = torch.nn.Linear(3, 1).double()
    params, x = dict(model.named_parameters()), torch.randn(6, 3, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    closure()
    gradient = {name: param.grad.clone() for name, param in params.items()}
    with pytest.raises(ValueError, match=r"closure is None; LBFGS.step needs one: step_direction\(…, closure=…\)"):
        step_direction(optimizer, params, 0.5)
    with pytest.raises(ValueError, match="LBFGS.step needs a closure, which evaluates the optimizer's own parameters"):
        step_without_decay(optimizer, params, 0.5)
    direction = step_direction(optimizer, params, 0.5, closure)
    shrink = min(1.0, 1.0 / float(sum(each.abs().sum() for each in gradient.values())))  # LBFGS's first step
    for name, step in direction.items():
        assert torch.allclose(step, -shrink * gradient[name], rtol=1e-9)
