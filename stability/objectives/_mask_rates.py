"""Mask-rate schedules of masked language modelling (facts 2: Hayes et al. 2024).

One rate per sequence.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

ScheduleName = Literal["uniform", "betalinear30", "cosine", "sqrt", "fixed"]
DrawnSchedule = Literal["uniform", "betalinear30", "cosine", "sqrt"]
LOWEST, HIGHEST = 0.05, 0.95


def mask_rates(schedule: ScheduleName, num: int, generator: torch.Generator, fixed: float = 1.0) -> Tensor:
    """Draw ``num`` mask rates, float32, in [0.05, 0.95] except for fixed.

    uniform: u; cosine: sin(πu/2); sqrt: √u; betalinear30: with probability 0.8 from Beta(3, 9), else uniform; fixed:
    ``fixed`` for all, without any draw.

    Args:
        schedule: name of the schedule.
        num: number of sequences.
        generator: source of randomness.
        fixed: rate of the schedule fixed.
    """
    if schedule == "fixed":
        return torch.full((num,), fixed)
    u = draw_stratified(num, generator)
    if schedule == "cosine":
        u = torch.sin(u * (math.pi / 2))
    elif schedule == "sqrt":
        u = u.sqrt()
    elif schedule == "betalinear30":
        # Beta(3, 9) is the third smallest of 11 uniforms; torch's Beta sampler takes no generator
        beta = torch.rand(num, 11, generator=generator).sort(dim=1).values[:, 2]
        u = torch.where(torch.rand(num, generator=generator) < 0.8, beta, u)
    return u.clamp(LOWEST, HIGHEST)


def draw_stratified(num: int, generator: torch.Generator) -> Tensor:
    """Draw evenly spread uniform numbers with a common offset, in random order.

    Each is U(0, 1); together they cover the range, so that the rates of a small batch add no noise of their own to its
    gradient (Kingma et al. 2021, variational diffusion, I.1).
    """
    spread = (torch.rand(1, generator=generator) + torch.arange(num) / num) % 1
    return spread[torch.randperm(num, generator=generator)]


def random_mask(rates_B: Tensor, num_positions: int, generator: torch.Generator) -> Tensor:
    """Draw a mask (B, N), bool, at each sequence's rate; at least one position per sequence.

    Args:
        rates_B: mask rates.
        num_positions: N.
        generator: source of randomness.
    """
    return draw_mask(torch.ones(len(rates_B), num_positions, dtype=torch.bool), rates_B, generator)


def draw_mask(eligible_BN: Tensor, rates_B: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a mask (B, N), bool, among eligible positions at each sequence's rate.

    At least one position per sequence is masked if any is eligible.

    Args:
        eligible_BN: True at eligible positions.
        rates_B: mask rates.
        generator: source of randomness.
    """
    draws_BN = torch.rand(eligible_BN.shape, generator=generator).masked_fill(~eligible_BN, 2.0)
    return eligible_BN & ((draws_BN < rates_B[:, None]) | (draws_BN == draws_BN.min(dim=1, keepdim=True).values))
