"""Whether a mixer maps mirrored inputs to mirrored outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stability.models.auxiliary import split_loss

NUM_POSITIONS = 24  # more than a default window on both sides
CLOSE = 1e-8  # over the output's norm, in float64


def gives_mirrored_outputs(build: Callable[[], nn.Module], width: int) -> bool:
    """Return whether a mixer with random parameters is indifferent to the direction of its input.

    The global random state is unchanged.

    Args:
        build: makes the mixer.
        width: D.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        mixer = build().double().eval()
        for parameter in mixer.parameters():  # none stays at zero, where some begin
            parameter.add_(0.1 * torch.randn_like(parameter))
        x_BND = torch.randn(2, NUM_POSITIONS, width, dtype=torch.float64)
        there, back = (split_loss(mixer(each), []) for each in (x_BND, x_BND.flip(1)))
    return bool((there.flip(1) - back).norm() <= CLOSE * there.norm())
