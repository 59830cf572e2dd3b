"""SET-Adam (Zhang 2023): Adam with a smaller range of step sizes within each tensor."""

from __future__ import annotations

import torch
from pydantic import Field

from stability.config import Settings
from stability.optimizers._adam import ByHand, Group, Tensors
from stability.optimizers._base import AbstractOptimizer


class SuppressedRange(ByHand):
    """Adam with each tensor's denominators drawn together: scaled, with ε inside the root, and translated."""

    def advance(self, group: Group, params: Tensors, gradients: Tensors) -> None:
        """Perform one group's step in place.

        Args:
            group: the parameter group with its settings.
            params: parameters with gradients.
            gradients: one tensor for each parameter.
        """
        beta1, beta2, step = group["beta1"], group["beta2"], group["step"]
        means, squares = self.update_means(group, params, gradients)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for param, mean, square in zip(params, means, squares, strict=True):
            root = square.mul(share_of_mean(square) / (1 - beta2**step)).add_(group["epsilon"]).sqrt_()
            root.sub_(group["translation"] * root.min())
            param.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))


def share_of_mean(square: torch.Tensor) -> torch.Tensor:
    """Return cos² of a tensor's angle to the tensor of ones, (Σv)²/(d Σv²), as a 0-d tensor; 1 for zeros.

    The scale is taken out first: squares of small numbers would vanish.
    """
    largest = square.max()
    relative = square / torch.where(largest > 0, largest, 1)
    cos = relative.sum().square() / (relative.numel() * relative.square().sum().clamp_min(1))  # the largest is 1
    return torch.where(largest > 0, cos, 1)


class SetAdam(AbstractOptimizer):
    """Adam whose step sizes differ less within a tensor (Zhang 2023, arXiv:2302.01029).

    θ ← θ − α/(1 − β₁ᵗ) · m/w̃, with w̃ = w − τ min w, w = √(v cos²(v, 1)/(1 − β₂ᵗ) + ε). The cosine, of the angle between
    v and the tensor of ones, and the least w are those of each tensor. The optimizer of AttentionX's ViT runs, with
    ``epsilon=1e-18``.
    """

    stepper = SuppressedRange
    update_family = "adam"

    class Config(Settings):
        weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay, times the learning rate")
        beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean gradient")
        beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean squared gradient")
        epsilon: float = Field(default=1e-18, gt=0, description="added to the mean squared gradient, inside the root")
        translation: float = Field(
            default=0.5, ge=0, lt=1, description="τ: share of the least root that all roots of a tensor lose"
        )


EXPORT = SetAdam
