"""Update rules of optimizers that need more than a gradient, keep two sets of weights, or one number for all tensors,
from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# the tensors after the steps, from the settings of each, their first values, and by step their gradients and the rate
ModelLoop = Callable[[list[Any], list[np.ndarray], list[list[np.ndarray]], list[float]], list[np.ndarray]]


def schedule_free(config: Any, value: float, gradients: list[float], rates: list[float]) -> tuple[float, float]:
    """Algorithm 1 of Defazio et al. (2024), with the decay at y: y and x after the steps."""
    x = z = value
    square = largest = total = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        y = (1 - config.beta1) * z + config.beta1 * x
        square = config.beta2 * square + (1 - config.beta2) * gradient * gradient
        root = math.sqrt(square / (1 - config.beta2**step))
        z -= rate * (gradient / (root + config.epsilon) + config.weight_decay * y)
        largest = max(largest, rate)
        weight = step**config.step_power * largest**config.lr_power
        total += weight
        x = (1 - weight / total) * x + weight / total * z
    return (1 - config.beta1) * z + config.beta1 * x, x


def schedulefree_adamw(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    return schedule_free(config, value, gradients, rates)[0]


def sophia(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 3 of Liu et al. (2023), its estimate of the Hessian made up as the checks make it up."""
    mean = hessian = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        if (step - 1) % config.hessian_every == 0:
            hessian = config.beta2 * hessian + (1 - config.beta2) * 400.0 * (2.0 * gradient * gradient - 1.0)
        value -= rate * config.weight_decay * value
        value -= rate * max(-1.0, min(1.0, mean / max(config.gamma * hessian, config.epsilon)))
    return value


def prodigy(
    configs: list[Any], starts: list[np.ndarray], gradients: list[list[np.ndarray]], rates: list[float]
) -> list[np.ndarray]:
    """Algorithm 4 of Mishchenko & Defazio (2023), with what its authors' code adds: the factor of d's estimates, its
    largest growth, the bias correction, the denominator without the rate, and ε times the d that was just found."""
    config, values = configs[0], [start.copy() for start in starts]
    beta3 = math.sqrt(config.beta2) if config.beta3 is None else config.beta3
    means, squares, sums = ([np.zeros_like(start) for start in starts] for _ in range(3))
    d, largest, numerator = config.d0, config.d0, 0.0
    for step, (drawn, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        if config.bias_correction:
            rate *= math.sqrt(1 - config.beta2**step) / (1 - config.beta1**step)
        weight = d * d if config.safeguard_warmup else d * d * rate
        inner = sum(float((g * (start - value)).sum()) for g, start, value in zip(drawn, starts, values, strict=True))
        numerator = beta3 * numerator + (1 - beta3) * d * d * rate * inner
        sums = [beta3 * total + (1 - beta3) * weight * g for total, g in zip(sums, drawn, strict=True)]
        means = [config.beta1 * mean + (1 - config.beta1) * d * g for mean, g in zip(means, drawn, strict=True)]
        squares = [
            config.beta2 * square + (1 - config.beta2) * (d * g) ** 2 for square, g in zip(squares, drawn, strict=True)
        ]
        estimate = config.d_coef * numerator / sum(float(abs(total).sum()) for total in sums)
        taken = rate * d
        if d == config.d0:
            d = max(d, estimate)
        largest = max(largest, estimate)
        d = min(largest, d * (math.inf if config.growth_rate is None else config.growth_rate))
        for own, value, mean, square in zip(configs, values, means, squares, strict=True):
            value -= taken * own.weight_decay * value
            value -= taken * mean / (np.sqrt(square) + d * own.epsilon)
    return values


LOOPS = {"schedulefree_adamw": schedulefree_adamw, "sophia": sophia}
TENSOR_LOOPS: dict[str, Any] = {}
MODEL_LOOPS: dict[str, ModelLoop] = {"prodigy": prodigy}
