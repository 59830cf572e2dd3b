"""Attention drops a share of its weights in training mode, and nothing else does; a mechanism without weights leaves
that to its output."""

from __future__ import annotations

import math

import pytest
import torch

from stability.config.parts import validate_settings
from stability.mechanisms import AbstractAttention, AbstractCrossMechanism, MixerShape
from stability.registry import Registry

N, SHARE = 32, 0.3
# name, settings, direction, keys that each query sees
ATTENTION = [
    ("sa", {}, "bidirectional"),
    ("sa", {}, "causal"),
    ("sa", {"mask_diagonal": True}, "bidirectional"),
    ("sw", {"window": 5}, "bidirectional"),
    ("sw", {"window": 5}, "causal"),
    ("attentionx", {}, "bidirectional"),
    ("attentionx", {}, "causal"),
    ("sigmoid", {"length": 1}, "bidirectional"),
    ("sigmoid", {"length": 1}, "causal"),
    ("fox", {}, "causal"),
    ("bigbird", {}, "bidirectional"),
    ("bigbird", {"block": 6}, "causal"),
    ("longformer", {"global_tokens": 0}, "bidirectional"),
    ("longformer", {"global_tokens": 3, "dilation": 2}, "causal"),
    ("sparsek", {"window": None}, "bidirectional"),
    ("sparsek", {"window": 2}, "causal"),
    ("sparse_transformer", {"pattern": "strided"}, "causal"),
    ("sparse_transformer", {"pattern": "fixed", "summary": 2}, "bidirectional"),
]


def built(name, settings, direction, dropout, width=N, heads=1):
    shape = MixerShape(width, heads, direction, num_layers=2, rope=None, dropout=dropout)
    torch.manual_seed(0)
    return Registry("mechanisms").load(name).build(validate_settings("mechanisms", name, settings), shape)


def shows_its_weights(name, settings, direction, dropout):
    """A layer whose scores are all 0, whose value of position j is the unit vector e_j, and which has no output map:
    what it gives at i is row i of its weights (of each of two heads those of its own half of the values)."""
    layer = built(name, settings, direction, dropout, heads=2 if name == "sparse_transformer" else 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.out.weight.copy_(torch.eye(N))
        layer.get_submodule("kv" if name == "ca" else "qkv").weight[-N:] = torch.eye(N)
    return layer


def given_weights(layer, batch):
    """(batch, N, N), what the layer gives to each of ``batch`` equal sequences."""
    x_BND = torch.eye(N).expand(batch, N, N)
    y_BNN = layer(x_BND, x_BND) if isinstance(layer, AbstractCrossMechanism) else layer(x_BND)
    return (torch.eye(N) - y_BNN) / layer.gamma if type(layer).__name__ == "AttentionX" else y_BNN


@pytest.mark.parametrize(("name", "settings", "direction"), [*ATTENTION, ("ca", {}, "bidirectional")])
def test_a_share_of_the_weights_is_dropped_and_the_rest_scaled(name, settings, direction):
    layer = shows_its_weights(name, settings, direction, SHARE)
    whole_NN = given_weights(layer.eval(), 1)[0]
    dropped_BNN = given_weights(layer.train(), 64)[:, whole_NN > 0.01]
    kept = dropped_BNN.abs() > 1e-3
    expected = (whole_NN[whole_NN > 0.01] / (1 - SHARE)).expand_as(kept)
    torch.testing.assert_close(dropped_BNN[kept], expected[kept], rtol=1e-4, atol=1e-4)
    deviation = math.sqrt(SHARE * (1 - SHARE) / kept.numel())
    assert abs((~kept).float().mean() - SHARE) < 4 * deviation
    for axis in ((1,), (0,)):  # no sequence and no pair is spared or singled out
        shares = (~kept).float().mean(axis)
        assert (shares - SHARE).abs().max() < 5 * math.sqrt(SHARE * (1 - SHARE) / kept.shape[axis[0]])


@pytest.mark.parametrize("name", Registry("mechanisms").names(cross=False, trainable=True))
def test_what_is_no_attention_leaves_its_weights_alone(name):
    directions = Registry("mechanisms").load(name).supported_directions(validate_settings("mechanisms", name, {}))
    direction = "bidirectional" if "bidirectional" in directions else "causal"
    layer = built(name, {}, direction, SHARE, width=16, heads=2)
    plain = built(name, {}, direction, 0.0, width=16, heads=2)
    attends = any(isinstance(module, AbstractAttention) for module in layer.modules())
    x_BND = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.eval()(x_BND), plain.eval()(x_BND)) and torch.equal(plain.train()(x_BND), plain(x_BND))
    assert torch.equal(layer.train()(x_BND), plain(x_BND)) == (not attends)


def test_dropped_weights_leave_a_row_without_keys_empty():
    layer = built("sa", {"mask_diagonal": True}, "causal", 0.5, width=16, heads=2).train()
    y_BND = layer(torch.randn(3, 5, 16))
    assert torch.equal(y_BND[:, 0], layer.out.bias.expand(3, 16)) and y_BND.isfinite().all()
