"""This example watches α_max in a plain PyTorch loop whose learning rate rises until the steps are too long.

    python examples/alpha_max_in_a_loop.py [FIGURE.png]

A small network learns a sine with AdamW. Where the learning rate crosses α_max, the curvature along the step predicts
that the step raises the loss of its own batch; the table and the figure show whether it did.
"""

from __future__ import annotations

import sys
from math import nan
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import nn

from stability.curvature import AlphaMaxMonitor

STEPS = 60


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()


def main(figure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=10_000 ** (1 / STEPS))  # 1e-4 → 1
    monitor = AlphaMaxMonitor(model, optimizer, loss_fn, every=2)
    batch = torch.randn(256, 8)
    for _ in range(STEPS):
        with monitor.step(batch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        schedule.step()

    print("step       lr  alpha_max  predicted  actual change of the batch's loss")
    for row in monitor.history:
        print(
            f"{row.step:4}  {row.lr:.1e}  {row.alpha_max:9.2e}  {row.predicted_change:+9.4f}  {row.actual_change:+.4f}"
        )

    steps = [row.step for row in monitor.history]
    fig, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.semilogy(steps, [row.alpha_max or nan for row in monitor.history], "o-", label="α_max (gaps: 0, no descent)")
    axes.semilogy(steps, [row.lr for row in monitor.history], "--", label="learning rate")
    axes.set(xlabel="step", ylabel="step length", title="Where the learning rate outgrows the curvature")
    axes.legend(loc="lower right")
    Path(figure).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure, dpi=150)
    print(figure)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["reports/alpha_max_in_a_loop.png"]))
