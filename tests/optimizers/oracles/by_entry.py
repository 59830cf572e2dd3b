"""Update rules of one entry in plain Python numbers, from the papers' formulas: they share no code with torch's."""

from __future__ import annotations

import math
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
    """v ← μv + g + λθ, θ ← θ − αv; the first velocity is the first gradient. Nesterov's (Sutskever et al. 2013, at the
    point looked ahead to): θ ← θ − α(g + λθ + μv)."""
    velocity = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        penalised = gradient + config.weight_decay * value
        velocity = config.momentum * velocity + penalised
        value -= rate * (penalised + config.momentum * velocity if getattr(config, "nesterov", False) else velocity)
    return value


def radam(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 2 of Liu et al. (2020), rectified where ρ_t > 5, ε added to √v: θ ← θ − α(r m̂ √(1 − β₂ᵗ)/(√v + ε) +
    λθ), before that θ ← θ − α(m̂ + λθ)."""
    mean = square = 0.0
    longest = 2 / (1 - config.beta2) - 1
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient * gradient
        direction = mean / (1 - config.beta1**step)
        length = longest - 2 * step * config.beta2**step / (1 - config.beta2**step)
        if length > 5:
            rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            direction *= (rectified * (1 - config.beta2**step)) ** 0.5 / (square**0.5 + config.epsilon)
        value -= rate * (direction + config.weight_decay * value)
    return value


def lion(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 2 of Chen et al. (2023): θ ← θ − α(sign(β₁m + (1 − β₁)g) + λθ), then m ← β₂m + (1 − β₂)g."""
    mean = 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        interpolated = config.beta1 * mean + (1 - config.beta1) * gradient
        sign = (interpolated > 0) - (interpolated < 0)
        value -= rate * (sign + config.weight_decay * value)
        mean = config.beta2 * mean + (1 - config.beta2) * gradient
    return value


def adan(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 1 of Xie et al. (2022) with β for their 1 − β, bias corrections as in their code, decoupled decay:
    θ ← θ − α((m̂ + β₂v̂)/(√n̂ + ε) + λθ)."""
    mean = difference = square = 0.0
    before = gradients[0]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        change = gradient - before
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        difference = config.beta2 * difference + (1 - config.beta2) * change
        square = config.beta3 * square + (1 - config.beta3) * (gradient + config.beta2 * change) ** 2
        ahead = mean / (1 - config.beta1**step) + config.beta2 * difference / (1 - config.beta2**step)
        root = (square / (1 - config.beta3**step)) ** 0.5
        value -= rate * (ahead / (root + config.epsilon) + config.weight_decay * value)
        before = gradient
    return value


def adopt(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 2 of Taniguchi et al. (2024): v₀ = g₀², then for t ≥ 1 m ← β₁m + (1 − β₁)clip(g/max(√v, ε), ±t^¼),
    θ ← θ − α(m + λθ), v ← β₂v + (1 − β₂)g². Weight decay reaches θ in the first step, too, as in the authors' code."""
    value -= rates[0] * config.weight_decay * value
    mean, square = 0.0, gradients[0] ** 2
    for step, (gradient, rate) in enumerate(zip(gradients[1:], rates[1:], strict=True), 1):
        ratio = gradient / max(square**0.5, config.epsilon)
        ratio = max(-(step**0.25), min(step**0.25, ratio))
        mean = config.beta1 * mean + (1 - config.beta1) * ratio
        value -= rate * (mean + config.weight_decay * value)
        square = config.beta2 * square + (1 - config.beta2) * gradient * gradient
    return value


def ademamix(config: Any, value: float, gradients: list[float], rates: list[float]) -> float:
    """Algorithm 1 of Pagliardini et al. (2024): θ ← θ − α_lr((m̂₁ + α m₂)/(√v̂ + ε) + λθ), α and β₃ by the schedules of
    their section 3."""
    fast = slow = square = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        alpha, beta3 = config.alpha, config.beta3
        if config.warmup_steps is not None and step < config.warmup_steps:
            share = step / config.warmup_steps
            alpha = share * config.alpha
            first, last = math.log(config.beta1), math.log(config.beta3)
            beta3 = math.exp(first * last / ((1 - share) * last + share * first))
        fast = config.beta1 * fast + (1 - config.beta1) * gradient
        slow = beta3 * slow + (1 - beta3) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient * gradient
        root = (square / (1 - config.beta2**step)) ** 0.5
        mixed = fast / (1 - config.beta1**step) + alpha * slow
        value -= rate * (mixed / (root + config.epsilon) + config.weight_decay * value)
    return value


LOOPS = {
    "adamw": adamw,
    "sgd": sgd,
    "radam": radam,
    "lion": lion,
    "adan": adan,
    "adopt": adopt,
    "ademamix": ademamix,
}
