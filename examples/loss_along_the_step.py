"""This example draws the loss along one optimizer step, the parabola that its slope and curvature give, and α_max.

    python examples/loss_along_the_step.py [FIGURE.png]

A causal transformer layer (self-attention from this project) reads random tokens; the step is Adam's first. The loss
itself need not follow the parabola as far as α_max: the figure shows where it leaves it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from stability.curvature import directional, step_direction
from stability.mechanisms import build

LR = 1e-3


class Model(nn.Module):
    """One residual layer of self-attention between an embedding and a head: tokens (B, N) → logits (B, N, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Embedding(32, 16), build("sa", width=16, heads=2, direction="causal")
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.mixer(x))


def main(figure: str) -> None:
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(32, (16, 24))
    params = dict(model.named_parameters())

    def loss_fn(params: Mapping[str, Tensor]) -> Tensor:
        logits = functional_call(model, dict(params), (tokens[:, :-1],))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    start = {name: param.detach().clone() for name, param in params.items()}
    loss_fn(params).backward()
    direction = step_direction(torch.optim.Adam(model.parameters(), lr=LR), params, LR)  # u, with θ⁺ = θ + lr·u
    result = directional(loss_fn, start, direction)
    print(f"slope {result.slope:.4g}, curvature {result.curvature:.4g}, α_max {result.alpha_max:.4g} ({result.method})")

    lengths = torch.linspace(0, 1.3 * result.alpha_max, 60)
    with torch.no_grad():
        losses = [loss_fn({name: start[name] + t * direction[name] for name in start}).item() for t in lengths]
    fig, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.plot(lengths, losses, label="loss along the step")
    axes.plot(lengths, losses[0] + lengths * result.slope + lengths**2 * result.curvature / 2, "--", label="parabola")
    axes.axvline(result.alpha_max, color="black", linewidth=0.8)
    place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}  # on top, where no line is
    axes.annotate("α_max", (result.alpha_max, 1), xytext=(4, -12), **place)
    axes.set(xlabel="learning rate α", ylabel="L(θ + αu), nats")
    axes.legend()
    Path(figure).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=150)
    print(figure)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["reports/loss_along_the_step.png"]))
