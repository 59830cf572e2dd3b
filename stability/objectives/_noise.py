"""Noise schedules of discrete diffusion: how much of a sequence is corrupted at time t (Lou et al. 2024,
arXiv:2310.16834, appendix C.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stability.objectives._mask_rates import stratified

NoiseName = Literal["loglinear", "geometric"]
EARLIEST = 1e-3  # times are drawn from [EARLIEST, 1]: the loss's weight grows as 1/t


@dataclass(frozen=True)
class LogLinear:
    """The noise σ(t) = −log(1 − (1 − ε)t): a share (1 − ε)t of the tokens is corrupted at time t."""

    epsilon: float

    def sigma(self, t: Tensor) -> Tensor:
        """Return the total noise σ, same shape; each token is corrupted with probability 1 − e^{−σ}."""
        return -torch.log1p(-(1 - self.epsilon) * t)

    def rate(self, t: Tensor) -> Tensor:
        """Return σ′ = dσ/dt, same shape."""
        return (1 - self.epsilon) / (1 - (1 - self.epsilon) * t)


@dataclass(frozen=True)
class Geometric:
    """The noise σ(t) = σ_min^{1−t} σ_max^t."""

    sigma_min: float
    sigma_max: float

    def sigma(self, t: Tensor) -> Tensor:
        """Return the total noise σ, same shape; each token is corrupted with probability 1 − e^{−σ}."""
        return self.sigma_min * (t * math.log(self.sigma_max / self.sigma_min)).exp()

    def rate(self, t: Tensor) -> Tensor:
        """Return σ′ = dσ/dt, same shape."""
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)


Noise = LogLinear | Geometric


def times(num: int, generator: torch.Generator) -> Tensor:
    """Draw ``num`` times, each U(1e-3, 1), float32: one per sequence, spread evenly over the batch as the mask rates
    are (`stratified`)."""
    return EARLIEST + (1 - EARLIEST) * stratified(num, generator)
