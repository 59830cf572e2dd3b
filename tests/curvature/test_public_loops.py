"""Loops as people have them: training is bit-identical under the monitor, and α_max that of no checkpointing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stability.curvature import AlphaMaxMonitor, directional
from stability.curvature.adapters import hf_callback

NUMBERS = ("loss", "slope", "curvature", "alpha_max", "predicted_change")


def same(plain, watched):
    return all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def language_model(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "gpt2":
        size = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends))
    if name == "llama":
        size = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
        size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "attention_dropout": 0.1}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **ends))
    size = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ends = {"decoder_start_token_id": 2, "eos_token_id": 1, "pad_token_id": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **ends))


def train_hf(folder, name, callback, dtype, **options):
    import transformers

    model = language_model(name).to(dtype)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 40, (24, 12))]
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    settings = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 3, "per_device_train_batch_size": 4}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **settings, **options)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback] if callback else []).train()
    return list(model.parameters())


@pytest.mark.slow  # four trainings of a Trainer each
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["auto", "double_backward", "finite_difference"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_in_the_trainer_of_hugging_face(tmp_path, name, reentrant, method):
    # T5's two trainings differ by 6e-8 of u, their gradients' rounding, which differences magnify to 7e-5 of α_max in
    # float32 (error bar: 0.4 to 4.8 of the curvature); Taylor's pass and double backward agree to 2e-6 there
    dtype = torch.float64 if method == "finite_difference" else torch.float32
    saving = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, callback, without = (
        train_hf(tmp_path, name, None, dtype, **saving),
        hf_callback(method=method),
        hf_callback(method=method),
    )
    assert same(plain, train_hf(tmp_path, name, callback, dtype, **saving))
    train_hf(tmp_path, name, without, dtype)
    assert len(callback.history) == 3
    for row, other in zip(callback.history, without.history, strict=True):
        assert row.note is None
        assert row.method == other.method
        for number in NUMBERS:
            expected = pytest.approx(getattr(other, number), rel=1e-5 if dtype is torch.float32 else 1e-9)
            assert getattr(row, number) == expected, number


@pytest.mark.slow  # two trainings of a Trainer
@pytest.mark.filterwarnings("ignore")
def test_the_sft_trainer_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed; pip install --no-deps trl==1.16.0")
    datasets = pytest.importorskip("datasets")
    rows = torch.randint(3, 40, (24, 12), generator=torch.Generator().manual_seed(0)).tolist()

    def train(callback, checkpointing):
        model = language_model("llama")
        quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False}
        settings = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 3, "per_device_train_batch_size": 4}
        arguments = trl.SFTConfig(str(tmp_path), **quiet, **settings, gradient_checkpointing=checkpointing)
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(),
            callbacks=[callback] if callback else [],
        )
        trainer.train()
        return list(model.parameters())

    callback, without, exact = hf_callback(), hf_callback(), hf_callback(loss_fn=unfused)
    assert same(train(None, True), train(callback, True))
    train(without, False)
    train(exact, True)
    assert len(callback.history) == 3
    for row, other, truth in zip(callback.history, without.history, exact.history, strict=True):
        assert row.note is None
        # TRL's chunked loss has no second derivative; with the same loss written out Taylor's pass is taken
        assert (row.method, truth.method) == ("finite_difference", "taylor")
        assert row.alpha_max == pytest.approx(other.alpha_max, rel=1e-5)
        assert abs(row.curvature - truth.curvature) <= row.error_bar
        assert row.slope == pytest.approx(truth.slope, rel=1e-5)


def unfused(model, inputs):
    """The mean cross entropy of the next token, from the model's own layers, as TRL's fused loss computes it."""
    logits = model.lm_head(model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"])[0])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("method", ["taylor", "double_backward", "finite_difference"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_checkpointing_changes_no_bit_of_a_models_curvature_along_one_direction(name, method):
    """Two trainings differ by their gradients' rounding, and so in u: differences magnify that, the replay adds none."""
    pytest.importorskip("transformers")
    model, rows = language_model(name).train(), torch.randint(3, 40, (4, 12))
    params = {key: param.detach() for key, param in model.named_parameters()}
    u = {key: torch.randn_like(param) for key, param in params.items()}

    def measure():
        torch.manual_seed(1)
        inputs = {"input_ids": rows, "labels": rows, "use_cache": False}
        found = directional(lambda at: functional_call(model, at, (), inputs).loss, params, u, method)
        return found.loss, found.slope, found.curvature

    plain = measure()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert measure() == plain


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models

    words = {f"w{index}": index for index in range(37)} | {"<s>": 37, "</s>": 38, "<pad>": 39}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 2, 8).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(16, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, saving):
        super().__init__()
        self.embed, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(12, 16) / 10)
        self.blocks, self.norm, self.saving = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(16), saving

    def forward(self, tokens):
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.saving else block(x)
        return self.norm(x) @ self.embed.weight.T


def next_token(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def pretrain(saving, monitored, method="auto", autocast=False):
    """A loop in the manner of nanoGPT: warm-up, decay for matrices only, accumulation, clipping."""
    torch.manual_seed(0)
    model = Decoder(saving)
    groups = [[param for param in model.parameters() if (param.ndim > 1) == matrix] for matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    monitor = AlphaMaxMonitor(model, optimizer, next_token, method=method) if monitored else None
    losses = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        for micro in range(2):
            batch = torch.randint(30, (4, 13))
            with monitor.step(batch, accumulate=micro == 0) if monitor else nullcontext():
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    loss = next_token(model, batch) / 2
                losses.append(loss.item())
                loss.backward()
                if micro == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    return list(model.parameters()), losses, monitor.history if monitor else []


@pytest.mark.parametrize("method", ["auto", "double_backward", "finite_difference"])
def test_a_loop_in_the_manner_of_nanogpt(method):
    plain, losses, _ = pretrain(saving=True, monitored=False)
    watched, watched_losses, history = pretrain(saving=True, monitored=True, method=method)
    _, _, without = pretrain(saving=False, monitored=True, method=method)
    assert losses == watched_losses
    assert same(plain, watched)
    # to float32's rounding, the loop's own: attention that drops, and the dropout after it, drew the same masks
    means = [losses[index] + losses[index + 1] for index in (0, 2, 4)]
    assert [row.loss for row in history] == pytest.approx(means, rel=1e-6)
    for row, other in zip(history, without, strict=True):
        assert row.note is None
        for number in NUMBERS:
            assert getattr(row, number) == pytest.approx(getattr(other, number), rel=1e-5), number


@pytest.mark.parametrize(("method", "fused"), [("finite_difference", True), ("taylor", False), ("auto", False)])
def test_both_losses_of_a_step_come_from_the_same_attention(method, fused, monkeypatch):
    """Differences take the loop's own kernels; what is differentiated twice takes torch's plain attention, both times."""
    seen, attention = [], F.scaled_dot_product_attention

    def noted(*args, **kwargs):
        seen.append(torch.backends.cuda.flash_sdp_enabled())  # the switch of the CPU's kernel, too
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    model = Decoder(saving=False).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor, batch = AlphaMaxMonitor(model, optimizer, next_token, method=method), torch.randint(30, (4, 13))
    monitor.begin(batch)
    next_token(model, batch).backward()
    optimizer.step()
    seen.clear()
    assert monitor.end().note is None
    assert set(seen) == {fused}


@pytest.mark.filterwarnings("ignore")
def test_autocast_around_the_loops_own_call_is_that_of_the_replay():
    plain, losses, _ = pretrain(saving=False, monitored=False, autocast=True)
    watched, _, history = pretrain(saving=False, monitored=True, autocast=True)
    assert same(plain, watched)
    means = [losses[index] + losses[index + 1] for index in (0, 2, 4)]
    assert [row.loss for row in history] == pytest.approx(means, rel=5e-6)
    assert [row.note for row in history] == [None] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_trains_on_without_another_graph():
    def train(monitored):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net, graphs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(net, backend=backend, fullgraph=True)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        monitor = AlphaMaxMonitor(net, optimizer, lambda model, x: model(x).square().mean(), every=2)
        for _ in range(4):
            x = torch.randn(6, 4)
            with monitor.step(x) if monitored else nullcontext():
                optimizer.zero_grad()
                compiled(x).square().mean().backward()
                optimizer.step()
        return list(net.parameters()), len(graphs), monitor.history

    (plain, graphs, _), (watched, graphs_watched, history) = train(False), train(True)
    assert same(plain, watched)
    assert graphs == graphs_watched == 1
    assert [row.note for row in history] == [None, None]


class OwnAutocast(nn.Module):
    """A classifier that runs ``depth`` of its layers under autocasts of its own, each inside the one before.

    ``last``: brings what they return to the head's type; without it the head needs the loop's autocast.
    """

    last = staticmethod(torch.Tensor.float)

    def __init__(self, depth):
        super().__init__()
        self.first, self.rest = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head, self.depth = nn.Linear(16, 4), depth

    def forward(self, x):
        return self.head(self.last(self._inside(self.first(x).tanh(), list(self.rest), self.depth)))

    def _inside(self, x, layers, depth):
        if not layers:
            return x
        with torch.autocast("cpu", torch.bfloat16) if depth else nullcontext():
            return self._inside(layers[0](x).tanh(), layers[1:], max(depth - 1, 0))


def classes(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def classes_under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return classes(model, batch)


def classes_beside_a_teacher(model, batch):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        TEACHER(batch[0])
    return classes(model, batch)


TEACHER = nn.Linear(8, 4)


def watch_classifier(depth, loss_fn, around=nullcontext, before=nullcontext, rows=None):
    """Train a classifier by its own steps; return the losses of the loop and the monitor's rows."""
    torch.manual_seed(0)
    model = OwnAutocast(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AlphaMaxMonitor(model, optimizer, loss_fn, method="double_backward", rows=rows)
    losses, tokens = [], torch.Generator().manual_seed(1)
    for _ in range(2):
        batch = torch.randn(6, 8, generator=tokens), torch.randint(4, (6,), generator=tokens)
        with monitor.step(batch):
            optimizer.zero_grad()
            with torch.no_grad(), before():
                loss_fn(model, batch)
            with around():
                loss = loss_fn(model, batch)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    return losses, monitor.history


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("loss_fn", [classes, classes_under_autocast, classes_beside_a_teacher])
@pytest.mark.parametrize("around", [nullcontext, bfloat16])
@pytest.mark.parametrize("before", [nullcontext, bfloat16])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_replay_runs_under_the_steps_own_autocasts_to_the_bit(depth, before, around, loss_fn):
    losses, history = watch_classifier(depth, loss_fn, around, before)
    assert [row.loss for row in history] == losses
    assert [row.note for row in history] == [None, None]


def test_a_replay_by_rows_runs_under_the_autocast_around_a_models_own():
    losses, history = watch_classifier(1, classes, bfloat16, rows=6)
    assert [row.loss for row in history] == losses


def test_a_loop_may_leave_its_autocast_out_in_a_later_step():
    around = iter([bfloat16(), nullcontext()])
    losses, history = watch_classifier(1, classes, lambda: next(around))
    assert [row.loss for row in history] == losses


def test_torchs_autocast_is_its_own_again_after_a_step():
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    watch_classifier(1, classes, bfloat16)
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == (enter, leave)


def test_a_model_that_runs_under_the_loops_autocast_alone_is_replayed_there(monkeypatch):
    monkeypatch.setattr(OwnAutocast, "last", staticmethod(lambda x: x))
    losses, history = watch_classifier(1, classes, bfloat16, bfloat16)
    assert [row.loss for row in history] == losses
