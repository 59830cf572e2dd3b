"""Cross mechanisms with one planted fault each, around a uniform mean of the context."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.mechanisms.checks import WIDTH


class CrossMean(nn.Module):
    """The sound one: y = tanh(W·(x + mean of the valid context)), 0 where there is none."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x_BND: Tensor,
        context_BJD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BJ: Tensor | None = None,
    ) -> Tensor:
        x_BND = x_BND if mask_BN is None else torch.where(mask_BN[..., None], x_BND, 0.0)
        mask_BJ = torch.ones(context_BJD.shape[:2], dtype=torch.bool) if context_mask_BJ is None else context_mask_BJ
        y_BND = torch.tanh(self.out(self.source(x_BND) + self.mean(context_BJD, mask_BJ)))
        return self.finish(y_BND, mask_BJ.any(-1)[:, None, None])

    def source(self, x_BND: Tensor) -> Tensor:
        return x_BND

    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        count_B1 = mask_BJ.sum(1, keepdim=True).clamp(min=1)
        return (torch.where(mask_BJ[..., None], context_BJD, 0.0).sum(1) / count_B1)[:, None]

    def finish(self, y_BND: Tensor, has_context: Tensor) -> Tensor:
        return torch.where(has_context, y_BND, 0.0)


class ReadsContextPadding(CrossMean):
    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return context_BJD.mean(1, keepdim=True)


class WeighsContextPaddingWithZero(CrossMean):
    """Nothing times NaN is NaN."""

    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return ((context_BJD * mask_BJ[..., None]).sum(1) / mask_BJ.sum(1, keepdim=True).clamp(min=1))[:, None]


class CountsContextPadding(CrossMean):
    """Reads no padding, but divides by its length."""

    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return torch.where(mask_BJ[..., None], context_BJD, 0.0).mean(1, keepdim=True)


class EmptyMean(CrossMean):
    """Nothing over nothing is NaN: the block hides it in the value, not in a gradient."""

    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return (torch.where(mask_BJ[..., None], context_BJD, 0.0).sum(1) / mask_BJ.sum(1, keepdim=True))[:, None]


class IgnoresContext(CrossMean):
    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return torch.zeros_like(context_BJD[:, :1])


class GivesNothing(CrossMean):
    def finish(self, y_BND: Tensor, has_context: Tensor) -> Tensor:
        return y_BND * 0.0


class ReadsTheFirstAlone(CrossMean):
    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return context_BJD[:, :1]


class MixesSources(CrossMean):
    def source(self, x_BND: Tensor) -> Tensor:
        return x_BND + x_BND.mean(1, keepdim=True)


class TakesOneLengthOnly(CrossMean):
    """Shaped for contexts as long as the source."""

    def finish(self, y_BND: Tensor, has_context: Tensor) -> Tensor:
        return super().finish(y_BND, has_context)[:, :9]

    def mean(self, context_BJD: Tensor, mask_BJ: Tensor) -> Tensor:
        return torch.where(mask_BJ[..., None], context_BJD, 0.0)[:, :1].expand(-1, 9, -1)
