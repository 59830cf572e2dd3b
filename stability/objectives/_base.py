"""What an objective is: how tokens become inputs and targets, and how logits become a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stability.config import Settings


class Examples(NamedTuple):
    """One batch as the model sees it. ``weights_BN``: the share of each position in the loss, 0 where it does not count.

    ``context_BJ``: tokens that the model's cross mechanism reads, None for a model without one.
    """

    inputs_BN: Tensor
    targets_BN: Tensor
    weights_BN: Tensor
    context_BJ: Tensor | None = None

    def logits(self, model: nn.Module, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """The model's logits (B, N, V) on this batch; ``params`` stand in for its own where they are given."""
        context = {} if self.context_BJ is None else {"context_BJ": self.context_BJ}
        if params is None:
            return model(self.inputs_BN, **context)
        return functional_call(model, dict(params), (self.inputs_BN,), context)

    def to(self, device: torch.device | str) -> Examples:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Examples]:
        """Microbatches of ``rows`` rows, the last one shorter where they do not divide the batch; views."""
        return [self.each(lambda tensor, start=start: tensor[start : start + rows]) for start in range(0, len(self.inputs_BN), rows)]

    def each(self, change: Callable[[Tensor], Tensor]) -> Examples:
        context_BJ = None if self.context_BJ is None else change(self.context_BJ)
        return Examples(change(self.inputs_BN), change(self.targets_BN), change(self.weights_BN), context_BJ)


class AbstractObjective:
    """``direction``: what it asks of the mechanism. ``num_inputs`` / ``num_outputs``: rows of the embedding, columns of the head."""

    family: ClassVar[str] = "objectives"
    Config: ClassVar[type[Settings]]
    direction: ClassVar[str]
    num_inputs: int
    num_outputs: int

    def __init__(self, config: Any, vocab_size: int):
        raise NotImplementedError

    @classmethod
    def num_context(cls, config: Any) -> int:
        """J, the context tokens of a sequence that a cross mechanism reads; 0 where the objective gives none."""
        return 0

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
