"""Build the two models of benchmarks/curvature.py: a plain GPT, and the quickstart's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from stability.build import build_model, build_objective
from stability.config.parse import parse_run

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, positions: int, layers: int = LAYERS):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(positions, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def quickstart_model(
    mechanism: str, *, positions: int = 64, width: int = 64, rows: int = 8
) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """Return the nano model with its masked-language-modelling loss on one batch of random bytes.

    Args:
        mechanism: name of the mechanism.
        positions: sequence length N.
        width: d.
        rows: sequences in the batch.
    """
    sizes = {"name": "benchmark", "layers": 4, "width": width, "heads": 4, "positions": positions}
    parts = {
        "objective": "mlm",
        "data": "stdlib",
        "residual": "identity",
        "optimizer": "adamw",
        "norm": "layernorm",
        "schedule": {"name": "constant"},
    }
    numbers = {"steps": 1, "batch": rows, "clip_norm": 1.0, "lr_peak": 1e-3, "seed": 0, "data_fingerprint": "none"}
    spec = parse_run({"model": sizes, "mechanism": {"name": mechanism}, **parts, **numbers})
    model, objective = build_model(spec, 257), build_objective(spec, 257)
    generator = torch.Generator().manual_seed(0)
    examples = objective.examples(torch.randint(257, (rows, positions), generator=generator), generator)

    def loss(params: dict[str, Tensor]) -> Tensor:
        total, count = objective.loss_sum(functional_call(model, params, (examples.inputs_BN,)), examples)
        return total / count

    return model, loss
