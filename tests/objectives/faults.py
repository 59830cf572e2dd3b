"""Objectives with one planted fault each: all are masked language modelling, so that only the fault differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.objectives.mlm import MaskedLanguageModel
from stability.runs.words import Words
from tests.objectives.subjects import VOCABULARY


class Fault(MaskedLanguageModel):
    def __init__(self, **settings: Any):
        super().__init__(MaskedLanguageModel.Config(**settings), VOCABULARY)


class AveragesItself(Fault):
    def loss_sum(self, logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss_sum(logits_BNV, examples)
        return total / count, torch.ones_like(count)

    def count(self, examples: Any, dtype: torch.dtype) -> Tensor:
        return torch.ones((), dtype=dtype)


class CountsOtherwise(Fault):
    def count(self, examples: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(examples.weights_BN.numel(), dtype=dtype)


class GrowsWithTheBatch(Fault):
    def loss_sum(self, logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss_sum(logits_BNV, examples)
        return total * len(logits_BNV), count


class DrawsGlobally(Fault):
    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Any:
        return super().examples(tokens_BN, torch.Generator().manual_seed(int(torch.randint(1000, ()))))


class DrawsForNothing(Fault):
    """A generator that is used up, and examples that are always the same."""

    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Any:
        torch.rand(1, generator=generator)
        return super().examples(tokens_BN, torch.Generator().manual_seed(0))


class WritesToItsBatch(Fault):
    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Any:
        made = super().examples(tokens_BN.clone(), generator)
        tokens_BN[:, 0] = (tokens_BN[:, 0] + 1) % VOCABULARY
        return made


class ReadsEveryLogit(Fault):
    def loss_sum(self, logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss_sum(logits_BNV, examples)
        return total + 1e-3 * logits_BNV.logsumexp(-1).sum(), count


class ReadsEveryTarget(Fault):
    def loss_sum(self, logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss_sum(logits_BNV, examples)
        return total + 1e-3 * examples.targets_BN.sum(), count


class PredictsPadding(Fault):
    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Any:
        made = super().examples(tokens_BN, generator)
        return made._replace(mask_BN=torch.arange(tokens_BN.shape[1]).expand(tokens_BN.shape) < 8)


class ForgetsItsMask(Fault):
    """Says what is padding, gives it no weight, and does not tell the model."""

    def examples(self, tokens_BN: Any, generator: torch.Generator) -> Any:
        made = super().examples(tokens_BN, generator)
        mask_BN = torch.arange(tokens_BN.shape[1]).expand(tokens_BN.shape) < 8
        return made._replace(mask_BN=mask_BN, weights_BN=made.weights_BN * mask_BN)

    def loss(self, model: nn.Module, examples: Any, params: Any = None) -> tuple[Tensor, Tensor]:
        return super().loss(model, examples._replace(mask_BN=None), params)


class DetachesAPart(Fault):
    def loss_sum(self, logits_BNV: Tensor, examples: Any) -> tuple[Tensor, Tensor]:
        return super().loss_sum(logits_BNV * logits_BNV.detach().tanh(), examples)


class SaysNoUnit(Fault):
    words = Words(unit="")


class ForgetsItsScores(Fault):
    score_names = ("val_accuracy",)


class LosesAComponent(Fault):
    components = ("first", "second")

    def component_sums(self, logits_BNV: Tensor, examples: Any) -> Tensor:
        total = self.loss_sum(logits_BNV, examples)[0]
        return torch.stack((total, total / 2))


class SamplesByHope(Fault):
    samplers = ("hope",)


class GivesLogits(Fault):
    @torch.no_grad()
    def clean_probs(self, model: nn.Module, tokens_BN: Tensor) -> Tensor:
        return model(tokens_BN)


class SamplesFromTheLeft(Fault):
    samplers = ("ar",)


class IgnoresItsCorruption(Fault):
    def __init__(self, **settings: Any):
        super().__init__(**{**settings, "corruption": "mask"})
