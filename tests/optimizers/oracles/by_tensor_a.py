"""Update rules of one tensor in float64 numpy, from the papers' formulas: they share no code with torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# θ after the steps, from its first value, its gradients and the rates
Loop = Callable[[Any, np.ndarray, list[np.ndarray], list[float]], np.ndarray]


def directions(config: Any, gradients: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield Adam's m̂/(√v̂ + ε) of each step (Kingma & Ba 2015, Algorithm 1)."""
    mean, square = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        root = np.sqrt(square / (1 - config.beta2**step))
        yield mean / (1 - config.beta1**step) / (root + config.epsilon)


def cautious_adamw(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 1 of Liang et al. (2024): θ ← θ − α(u·[ug > 0]/share + λθ), share: that of the entries with ug > 0, 1e-3
    at least."""
    for direction, gradient, rate in zip(directions(config, gradients), gradients, rates, strict=True):
        kept = direction * gradient > 0
        share = max(np.count_nonzero(kept) / kept.size, 1e-3)
        value = value - rate * (np.where(kept, direction, 0) / share + config.weight_decay * value)
    return value


def lamb(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 2 of You et al. (2020), φ(z) = z: θ ← θ − α‖θ‖/‖r + λθ‖ (r + λθ)."""
    for direction, rate in zip(directions(config, gradients), rates, strict=True):
        step = direction + config.weight_decay * value
        value = value - rate * np.sqrt((value**2).sum()) / np.sqrt((step**2).sum()) * step
    return value


def stable_adamw(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 2 of Wortsman et al. (2023): η = α / max(1, RMS), RMS = √mean(g²/max(v̂, ε²)), θ ← θ − η(u + λθ)."""
    square = np.zeros_like(value)
    for step, (direction, gradient, rate) in enumerate(
        zip(directions(config, gradients), gradients, rates, strict=True), 1
    ):
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        rms = np.sqrt((gradient**2 / np.maximum(square / (1 - config.beta2**step), config.epsilon**2)).mean())
        value = value - rate / max(1.0, rms) * (direction + config.weight_decay * value)
    return value


def set_adam(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Zhang (2023): θ ← θ − α/(1 − β₁ᵗ) m/w̃, w̃ = w − τ min w, w = √(v cos²∠(v, 1)/(1 − β₂ᵗ) + ε), one coordinate after
    another, with the angle's cosine as a quotient of an inner product and two norms."""
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = config.beta1 * mean + (1 - config.beta1) * gradient
        square = config.beta2 * square + (1 - config.beta2) * gradient**2
        flat, ones = square.ravel(), np.ones(square.size)
        cos = flat @ ones / (np.linalg.norm(flat) * np.linalg.norm(ones))
        roots = np.array([np.sqrt(v * cos**2 / (1 - config.beta2**step) + config.epsilon) for v in flat])
        roots = (roots - config.translation * min(roots)).reshape(value.shape)
        value = value * (1 - rate * config.weight_decay) - rate / (1 - config.beta1**step) * mean / roots
    return value


def mars_adamw(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 2 of Yuan et al. (2024), approximate: c = g + γ β₁/(1 − β₁)(g − g₋₁), g₀ = 0, over its norm where that is
    above 1; AdamW on c."""
    corrected, before = [], np.zeros_like(value)
    for gradient in gradients:
        own = gradient + config.gamma * config.beta1 / (1 - config.beta1) * (gradient - before)
        corrected.append(own / max(1.0, np.sqrt((own**2).sum())))
        before = gradient
    for direction, rate in zip(directions(config, corrected), rates, strict=True):
        value = value - rate * (direction + config.weight_decay * value)
    return value


def adafactor(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithms 4 to 6 of Shazeer & Stern (2018) with ρ = min(α, 1/√t), ε₁ = 0, decay λα: R, C means over columns and
    rows, V = RC/mean(R); of a vector v itself."""
    rows = columns = square = 0.0
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        kept = 1 - step**-config.beta2_power
        if gradient.ndim == 2:
            rows = kept * rows + (1 - kept) * (gradient**2).mean(axis=1)
            columns = kept * columns + (1 - kept) * (gradient**2).mean(axis=0)
            variance = np.outer(rows, columns) / rows.mean()
        else:
            variance = square = kept * square + (1 - kept) * gradient**2
        update = gradient / np.sqrt(variance)
        update = update / max(1.0, np.sqrt((update**2).mean()) / config.clip_threshold)
        size = max(config.epsilon2, np.sqrt((value**2).mean()))
        value = value * (1 - rate * config.weight_decay) - min(rate, step**-0.5) * size * update
    return value


LOOPS: dict[str, Loop] = {
    "adafactor": adafactor,
    "cautious_adamw": cautious_adamw,
    "lamb": lamb,
    "mars_adamw": mars_adamw,
    "set_adam": set_adam,
    "stable_adamw": stable_adamw,
}
