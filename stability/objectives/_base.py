"""What an objective is: how tokens become inputs and targets, and how logits become a loss."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from stability.config import Settings


class Examples(NamedTuple):
    """One batch as the model sees it. ``weights_BN``: the share of each position in the loss, 0 where it does not count."""

    inputs_BN: Tensor
    targets_BN: Tensor
    weights_BN: Tensor

    def to(self, device: torch.device | str) -> Examples:
        return Examples(*(tensor.to(device, non_blocking=True) for tensor in self))


class AbstractObjective:
    """``direction``: what it asks of the mechanism. ``num_inputs`` / ``num_outputs``: rows of the embedding, columns of the head."""

    family: ClassVar[str] = "objectives"
    Config: ClassVar[type[Settings]]
    direction: ClassVar[str]
    num_inputs: int
    num_outputs: int

    def __init__(self, config: Any, vocab_size: int):
        raise NotImplementedError

    def tokens_needed(self, positions: int) -> int:
        """Tokens to draw per sequence, so that the model sees ``positions``."""
        return positions

    def examples(self, tokens_BN: Tensor, generator: torch.Generator) -> Examples:
        """Corrupt (or shift) int64 tokens; every random choice comes from ``generator``."""
        raise NotImplementedError

    def loss_sum(self, logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
        """(weighted sum of the loss in nats, sum of the weights), both scalars in float32 or wider."""
        raise NotImplementedError


def weighted_cross_entropy(logits_BNV: Tensor, examples: Examples) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats, summed with the examples' weights, and the sum of these weights."""
    logits = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    weights_BN = examples.weights_BN.to(logits.dtype)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.targets_BN.flatten(), reduction="none")
    return (nll * weights_BN.flatten()).sum(), weights_BN.sum()
