"""Steps with a fixed spectrum, along the orthogonal matrix nearest to the momentum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from stability.optimizers._divided import AbstractMatrixOptimizer, Groups, MatrixSettings

Polar = Callable[[Tensor, dict[str, Any]], Tensor]


class OrthogonalSettings(MatrixSettings):
    """Settings of every optimizer with an orthogonalised momentum."""

    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of a matrix's mean gradient")
    nesterov: bool = Field(default=True, description="whether the gradient is mixed once more with its mean")
    scale: Literal["original", "match_rms_adamw"] = Field(
        default="original",
        description=(
            "factor of the orthogonal matrix (m, n): √max(1, m/n), the original's, or 0.2·√max(m, n), with which its "
            "entries are about as large as a step of AdamW's, whose rates then fit, with rest_lr_scale=1"
        ),
    )
    rest_lr_scale: float = Field(
        default=0.015,
        gt=0,
        description="learning rate of AdamW for all that is no matrix, over the run's: 3e-4 beside 0.02, as published",
    )


class AbstractOrthogonalOptimizer(AbstractMatrixOptimizer):
    """Base of optimizers with an orthogonalised momentum."""

    Config: ClassVar[type[OrthogonalSettings]]
    update_family = "orthogonal"

    @classmethod
    def built_in_scale(cls, config: OrthogonalSettings, rows: int, columns: int) -> float:
        return _scale(config.scale, rows, columns)


class Orthogonalised(torch.optim.Optimizer):
    """Move each matrix by θ ← θ − lr·s·polar(m′).

    m ← βm + (1 − β)g. With ``nesterov``, m′ is the same mean of g and m once more, else m (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon).

    ``polar`` returns a nearly orthogonal matrix from m′ and the group's settings, in m′'s shape.
    """

    def __init__(self, groups: Groups, polar: Polar, settings: dict[str, Any]):
        super().__init__(groups, settings)
        self._polar = polar

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                mean = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                scale = _scale(group["scale"], *matrix.shape)
                # In the parameters' precision, float32 in a run, while the original uses bfloat16. A step then follows
                # the formula, is equal on every machine up to rounding, and α_max measures the step and not bfloat16's
                # 8 bits. float32 is faster on a CPU; on a GPU the products are a small part of a step at our sizes.
                matrix.add_(self._polar(ahead, group), alpha=-group["lr"] * scale)


def quintic(wide: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    """Return X after one quintic iteration for each (a, b, c).

    X ← aX + (bA + cA²)X with A = XXᵀ. Every singular value s becomes as + bs³ + cs⁵; the singular vectors stay.
    ``wide`` has at most as many rows as columns, since A is then smaller.
    """
    for a, b, c in coefficients:
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _scale(rule: str, rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))
