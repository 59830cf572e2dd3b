"""Softmax attentions that say something else of themselves than they compute, while their weights give their output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stability.mechanisms.attentionx import AttentionX
from stability.mechanisms.sa import SoftmaxAttention
from stability.mechanisms.sw import SlidingWindowAttention
from tests.mechanisms.faults import SHAPE


class SplitsInAnotherOrder(SoftmaxAttention):
    """Takes values, queries and keys from ``qkv``, and says that W_q and W_k are its first rows."""

    def __init__(self):
        super().__init__(SoftmaxAttention.Config(), SHAPE)

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v_BND, q_BND, k_BND = qkv_BND.chunk(3, -1)
        return super().split(torch.cat([q_BND, k_BND, v_BND], -1))


class LearnsAnotherGamma(AttentionX):
    """Passes on v − 2.5·Av by a parameter of its own, and says that γ is 1."""

    def __init__(self):
        super().__init__(AttentionX.Config(), SHAPE)
        self.learned = nn.Parameter(torch.tensor(2.5))

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        return v_BHNK - self.learned * (a_BHNN @ v_BHNK)

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return self.joined(self.mixed(self.weights(x_BND, mask_BN=mask_BN), self.values(x_BND)), x_BND)


class LosesItsGamma(AttentionX):
    """Passes on v − γAv, and says that it has no γ."""

    def __init__(self):
        super().__init__(AttentionX.Config(), SHAPE)
        self.gamma_, self.gamma = self.gamma, None

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        return v_BHNK - self.gamma_ * (a_BHNN @ v_BHNK)

    forward = LearnsAnotherGamma.forward


class ShiftsItsLogits(SoftmaxAttention):
    """The same softmax of logits that are larger by 7, as a probe of the largest would read."""

    def __init__(self):
        super().__init__(SoftmaxAttention.Config(), SHAPE)

    def logits(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        return super().logits(q_BHNK, k_BHNK) + 7


class HidesItsTemperature(SoftmaxAttention):
    """Logits three times as large by a factor that is no ``log_temperature``."""

    def __init__(self):
        super().__init__(SoftmaxAttention.Config(), SHAPE)

    def split(self, qkv_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHNK, k_BHNK, v_BHNK = super().split(qkv_BND)
        return 3 * q_BHNK, k_BHNK, v_BHNK


class HidesItsWindow(SlidingWindowAttention):
    """Weights of a window, whose ``visible`` says that all see all."""

    def __init__(self):
        super().__init__(SlidingWindowAttention.Config(), SHAPE)

    def visible(self, num_positions: int, device: torch.device) -> Tensor:
        return torch.ones(num_positions, num_positions, dtype=torch.bool)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        a_BHNN = super().weights(x_BND, mask_BN=mask_BN) * super().visible(x_BND.shape[1], x_BND.device)
        return a_BHNN / a_BHNN.sum(-1, keepdim=True).clamp_min(1e-300)


class HidesItsDiagonal(SoftmaxAttention):
    """A position does not see itself, and the class says that it does."""

    def __init__(self):
        super().__init__(SoftmaxAttention.Config(), SHAPE)

    def visible(self, num_positions: int, device: torch.device) -> Tensor:
        return ~torch.eye(num_positions, dtype=torch.bool)

    forward = LearnsAnotherGamma.forward


class ExposesOtherValues(SoftmaxAttention):
    """Values twice as large as what `split` gives, halved where they are joined."""

    def __init__(self):
        super().__init__(SoftmaxAttention.Config(), SHAPE)

    def values(self, x_BND: Tensor) -> Tensor:
        return 2 * super().values(x_BND)

    def joined(self, y_BHNK: Tensor, x_BND: Tensor) -> Tensor:
        return super().joined(y_BHNK / 2, x_BND)

    forward = LearnsAnotherGamma.forward
