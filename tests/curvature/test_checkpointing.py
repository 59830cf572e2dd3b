"""Activation checkpointing, of torch and of others, changes no number: neither the training's nor the curvature's."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from stability.curvature import AlphaMaxMonitor, directional, hvp

from .nets import random_direction

METHODS = ["auto", "double_backward", "finite_difference"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, -1, 1, 18).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) + x


KINDS = {
    "none": lambda block, x: block(x),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "sequential": lambda block, x: checkpoint_sequential(block, 2, x, use_reentrant=False),
}


class Net(nn.Module):
    def __init__(self, kind, norm=nn.BatchNorm1d):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), norm(6), nn.Dropout(0.2), nn.Tanh(), Attention()) for _ in range(2)
        )
        self.embed, self.head, self.run = nn.Linear(4, 6), nn.Linear(6, 3), kind
        # as transformers does for gradient checkpointing, where taylor would refuse a write in place
        self.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(kind, method, monitored=True, lr=0.1):
    torch.manual_seed(0)
    model = Net(KINDS[kind], nn.LayerNorm if method == "auto" else nn.BatchNorm1d).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    monitor = AlphaMaxMonitor(model, optimizer, classify, method=method)
    for _ in range(2):
        batch = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        with monitor.step(batch) if monitored else nullcontext():
            optimizer.zero_grad()
            classify(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model, monitor.history


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_the_monitors_numbers_are_those_without_checkpointing(kind, method):
    plain, measured = train("none", method)[1], train(kind, method)[1]
    for row, other in zip(plain, measured, strict=True):
        assert other.note is None
        assert other.method == row.method == ("taylor" if method == "auto" else method)
        for name in ("loss", "slope", "curvature", "alpha_max", "actual_change"):
            assert getattr(other, name) == pytest.approx(getattr(row, name), rel=1e-9), name


@pytest.mark.parametrize("method", METHODS)
def test_training_with_checkpointing_is_bit_identical_under_the_monitor(method):
    (plain, _), (watched, history) = (train("non-reentrant", method, monitored) for monitored in (False, True))
    assert len(history) == 2
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )


def functional(kind):
    """A loss of the caller's own, in which functional_call has given the parameters back before any derivative."""
    torch.manual_seed(0)
    model = Net(KINDS[kind], nn.LayerNorm).double()
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return F.cross_entropy(functional_call(model, {**params, **buffers}, (batch[0],)), batch[1])

    return loss, params, random_direction(params)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_a_callers_own_loss_with_checkpointing_inside(kind):
    plain, params, direction = functional("none")
    loss, _, _ = functional(kind)
    truth = directional(plain, params, direction, "double_backward")
    for method in METHODS:
        result = directional(loss, params, direction, method, check=True)
        reference = directional(plain, params, direction, method, check=True)
        assert result.method == reference.method
        assert result.curvature == pytest.approx(reference.curvature, rel=1e-9)
        assert result.slope == pytest.approx(truth.slope, rel=1e-9)
        assert result.rel_error == pytest.approx(reference.rel_error, rel=1e-3, abs=1e-12)
    for name, product in hvp(loss, params, direction).items():
        assert torch.allclose(product, hvp(plain, params, direction)[name], rtol=1e-9, atol=1e-12)


class Recomputed(nn.Module):
    """Saves nothing for the backward pass, which computes sin w again from the module's own attribute."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 1.0, 4, dtype=torch.float64))

    def forward(self, x):
        sine = self.w.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda _: self.w.sin()):
            return sine.square().sum()


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint as kernels' libraries bring it: its backward adds to the ``.grad`` of the parameters."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.x = block, x.detach()
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), grad)
        return None, x.grad


def one_step(model, loss, method):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = AlphaMaxMonitor(model, optimizer, loss, method=method)
    x = torch.ones(4, dtype=torch.float64)
    with monitor.step(x):
        loss(model, x).backward()
        optimizer.step()
    return monitor.history[0]


@pytest.mark.parametrize("method", ["double_backward", "finite_difference"])
def test_what_runs_again_in_the_backward_pass_finds_the_parameters_of_the_replay(method):
    model = Recomputed()
    w = model.w.detach().clone()
    row = one_step(model, lambda model, x: model(x), method)
    gradient = (2 * w).sin()
    assert row.slope == pytest.approx(-float(gradient @ gradient), rel=1e-9)
    assert row.curvature == pytest.approx(float((2 * (2 * w).cos() * gradient**2).sum()), rel=1e-3)


def test_a_checkpoint_that_adds_to_grad_leaves_the_trainings_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    one_step(model, lambda model, x: OwnCheckpoint.apply(model[1], model[0](x)).square().sum(), "finite_difference")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    plain(torch.ones(4, dtype=torch.float64)).square().sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad, other.grad, rtol=1e-12)
