"""Mechanisms with one planted fault each.

Faults of what `forward` does: all mix by a uniform mean of what a position may see, so that only the fault differs.
Faults of what is exposed: sound mechanisms that expose something else than they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stability.mechanisms._base import MixerShape
from stability.mechanisms.attentionx import AttentionX
from stability.mechanisms.sc import SelfConsensus
from tests.mechanisms.checks import HEADS, WIDTH, padding
from tests.mechanisms.plugins.gated import GatedMean
from tests.mechanisms.plugins.sigmoid_seen import SeenSigmoid


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
        return super().visible(x_BND, mask_BN) | torch.ones(
            x_BND.shape[1], x_BND.shape[1], dtype=torch.bool
        ).tril().roll(-1, 0)


class LeaksFutureByItsScale(Mean):
    """Causal weights, but a norm over the whole sequence."""

    def finish(self, y_BND: Tensor) -> Tensor:
        return y_BND / y_BND.norm(dim=1, keepdim=True)


class IgnoresPast(Mean):
    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return torch.eye(x_BND.shape[1], dtype=torch.bool)


class SelectsAtATie(Mean):
    """Sound, but at a point where its curvature is not that of one piece."""

    piecewise_smooth = True

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return x_BND.new_tensor(0.0)


class ReadsPadding(Mean):
    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return super().forward(x_BND)


class EmptyRows(Mean):
    """Padding itself sees nothing, and nothing over nothing is NaN."""

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return mask_BN[:, None].expand(-1, x_BND.shape[1], -1)


class ChoosesWithoutLearning(Mean):
    """A scorer that only chooses: no gradient reaches it."""

    def __init__(self):
        super().__init__()
        self.scorer = nn.Linear(WIDTH, 1)

    def visible(self, x_BND: Tensor, mask_BN: Tensor) -> Tensor:
        return super().visible(x_BND, mask_BN) & (self.scorer(x_BND) > 0).mT


class SparesWhatNobodyKnows(Mean):
    """Leaves a parameter out of weight decay that is written down nowhere."""

    own_decay = {"out.bias": False}


class SparesWhatItHasNot(Mean):
    own_decay = {"gate.bias": False}


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


class StartsLocalOverItsOwn(GatedMean):
    """Says that the gate's bias is its own, and then takes the model's."""

    def __init__(self):
        super().__init__(None, MixerShape(WIDTH, HEADS, "causal"))

    def start_local(self, bias: float) -> None:
        nn.init.constant_(self.gate.bias, bias)


class AddsABiasItself(Mean):
    """Takes a linear map's bias for granted: without one it does something else."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def finish(self, y_BND: Tensor) -> Tensor:
        return self.inner(y_BND) + (1.0 if self.inner.bias is None else self.inner.bias)


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


SHAPE = MixerShape(WIDTH, HEADS)


class ExposesASoftmax(SeenSigmoid):
    """Sigmoid attention whose weights are the softmax that a probe might have taken for granted."""

    def __init__(self):
        super().__init__(None, SHAPE)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        a_BHNN = super().weights(x_BND, mask_BN=mask_BN).logit().softmax(-1)
        return a_BHNN if mask_BN is None else a_BHNN.masked_fill(~mask_BN[:, None, None], 0.0)


class ClaimsToAverage(SeenSigmoid):
    """The right weights, whose rows do not sum to 1 as the class says."""

    rows_sum_to_one = True

    def __init__(self):
        super().__init__(None, SHAPE)


class WeighsPadding(SeenSigmoid):
    """Weights for padding, which `forward` does not read: it is zero, and so are its values but for their bias."""

    def __init__(self):
        super().__init__(None, SHAPE)
        nn.init.zeros_(self.qkv.bias)

    def weights(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return super().weights(x_BND)

    def values(self, x_BND: Tensor) -> Tensor:
        return super().values(torch.where(padding()[..., None], x_BND, 0.0))


class ForgetsToSubtract(AttentionX):
    """Passes on v − γAv, and says that it passes on Av."""

    def __init__(self):
        super().__init__(AttentionX.Config(), SHAPE)

    def mixed(self, a_BHNN: Tensor, v_BHNK: Tensor) -> Tensor:
        return a_BHNN @ v_BHNK


class HidesAnEdge(SelfConsensus):
    def __init__(self):
        super().__init__(SelfConsensus.Config(), SHAPE)

    def edge_weights(self, x_BND: Tensor, *, edges: Tensor | None = None):
        source_E, target_E, r_BHEKK = super().edge_weights(x_BND, edges=edges)
        return source_E[1:], target_E[1:], r_BHEKK[:, :, 1:]


class HidesItsRotation(SelfConsensus):
    def __init__(self):
        super().__init__(SelfConsensus.Config(), SHAPE)
        self.rotation = "none"

    def forward(self, x_BND: Tensor, **given: Tensor) -> Tensor:
        self.rotation = "absolute"
        y_BND = super().forward(x_BND, **given)
        self.rotation = "none"
        return y_BND


class HidesAnIteration(SelfConsensus):
    def __init__(self):
        super().__init__(SelfConsensus.Config(iterations=2), SHAPE)

    def forward(self, x_BND: Tensor, **given: Tensor) -> Tensor:
        self.config = self.config.model_copy(update={"iterations": 2})
        y_BND = super().forward(x_BND, **given)
        self.config = self.config.model_copy(update={"iterations": 1})
        return y_BND
