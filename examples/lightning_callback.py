"""α_max inside a Lightning Trainer: ``python examples/lightning_callback.py``."""

import lightning
import torch
from torch import nn

from stability.curvature.adapters import lightning_callback


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=16)
callback = lightning_callback(every=2)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **quiet).fit(Regression(), loader)

for row in callback.history:
    print(f"step {row.step}: α_max/α {row.alpha_max_over_lr:.2f}, loss change predicted {row.predicted_change:.4f}, real {row.actual_change:.4f}")
