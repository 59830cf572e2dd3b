"""Where a model drops, and that what it drops is nothing but the share that it is told, scaled so that means stay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from stability.build import build_model
from stability.models.passes import in_mode
from tests.conftest import TINY

SHARE = 0.25
KINDS = {
    "plain": {},
    "causal": {"objective": {"name": "ar"}},
    "cross": {"objective": {"name": "mlm", "context": 8}, "cross": "ca"},
    "streams": {"residual": {"name": "mhc_lite"}},
    "conditioned": {"objective": {"name": "score_entropy"}},
    "consensus": {"mechanism": {"name": "sc"}},
}


def models(lab, kind, **dropout) -> tuple[Any, Any]:
    """A model that drops, and one with the same weights that does not."""
    size = {**TINY["model"], "dropout": SHARE, **dropout}
    spec = lab.spec(**{**KINDS[kind], "model": size})
    model, plain = build_model(spec, 256), build_model(lab.spec(**KINDS[kind]), 256)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            one.add_(0.1 * torch.randn_like(one))  # a conditioned model begins with zeros in its head and gates
            two.copy_(one)
    return model, plain


def given(kind, batch=2):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(256, (batch, 16), generator=generator)
    more = {"context_BJ": tokens[:, :8]} if kind == "cross" else {}
    more |= {"sigma_B": torch.linspace(0.1, 2, batch)} if kind == "conditioned" else {}
    return tokens, more


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_training_mode_nothing_is_dropped_bit_for_bit(lab, kind):
    model, plain = models(lab, kind)
    tokens, more = given(kind)
    trained = plain(tokens, **more)
    with in_mode(model, training=False):
        assert torch.equal(model(tokens, **more), trained) and torch.equal(model(tokens, **more), trained)
    assert not torch.equal(model(tokens, **more), trained)


def dropped_shares(model, tokens, more):
    """By the module's name, of a forward pass in training mode: how many numbers reached it, and which share of them
    came out as 0; what came out is checked against 1/(1 − share)."""
    found = {}

    def watch(name):
        def hook(module, args, output):
            kept = output != 0
            torch.testing.assert_close(output[kept], args[0][kept] / (1 - SHARE), rtol=1e-6, atol=0)
            assert args[0].count_nonzero() == args[0].numel()
            found.setdefault(name, []).append((kept.numel(), 1 - kept.float().mean().item()))

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Dropout) and module.p > 0
    ]
    model(tokens, **more)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_place_drops_its_share_of_the_embedding_and_of_every_branch(lab, kind):
    model, _ = models(lab, kind)
    found = dropped_shares(model, *given(kind, batch=32))
    branches = 2 if kind != "cross" else 3
    assert {name: len(shares) for name, shares in found.items()} == {
        "dropout": 1,
        **{f"blocks.{layer}.dropout": 2 for layer in range(2)},
        **({f"blocks.{layer}.cross.dropout": 1 for layer in range(2)} if kind == "cross" else {}),
    }
    assert sum(map(len, found.values())) == 1 + 2 * branches
    for num, share in (each for shares in found.values() for each in shares):
        assert abs(share - SHARE) < 4.5 * math.sqrt(SHARE * (1 - SHARE) / num)


def test_at_the_branches_alone_neither_the_embedding_nor_attention_drops(lab):
    """As SEDD's blocks have it: dropout stands before the gate of each branch and nowhere else."""
    model, _ = models(lab, "conditioned", dropout_at="branches")
    assert model.dropout.p == 0 and all(block.mixer.dropout == 0 for block in model.blocks)
    assert all(block.dropout.p == SHARE for block in model.blocks)


def test_masks_of_two_layers_and_of_two_branches_are_not_the_same(lab):
    model, _ = models(lab, "plain")
    masks = []
    for module in (model.dropout, *(block.dropout for block in model.blocks)):
        module.register_forward_hook(lambda _, args, output: masks.append(output == 0))
    model(given("plain")[0])
    assert len(masks) == 5
    assert not any(torch.equal(one, two) for index, one in enumerate(masks) for two in masks[:index])


def test_the_mean_over_draws_of_a_branch_is_the_branch(lab):
    """Of what is linear in the masks: the output of the embedding's own place, over many draws."""
    model, _ = models(lab, "plain")
    x_BND = torch.randn(1, 1, 64)
    draws = torch.stack([model.dropout(x_BND) for _ in range(4000)]).double()
    error = (draws.mean(0) - x_BND).abs() / (x_BND.abs() * math.sqrt(SHARE / (1 - SHARE) / 4000))
    assert error.max() < 4.5


def test_where_it_is_said_and_nothing_is_dropped_a_line_says_so(lab):
    with pytest.raises(
        ValueError, match="model.dropout_at=branches changes nothing where model.dropout=0; give a share"
    ):
        lab.spec(model={**TINY["model"], "dropout_at": "branches"})


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_is_at_least_0_and_below_1(lab, share):
    with pytest.raises(ValueError, match="model.dropout="):
        lab.spec(model={**TINY["model"], "dropout": share})
