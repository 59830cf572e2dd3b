"""Mechanisms with one planted fault each. All mix by a uniform mean of what a position may see, so that only the fault differs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.mechanisms.checks import WIDTH


class Mean(nn.Module):
    """The sound one: y = W·(mean of the valid positions up to oneself, or of all)."""

    def __init__(self, causal: bool = False):
        super().__init__()
        self.causal, self.out = causal, nn.Linear(WIDTH, WIDTH)

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        ones_NN = torch.ones(x_BND.shape[1], x_BND.shape[1], dtype=torch.bool)
        return ((ones_NN.tril() if self.causal else ones_NN) & mask_BN[:, None]) | (ones_NN.tril() & ones_NN.triu())

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        mask_BN = torch.ones(x_BND.shape[:2], dtype=torch.bool) if mask_BN is None else mask_BN
        visible_BNN = self.visible(x_BND, mask_BN).to(x_BND.dtype)
        y_BND = (visible_BNN / visible_BNN.sum(-1, keepdim=True)) @ torch.where(mask_BN[..., None], x_BND, 0.0)
        return self.finish(torch.tanh(self.out(y_BND)))

    def finish(self, y_BND: Tensor) -> Tensor:
        return y_BND


class LeaksFuture(Mean):
    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return super().visible(x_BND, mask_BN) | torch.ones(x_BND.shape[1], x_BND.shape[1], dtype=torch.bool).tril().roll(-1, 0)


class LeaksFutureByItsScale(Mean):
    """Causal weights, but a norm over the whole sequence."""

    def finish(self, y_BND: Tensor) -> Tensor:
        return y_BND / y_BND.norm(dim=1, keepdim=True)


class IgnoresPast(Mean):
    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return torch.eye(x_BND.shape[1], dtype=torch.bool)


class ReadsPadding(Mean):
    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return super().forward(x_BND)


class EmptyRows(Mean):
    """Padding itself sees nothing, and nothing over nothing is NaN."""

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return mask_BN[:, None].expand(-1, x_BND.shape[1], -1)


class RedrawsAtEveryCall(Mean):
    def finish(self, y_BND: Tensor) -> Tensor:
        return y_BND + torch.rand(())


class KeepsStateOutside(Mean):
    """A tensor that training needs, but that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.scale = torch.rand(())

    def finish(self, y_BND: Tensor) -> Tensor:
        return y_BND * self.scale


class ForgetsCurvature(Mean):
    """A right gradient whose own derivative is cut."""

    def finish(self, y_BND: Tensor) -> Tensor:
        return _CutCube.apply(y_BND)


class _CutCube(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].detach())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0].detach() ** 2 * gradient.detach()

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return 0 * tangent


class DividesByZeroNorm(Mean):
    def finish(self, y_BND: Tensor) -> Tensor:
        centred_BND = y_BND - y_BND.mean(1, keepdim=True)
        return centred_BND / centred_BND.norm(dim=-1, keepdim=True)
