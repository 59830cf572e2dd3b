"""Update rules of one entry in plain Python numbers, from the papers' formulas: they share no code with torch's."""

from __future__ import annotations

from typing import Any


def adamw(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 2 of Loshchilov & Hutter (2019) with the decay times the rate: θ ← θ − α(m̂/(√v̂ + ε) + λθ)."""
    mean = square = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient * gradient
        root = (square / (1 - config.beta2**step)) ** 0.5
        direction = mean / (1 - config.beta1**step) / (root + config.epsilon)
        value -= rate * (direction + config.weight_decay * value)
    return value


def sgd(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """v ← μv + g + λθ, θ ← θ − αv; the first velocity is the first gradient."""
    velocity = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = config.momentum * velocity + gradient + config.weight_decay * value
        value -= rate * velocity
    return value


LOOPS = {"adamw": adamw, "sgd": sgd}
