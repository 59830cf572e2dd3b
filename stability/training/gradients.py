"""Gradient statistics per block of parameters at one step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stability.models.backbone import block_of


class BlockStatistics:
    """Norms of gradient and step per block of parameters (`block_of`).

    Args:
        model: its parameters form the blocks.
        every: interval in steps; 0: never.
        norms: joint norms of groups of tensors (`Devices.norms`).

    Attributes:
        indices: indices of each block's parameters, by block.
    """

    def __init__(
        self, model: nn.Module, every: int, norms: Callable[[Sequence[Tensor], Sequence[Sequence[int]]], Tensor]
    ):
        self._every, self._norms = every, norms
        self.indices: dict[str, list[int]] = {}
        for index, (name, _) in enumerate(model.named_parameters()):
            self.indices.setdefault(block_of(name), []).append(index)

    def is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def norms(self, tensors: list[Tensor]) -> dict[str, float]:
        """Return the Euclidean norm of each block.

        Args:
            tensors: one per parameter, in the model's order.
        """
        return self._join(tensors, self.indices)

    def norms_of_parts(self, parts: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
        """Return the joint Euclidean norm of each block's tensors, given by block."""
        ends = itertools.accumulate(map(len, parts.values()), initial=0)
        groups = {block: range(start, start + len(parts[block])) for block, start in zip(parts, ends, strict=False)}
        return self._join([part for own in parts.values() for part in own], groups)

    def _join(self, tensors: Sequence[Tensor], groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        return dict(zip(groups, self._norms(tensors, list(groups.values())).tolist(), strict=True))

    def gradient(self, parameters: list[nn.Parameter]) -> dict[str, float]:
        """Return the norms of the current gradients, before clipping.

        A missing gradient counts as 0.
        """
        return self.norms(
            [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        )

    def rows(
        self, step: int, gradient: dict[str, float], weights: dict[str, float], steps: dict[str, float]
    ) -> list[dict[str, Any]]:
        """Return one log row per block; None for a non-finite number or a quotient by 0.

        ``grad_norm`` is the norm before clipping, ``grad_share`` its share of the whole gradient's squared norm (sum
        1), ``update_ratio`` the norm of the step over that of the parameters.

        Args:
            step: number of the step.
            gradient: `norms` of the gradient.
            weights: `norms` of the parameters before the step.
            steps: `norms` of the step.
        """
        total = math.fsum(norm**2 for norm in gradient.values())
        return [
            {
                "step": step,
                "block": block,
                "grad_norm": finite_or_none(norm),
                "grad_share": finite_or_none(_quotient(norm**2, total)),
                "update_ratio": finite_or_none(_quotient(steps[block], weights[block])),
            }
            for block, norm in gradient.items()
        ]


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None
