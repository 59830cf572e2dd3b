"""The callbacks inside real Trainers of Hugging Face and Lightning, on the CPU, with models made from nothing."""

import math
import sys

import pytest
import torch
from torch import nn

from stability.curvature.adapters import hf_callback, lightning_callback


def train_gpt2(folder, callbacks, **options):
    """The trained model and what the Trainer logged: loss and gradient norm of each step. Plain SGD, so that u =
    −gradient."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {
        "vocab_size": 50,
        "n_positions": 12,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))  # dropout 0.1 everywhere
    tokens = torch.randint(0, 50, (24, 12))
    labels = tokens.masked_fill(torch.rand(24, 12) < 0.5, -100)  # another number of targets in every batch
    data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
    quiet = {
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_grad_norm": 1e9,
    }
    settings = {
        "optim": "sgd",
        "learning_rate": 0.003,
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "per_device_train_batch_size": 4,
    }
    arguments = transformers.TrainingArguments(str(folder), **quiet, **settings, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return model, trainer.state.log_history


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hf_trainer_steps_are_measured_and_unchanged(tmp_path, accumulation):
    plain, _ = train_gpt2(tmp_path, [], gradient_accumulation_steps=accumulation)
    callback = hf_callback()
    watched, logged = train_gpt2(tmp_path, [callback], gradient_accumulation_steps=accumulation)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    steps = [entry for entry in logged if "grad_norm" in entry]
    assert len(callback.history) == len(steps) == 3
    for row, entry in zip(callback.history, steps, strict=True):
        assert row.note is None
        assert row.method == "taylor"
        assert row.loss == pytest.approx(entry["loss"], rel=1e-4)
        assert row.slope == pytest.approx(-(entry["grad_norm"] ** 2), rel=1e-3)
        assert row.actual_change == pytest.approx(row.predicted_change, rel=0.02)
    assert [entry["alpha_max/alpha_max"] for entry in logged if "alpha_max/alpha_max" in entry] == [
        row.alpha_max for row in callback.history
    ]
    assert not watched._forward_pre_hooks


def test_hf_rows_and_every(tmp_path):
    whole, pieces = hf_callback(every=2, loss_fn=without_dropout), hf_callback(every=2, rows=3, loss_fn=without_dropout)
    train_gpt2(tmp_path, [whole, pieces])
    assert [row.step for row in whole.history] == [0, 2]
    for row, other in zip(whole.history, pieces.history, strict=True):
        assert other.loss == pytest.approx(row.loss, rel=1e-5)
        assert other.curvature == pytest.approx(row.curvature, rel=1e-4)


def without_dropout(model, inputs):
    model.eval()
    targets = inputs["labels"][:, 1:]
    logits = model(inputs["input_ids"]).logits[:, :-1]
    model.train()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (
        targets != -100
    ).sum()


def regression():
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        def on_before_optimizer_step(self, optimizer):
            self.seen.append(sum(float(param.grad.square().sum()) for param in self.parameters()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.02)

    torch.manual_seed(0)
    return lightning, Regression()


def fit(callbacks, **options):
    lightning, module = regression()
    x = torch.randn(40, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = lightning.Trainer(max_epochs=1, callbacks=callbacks, **quiet, **options)
    trainer.fit(module, loader)
    return module, trainer.logged_metrics


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lightning_steps_are_measured_and_unchanged(accumulation):
    plain, logged_alone = fit([], accumulate_grad_batches=accumulation)
    callback = lightning_callback()
    watched, logged = fit([callback], accumulate_grad_batches=accumulation)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    assert len(callback.history) == (5 if accumulation == 1 else 3)
    # the epoch's fifth batch is a step of its own, halved all the same
    full = callback.history if accumulation == 1 else callback.history[:2]
    for row, squared in zip(full, watched.seen, strict=False):
        assert row.note is None
        assert row.slope == pytest.approx(-squared, rel=1e-4)
        assert math.isfinite(row.curvature)
    assert float(logged["alpha_max/curvature"]) == pytest.approx(callback.history[-1].curvature, rel=1e-6)
    assert float(logged["loss"]) == float(logged_alone["loss"])  # replays log nothing
    assert "log" not in vars(watched)


@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_a_loss_of_the_users():
    callback = lightning_callback(
        loss_fn=lambda module, batch: nn.functional.mse_loss(module.net(batch[0]), batch[1]), rows=None
    )
    module, _ = fit([callback])
    assert [row.slope for row in callback.history] == pytest.approx([-squared for squared in module.seen], rel=1e-4)


@pytest.mark.parametrize(("library", "factory"), [("transformers", hf_callback), ("lightning", lightning_callback)])
def test_a_missing_library_is_named(monkeypatch, library, factory):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeError, match=f"{library} is not installed; pip install {library}"):
        factory()
