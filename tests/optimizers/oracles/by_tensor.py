"""Update rules of one tensor in float64 numpy, from the papers' formulas: they share no code with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# θ after the steps, from its first value, its gradients and the rates
Loop = Callable[[Any, np.ndarray, list[np.ndarray], list[float]], np.ndarray]


def rest(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 2 of Loshchilov & Hutter (2019) with the settings for what an optimizer of matrices leaves alone."""
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step, (gradient, given) in enumerate(zip(gradients, rates, strict=True), 1):
        rate = given * config.rest_lr_scale
        mean = config.rest_beta1 * mean + (1 - config.rest_beta1) * gradient
        square = config.rest_beta2 * square + (1 - config.rest_beta2) * gradient**2
        root = np.sqrt(square / (1 - config.rest_beta2**step)) + config.rest_epsilon
        value = value - rate * (mean / (1 - config.rest_beta1**step) / root + config.weight_decay * value)
    return value


def odd(matrix: np.ndarray, polynomials: list[tuple[float, float, float]]) -> np.ndarray:
    """Each singular value s becomes as + bs³ + cs⁵, polynomial after polynomial."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    for a, b, c in polynomials:
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def muon_polar(config: Any, matrix: np.ndarray) -> np.ndarray:
    """https://kellerjordan.github.io/posts/muon: quintics of the matrix over its Frobenius norm."""
    return odd(matrix / np.sqrt((matrix**2).sum()), config.iterations * [(3.4445, -4.7750, 2.0315)])


def turbo_polar(config: Any, matrix: np.ndarray) -> np.ndarray:
    """Row i of the wide orientation over the root of its sum of |⟨row i, row j⟩|, then four quintics of their own."""
    if matrix.shape[0] > matrix.shape[1]:
        return turbo_polar(config, matrix.T).T
    sums = [sum(abs(float(one @ other)) for other in matrix) for one in matrix]
    rescaled = np.array([row / total**0.5 for row, total in zip(matrix, sums, strict=True)])
    tuned = [
        (4.6051, -9.6552, 5.6769), (4.7505, -6.0861, 2.1790), (2.7763, -2.3190, 0.5523), (2.4231, -2.2861, 0.8193)
    ]  # fmt: skip
    return odd(rescaled, tuned)


def orthogonalised(polar: Callable[[Any, np.ndarray], np.ndarray]) -> Loop:
    """θ ← (1 − αλ)θ − α·s·polar(m′); s by the original rule or Liu et al. 2025 (arXiv:2502.16982, Eq. 4)."""

    def loop(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
        mean, (rows, columns), beta = np.zeros_like(value), value.shape, config.momentum
        scale = {"original": max(1.0, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
        for gradient, rate in zip(gradients, rates, strict=True):
            mean = beta * mean + (1 - beta) * gradient
            ahead = beta * mean + (1 - beta) * gradient if config.nesterov else mean
            value = value * (1 - rate * config.weight_decay) - rate * scale[config.scale] * polar(config, ahead)
        return value

    return loop


def shampoo(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 1 of Gupta et al. (2018), with decoupled decay; a long side has no factor, and the other one's root is
    the square root then."""
    factors = [config.epsilon * np.eye(length) for length in value.shape]
    short = [length <= config.max_dimension for length in value.shape]
    powers = [np.eye(length) for length in value.shape]
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        factors = [factors[0] + gradient @ gradient.T, factors[1] + gradient.T @ gradient]
        if step % config.every == 0:
            for side in (0, 1):
                if short[side]:
                    basis, values, _ = np.linalg.svd(factors[side])
                    powers[side] = basis @ np.diag(values ** (-1 / (2 * sum(short)))) @ basis.T
        value = value * (1 - rate * config.weight_decay) - rate * powers[0] @ gradient @ powers[1]
    return value


def soap(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithms 3 and 4 of Vyas et al. (2024), with decoupled decay, whose first gradient finds the bases alone."""
    mean, square = np.zeros_like(value), np.zeros_like(value)
    beta1, beta2 = config.beta1, config.beta2
    factors = [np.zeros((length, length)) for length in value.shape]
    bases: list[np.ndarray] = []
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        value = value * (1 - rate * config.weight_decay)
        if step:
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * (bases[0].T @ gradient @ bases[1]) ** 2
            unbiased = np.sqrt(1 - beta2**step) / (1 - beta1**step)
            turned = bases[0].T @ mean @ bases[1] / (np.sqrt(square) + config.epsilon)
            value = value - rate * unbiased * bases[0] @ turned @ bases[1].T
        products = gradient @ gradient.T, gradient.T @ gradient
        factors = [beta2 * held + (1 - beta2) * new for held, new in zip(factors, products, strict=True)]
        short = [length <= config.max_dimension for length in value.shape]
        if not step:
            found = [np.linalg.svd(factor)[0] for factor in factors]
            bases = [each if is_short else np.eye(len(each)) for each, is_short in zip(found, short, strict=True)]
        elif step % config.every == 0:
            for side in (0, 1):
                if short[side]:
                    moved = factors[side] @ bases[side]
                    order = np.argsort(-(bases[side] * moved).sum(0))
                    bases[side] = np.linalg.qr(moved[:, order])[0]
                    square = square[order] if side == 0 else square[:, order]
    return value


def galore_adamw(config: Any, value: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Algorithm 2 of Zhao et al. (2024), with decoupled decay; of each singular vector the largest entry is positive."""
    if value.shape[0] > value.shape[1]:
        return galore_adamw(config, value.T, [gradient.T for gradient in gradients], rates).T
    rank = int(np.ceil(config.rank_share * value.shape[0]))
    mean = square = np.zeros((rank, value.shape[1]))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        if step % config.every == 1 or config.every == 1:
            found = np.linalg.svd(gradient)[0].T[:rank]
            basis = np.array([column if max(column) == max(abs(column)) else -column for column in found]).T
        low = basis.T @ gradient
        mean = config.beta1 * mean + (1 - config.beta1) * low
        square = config.beta2 * square + (1 - config.beta2) * low**2
        root = np.sqrt(square / (1 - config.beta2**step)) + config.epsilon
        direction = basis @ (mean / (1 - config.beta1**step) / root)
        value = value * (1 - rate * config.weight_decay) - rate * config.scale * direction
    return value


LOOPS: dict[str, Loop] = {
    "galore_adamw": galore_adamw,
    "muon": orthogonalised(muon_polar),
    "shampoo": shampoo,
    "soap": soap,
    "turbo_muon": orthogonalised(turbo_polar),
}
