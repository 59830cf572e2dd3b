"""α_max of every second step of a plain PyTorch loop: ``python examples/plain_loop.py``."""

import torch
from torch import nn

from stability.curvature import AlphaMaxMonitor

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = [(x := torch.randn(16, 8), x.sum(1, keepdim=True).sin()) for _ in range(8)]


def loss_fn(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


monitor = AlphaMaxMonitor(model, optimizer, loss_fn, every=2)
for batch in batches:
    with monitor.step(batch):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

for row in monitor.history:
    print(f"step {row.step}: α_max/α {row.alpha_max_over_lr:.2f}, loss change predicted {row.predicted_change:.4f}, real {row.actual_change:.4f}")
