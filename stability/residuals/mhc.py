"""Manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from stability.residuals._streams import AbstractSinkhornStreams, StreamSettings

OFF_DIAGONAL = -8.0


class ManifoldHyperConnections(AbstractSinkhornStreams):
    """Gated streams mixed by exp(logits) after K Sinkhorn–Knopp iterations.

    The base is `AbstractGatedStreams`, the mixing mHC-lite's Eq. 2. Rows of the mixing matrix sum to 1, columns nearly.

    b_mix starts at 0 on the diagonal and −8 off it: mix ≈ I. The gates start at σ(±1) and 2σ(±1), not 0 and 1, so an
    untrained model differs from the plain one. The difference depends on the size of the branches relative to the
    embedding. It is the relative Frobenius distance of the logits from ``residual=identity`` after the best rescaling
    (the first three: tests/residuals/test_contract.py):

    - 4.2 % with eight blocks of attention of width 16 and this project's embedding of N(0, 1);
    - 17.3 % with the same blocks and an embedding of N(0, 0.02²), like nanoGPT's;
    - 24.6 % with eight tanh layers as large as their stream;
    - 19 % in the authors' own model and initialisation (width 128, 6 or 12 layers).
    """

    class Config(StreamSettings):
        iterations: int = Field(
            default=20,
            ge=1,
            description="iterations K of Sinkhorn and Knopp; too few of them leave columns that do not sum to 1",
        )

    def __init__(self, config: Any, *, width: int, layer: int):
        bias_mix = torch.full((config.streams, config.streams), OFF_DIAGONAL).fill_diagonal_(0.0)
        super().__init__(config, width=width, layer=layer, bias_mix=bias_mix)


EXPORT = ManifoldHyperConnections
