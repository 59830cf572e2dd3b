"""Every variant of the consensus mechanisms as a module x_BND, mask_BN -> y_BND, with what else they read held
fixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stability.mechanisms import build
from tests.mechanisms.checks import BATCH, HEADS, NUM_POSITIONS, WIDTH

GRAPHS = ("window", "cycle", "complete", "given", "top_w")
SELF = [
    *({"graph": graph, "rope": rope} for graph in GRAPHS for rope in ("absolute", "relative", "gradient", "none")),
    {"rank": 0},
    {"rank": 0, "edge_mlp": "separate", "graph": "cycle"},
    {"rank": 0, "iterations": 3, "step": "learned", "graph": "given"},
    {"window": 5, "edge_mlp": "separate"},
    {"window": 1, "rope": "gradient", "edge_mlp": "separate"},
    {"iterations": 3},
    {"iterations": 3, "step": "learned"},
    {"iterations": 2, "rope": "gradient"},
    {"iterations": 2, "rope": "relative"},
    {"iterations": 2, "graph": "top_w", "edge_mlp": "separate", "step": "learned"},
    *({"graph": graph, "step": "bounded", "step_size": 1.0} for graph in GRAPHS),
    {"step": "bounded", "iterations": 2, "rank": 0},
    {"step": "bounded", "rope": "relative", "edge_mlp": "separate"},
]
CROSS = [
    {"graph": "window"},
    {"graph": "complete", "rope": "none"},
    {"graph": "complete", "iterations": 3, "step": "learned"},
    {"rank": 0, "edge_mlp": "separate"},
    {"rope": "none", "edge_mlp": "separate", "iterations": 2},
    {"graph": "window", "step": "bounded", "step_size": 1.0},
    {"graph": "complete", "step": "bounded", "iterations": 2},
    {"rank": 0, "step": "bounded", "rope": "none"},
    *(
        {"rope": rope, "graph": graph, "iterations": 2}
        for rope in ("relative", "gradient")
        for graph in ("window", "complete")
    ),
]
# Directed and asymmetric: 3 → 1 without 1 → 3, both between 0 and 1, a self-loop, and position 8 without any.
EDGES = {(0, 1), (1, 0), (3, 1), (3, 4), (6, 2), (2, 5), (7, 0), (4, 4), (5, 7)}


def name_of(settings: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in settings.items()) or "default"


def listed(edges: set[tuple[int, int]]) -> Tensor:
    return torch.tensor(sorted(edges), dtype=torch.int64).reshape(-1, 2)


class WithEdges(nn.Module):
    """`sc`, edges given where its graph asks for them."""

    def __init__(self, **settings):
        super().__init__()
        self.layer = build("sc", width=WIDTH, heads=HEADS, **settings)

    def edges(self, num_positions: int) -> dict[str, Tensor]:
        kept = {(i, j) for i, j in EDGES if max(i, j) < num_positions}
        return {"edges": listed(kept)} if self.layer.config.graph == "given" else {}

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        return self.layer(x_BND, mask_BN=mask_BN, **self.edges(x_BND.shape[1]))


class WithContext(nn.Module):
    """`cc` beside a context that is part of the batch: 6 positions, or as many as the source where the graph is
    windowed."""

    def __init__(self, **settings):
        super().__init__()
        self.layer = build("cc", width=WIDTH, heads=HEADS, **settings)

    def forward(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        context_BJD = context(x_BND.shape[1] if self.layer.config.graph == "window" else 6, len(x_BND)).to(x_BND.dtype)
        return self.layer(x_BND, context_BJD, mask_BN=mask_BN)


def context(num_context: int = NUM_POSITIONS, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, num_context, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
