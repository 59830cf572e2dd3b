"""Trainers of Hugging Face and Lightning with losses, metrics and loops of the user's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.curvature.adapters import hf_callback, lightning_callback


def train_hf(folder, callback, trainer_class=None, **options):
    """The parameters after three steps of a tiny GPT-2 without dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size |= {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(20, (12, 8))]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, "per_device_train_batch_size": 4}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **settings, **options)
    trainer = (trainer_class or (lambda transformers: transformers.Trainer))(transformers)
    trainer(model, arguments, train_dataset=data, callbacks=[callback] if callback else []).train()
    return list(model.parameters())


def weighted(transformers):
    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            logits = model(**inputs).logits
            return 2 * F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()) + logits.var()

    return Weighted


def without_labels(transformers):
    class WithoutLabels(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return WithoutLabels


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trainer_class", "options", "note"),
    [
        (weighted, {}, "the gradient that the optimizer stepped by has the slope"),
        (without_labels, {}, "the model's output has no loss, because the Trainer computes one of its own"),
        (None, {"label_smoothing_factor": 0.3}, "label_smoothing_factor=0.3 is a loss of the Trainer's"),
    ],
    ids=["overridden", "popped labels", "label smoothing"],
)
def test_a_loss_of_the_trainers_own_is_a_note_in_each_row_and_changes_no_bit(tmp_path, trainer_class, options, note):
    plain = train_hf(tmp_path, None, trainer_class, **options)
    callback = hf_callback()
    watched = train_hf(tmp_path, callback, trainer_class, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert len(callback.history) == 3
    assert all(note in row.note for row in callback.history)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}])
def test_the_trainers_own_loss_gets_no_note(tmp_path, options):
    callback = hf_callback()
    train_hf(tmp_path, callback, **options)
    assert [row.note for row in callback.history] == [None] * 3


def fit(module, callback, **options):
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(1)
    x = torch.randn(40, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[callback] if callback else [], accelerator="cpu", **quiet, **options
    )
    trainer.fit(module, loader)
    return trainer


def module_of(kind, **options):
    lightning = pytest.importorskip("lightning")

    class Base(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
            self.prepare()

        def prepare(self):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return type(kind.__name__, (kind, Base), options)()


class Manual:
    every = 1

    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def loss_of(module, batch):
    return F.mse_loss(module.net(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("every", "steps"), [(1, 5), (2, 2)])
def test_manual_optimization_is_measured_with_a_loss_of_the_users(every, steps):
    plain, watched, callback = module_of(Manual, every=every), module_of(Manual, every=every), None
    fit(plain, None)
    callback = lightning_callback(loss_fn=loss_of)
    fit(watched, callback)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert [row.note for row in callback.history] == [None] * steps
    for row in callback.history:
        assert row.actual_change == pytest.approx(row.predicted_change, rel=0.2)


@pytest.mark.filterwarnings("ignore")
def test_manual_optimization_without_a_loss_is_a_note_and_trains_on():
    plain, watched, callback = module_of(Manual), module_of(Manual), lightning_callback()
    fit(plain, None)
    fit(watched, callback)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert len(callback.history) == 5
    assert all("give lightning_callback(loss_fn=…)" in row.note for row in callback.history)


class Metered:
    def prepare(self):
        torchmetrics = pytest.importorskip("torchmetrics")
        self.error, self.loose = torchmetrics.MeanSquaredError(), [torchmetrics.CatMetric()]

    def training_step(self, batch, batch_idx):
        predicted = self.net(batch[0])
        self.error(predicted, batch[1])
        self.loose[0].update(predicted.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(predicted, batch[1])


@pytest.mark.filterwarnings("ignore")
def test_metrics_count_each_batch_once():
    plain, watched, callback = module_of(Metered), module_of(Metered), lightning_callback()
    counts = []
    for module, given in ((plain, None), (watched, callback)):
        trainer = fit(module, given)
        counts.append((float(trainer.logged_metrics["error"]), module.loose[0].compute().shape))
    assert counts[0] == counts[1]
    assert [row.note for row in callback.history] == [None] * 5


class Automatic:
    def training_step(self, batch, batch_idx):
        return loss_of(self, batch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [False, True])
def test_the_replay_has_the_trainers_precision(own):
    module, losses = module_of(Automatic), []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
    callback = lightning_callback(loss_fn=loss_of if own else None)
    fit(module, callback, precision="bf16-mixed")
    assert [row.loss for row in callback.history] == pytest.approx(losses, rel=2e-4)


@pytest.mark.filterwarnings("ignore")
def test_an_epochs_last_step_of_fewer_batches_gets_no_note():
    callback = lightning_callback()
    fit(module_of(Automatic), callback, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert [row.note for row in callback.history] == [None] * 3
