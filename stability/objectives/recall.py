"""Recall: predict tokens only at the positions of questions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stability.objectives import AbstractVocabularyObjective, VocabularySettings
from stability.objectives._examples import Examples, ZLoss, weighted_cross_entropy
from stability.runs.words import ShareWords, Words


class Recall(AbstractVocabularyObjective):
    """Mean cross entropy of the answers, and their accuracy.

    The data (`data=mqar`, `data=copy`) give the positions of the questions and the right tokens; the model reads no
    later position (Arora et al. 2023, arXiv:2312.04927). The logits of all other positions are ignored.
    """

    class Config(VocabularySettings):
        """The settings common to all objectives over a vocabulary."""

        z_loss: ZLoss = 0.0

    corpus_kind = "questions"
    direction = "causal"
    without_mirror = "read backwards, an answer stands before what it answers"
    score_names = ("val_accuracy",)
    words = Words(
        unit="nats per answer",
        held_out="sequences",
        share=ShareWords("val_accuracy", "accuracy", "of the held-out answers that are right"),
        baseline="answer frequencies",
        baseline_nll="answer-frequency NLL",
        baseline_source="training answers' frequencies",
    )

    def __init__(self, config: Config, vocab_size: int):
        self.config = config
        self.num_inputs = self.num_outputs = vocab_size

    def examples(self, batch: Any, generator: torch.Generator) -> Examples:
        """Return the sequences with weight 1 at questions, else 0."""
        weights_BN = (batch.answers_BN >= 0).float()
        return Examples(batch.tokens_BN, batch.answers_BN.clamp(min=0), weights_BN)

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(logits_BNV, examples)

    def validate(self, model: nn.Module, examples: Examples) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logits_BNV = examples.logits(model)
        right_BN = (logits_BNV.argmax(-1) == examples.targets_BN) & (examples.weights_BN > 0)
        return *self.loss_sum(logits_BNV, examples), {"val_accuracy": right_BN.sum()}


EXPORT = Recall
