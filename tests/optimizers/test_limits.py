"""What the small tensors of the contract do not reach: rows without a gradient, a share of entries that is tiny, and
tensors of a large norm; against the same formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stability.optimizers import build, set_lr
from stability.registry import Registry
from tests.optimizers.oracles.by_tensor_a import cautious_adamw, lamb, stable_adamw

RATES = [1e-2, 3e-2, 2e-2, 1e-2]


def stepped(name: str, start: np.ndarray, gradients: list[np.ndarray], **settings: float) -> np.ndarray:
    """Return a tensor after a step by each gradient, at `RATES`."""
    value = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = build(name, [("value", value)], lr=1.0, **settings)
    for rate, gradient in zip(RATES, gradients, strict=True):
        set_lr(optimizer, rate)
        value.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return value.detach().numpy()


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_a_row_whose_token_no_batch_held_since_rests_and_counts_as_left_out():
    """Its mean gradient goes on, its gradient is 0: their product is not above 0."""
    draws = np.random.default_rng(0)
    start, gradients = draws.standard_normal((6, 4)), [draws.standard_normal((6, 4)) for _ in RATES]
    for gradient in gradients[2:]:
        gradient[:3] = 0
    config = Registry("optimizers").load("cautious_adamw").Config(weight_decay=0.01)
    assert same(stepped("cautious_adamw", start, gradients), cautious_adamw(config, start, gradients, RATES))


def test_a_share_below_a_thousandth_counts_as_one():
    """One entry of 4,000 steps with its gradient: a thousandth, not 1/4,000 and nothing larger, divides its step."""
    start = np.linspace(-1, 1, 4000)
    steady = np.ones(4000)
    turned = np.append(-0.01 * np.ones(3999), 1.0)
    gradients = [steady, turned, turned, turned]
    config = Registry("optimizers").load("cautious_adamw").Config()
    assert same(stepped("cautious_adamw", start, gradients), cautious_adamw(config, start, gradients, RATES))


@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_lambs_step_is_as_long_as_a_tensor_of_any_norm(size):
    """φ(z) = z: no norm is clipped, as some libraries clip it at 10."""
    draws = np.random.default_rng(1)
    start, gradients = size * draws.standard_normal((8, 4)), [draws.standard_normal((8, 4)) for _ in RATES]
    config = Registry("optimizers").load("lamb").Config()
    found = stepped("lamb", start, gradients)
    assert same(found / size, lamb(config, start, gradients, RATES) / size)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_gradient_that_outgrows_its_mean_square_shortens_stable_adamws_step(weight_decay):
    """By the formula and by pytorch_optimizer's class: at a hundredfold gradient the RMS is far above 1."""
    library = pytest.importorskip("pytorch_optimizer")
    draws = np.random.default_rng(2)
    start, gradients = draws.standard_normal((8, 4)), [draws.standard_normal((8, 4)) for _ in RATES]
    gradients[2] *= 100
    config = Registry("optimizers").load("stable_adamw").Config(weight_decay=weight_decay)
    found = stepped("stable_adamw", start, gradients, weight_decay=weight_decay)
    assert same(found, stable_adamw(config, start, gradients, RATES))
    value = nn.Parameter(torch.from_numpy(start.copy()))
    settings = {"betas": (config.beta1, config.beta2), "eps": config.epsilon, "weight_decay": weight_decay}
    public = library.StableAdamW([value], lr=1.0, **settings)
    for rate, gradient in zip(RATES, gradients, strict=True):
        public.param_groups[0]["lr"] = rate
        value.grad = torch.from_numpy(gradient.copy())
        public.step()
    assert same(found, value.detach().numpy())
    assert not np.allclose(found, stepped("adamw", start, gradients, weight_decay=weight_decay), rtol=1e-2)


@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_set_adam_has_one_step_size_where_all_squares_are_equal_and_needs_no_large_gradients(size):
    """cos² = 1 and w̃ = (1 − τ) w: twice Adam's step, whatever the gradients' size, also where their squares underflow."""
    start, signs = np.zeros((4, 4), np.float32), np.where(np.arange(16).reshape(4, 4) % 3, 1.0, -1.0)
    gradients = [np.float32(size) * signs.astype(np.float32)] * len(RATES)
    assert stepped("set_adam", start, gradients, epsilon=1e-38) == pytest.approx(-2 * sum(RATES) * signs, rel=1e-5)


def test_set_adam_leaves_a_parameter_without_gradient_where_it_is():
    start = np.ones((3, 2))
    assert (stepped("set_adam", start, [np.zeros((3, 2))] * len(RATES)) == start).all()
