"""α_max inside a Hugging Face Trainer, for a tiny GPT-2 made from a config: ``python examples/hf_trainer.py``."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from stability.curvature.adapters import hf_callback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(0, 50, (32, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]

callback = hf_callback(every=2)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

for row in callback.history:
    print(f"step {row.step}: α_max/α {row.alpha_max_over_lr:.2f}, loss change predicted {row.predicted_change:.4f}, real {row.actual_change:.4f}")
