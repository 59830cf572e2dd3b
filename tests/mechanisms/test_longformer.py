"""Windows, dilation and global tokens are the paper's, and without dilation those of the public implementation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.registry import Registry
from tests.mechanisms import checks, sparse_oracles
from tests.mechanisms.small import OTHER
from tests.mechanisms.sparse_oracles import attend, holes, made, projected, sequences
from tests.sizes import with_slow

DIRECTIONS = ("bidirectional", "causal")
SETTINGS = OTHER["longformer"]


def keys(direction, num_positions, window=2, dilation=1, global_tokens=1):
    """{i + d·m: |m| ≤ w} and the first g positions; of a global token everything. Causal: of those the past."""

    def of(head, i):
        if i < global_tokens and direction == "bidirectional":
            return set(range(num_positions))
        seen = {i + dilation * m for m in range(-window, window + 1)} | set(range(global_tokens))
        last = i if direction == "causal" else num_positions - 1
        return {j for j in seen if 0 <= j <= last}

    return of


def looped(layer, x_BND, direction, settings, mask_BN=None):
    """The output by loops over the sets, and in global rows by the other projections."""
    num_positions, few = x_BND.shape[1], settings["global_tokens"]
    sets = keys(direction, num_positions, **settings)
    y_BND = sparse_oracles.over_sets(layer, x_BND, sets, mask_BN).clone()
    if direction == "causal" or few == 0:
        return y_BND
    width = x_BND.shape[2] // layer.heads
    for b, x_ND in enumerate(x_BND):
        valid = set(range(num_positions)) if mask_BN is None else set(mask_BN[b].nonzero().flatten().tolist())
        of_heads = [
            attend(
                projected(layer.q_global, x_ND, 0, head, width),
                projected(layer.kv_global, x_ND, 0, head, width),
                projected(layer.kv_global, x_ND, 1, head, width),
                [valid] * num_positions,
            )
            for head in range(layer.heads)
        ]
        y_BND[b, :few] = (torch.cat(of_heads, 1) @ layer.out.weight.T + layer.out.bias)[:few]
    return y_BND


def apart(layer):
    """The layer with global projections that are no copies of the others."""
    if layer.q_global is not None:
        with torch.no_grad():
            for parameter in (*layer.q_global.parameters(), *layer.kv_global.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))
    return layer


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_positions", with_slow([1, 4, 19], [2, 3, 16, 40]))
def test_equals_a_loop_over_the_papers_sets(settings, direction, num_positions):
    layer, x_BND = apart(made("longformer", direction, **settings)), sequences(num_positions)
    for mask_BN in (None, holes(num_positions)):
        expected_BND = looped(layer, x_BND, direction, settings, mask_BN)
        sparse_oracles.assert_equal_where_valid(layer(x_BND, mask_BN=mask_BN), expected_BND, mask_BN)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("global_tokens", [0, 1, 3])
def test_equals_the_public_longformer(global_tokens, padded, monkeypatch):
    window, num_positions, width, heads = 4, 24, checks.WIDTH, checks.HEADS
    config = validate_settings("mechanisms", "longformer", {"window": window, "global_tokens": global_tokens})
    shape = MixerShape(width, heads, rope=None)
    layer = apart(checks.build_seeded(lambda: Registry("mechanisms").load("longformer").build(config, shape))).double()
    theirs = LongformerSelfAttention(
        LongformerConfig(
            hidden_size=width,
            num_attention_heads=heads,
            attention_window=[2 * window],
            attention_probs_dropout_prob=0.0,
        ),
        0,
    ).double()
    maps = [(theirs.query, layer.qkv, 0), (theirs.key, layer.qkv, 1), (theirs.value, layer.qkv, 2)]
    if global_tokens:
        maps += [(theirs.query_global, layer.q_global, 0)]
        maps += [(theirs.key_global, layer.kv_global, 0), (theirs.value_global, layer.kv_global, 1)]
    with torch.no_grad():
        for to, of, part in maps:
            to.weight.copy_(of.weight[part * width : (part + 1) * width])
            to.bias.copy_(of.bias[part * width : (part + 1) * width])
        layer.out.weight.copy_(torch.eye(width))
        nn.init.zeros_(layer.out.bias)
        x_BND, mask_BN = sequences(num_positions), torch.ones(sparse_oracles.BATCH, num_positions, dtype=torch.bool)
        if padded:
            mask_BN[0, 17:] = mask_BN[1, 23:] = False
        is_global_BN = (torch.arange(num_positions) < global_tokens).expand_as(mask_BN)
        kinds_BN = torch.where(mask_BN, torch.where(is_global_BN, 10000.0, 0.0), -10000.0)
        with monkeypatch.context() as patch:  # they ask for float32, whatever their input is
            patch.setattr(nn.functional, "softmax", lambda scores, dim, dtype: torch.softmax(scores, dim))
            expected_BND = theirs.eval()(x_BND, kinds_BN, ~mask_BN, is_global_BN & mask_BN, global_tokens > 0)[0]
        found_BND = layer(x_BND, mask_BN=mask_BN if padded else None)
    torch.testing.assert_close(found_BND[mask_BN], expected_BND[mask_BN], rtol=1e-10, atol=1e-12)


def test_without_global_tokens_it_is_sw():
    layer, plain = made("longformer", window=3, global_tokens=0), made("sw", window=3)
    plain.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(layer(sequences(37)), plain(sequences(37)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_neither_what_follows_nor_padding_behind_changes_a_sequence(settings):
    sparse_oracles.assert_prefix_is_itself(made("longformer", "causal", **settings))
    for direction in DIRECTIONS:
        sparse_oracles.assert_padding_behind_adds_nothing(apart(made("longformer", direction, **settings)))


def test_global_projections_begin_as_copies_and_are_not_there_where_no_row_sees_everything():
    layer = made("longformer", global_tokens=2)
    assert torch.equal(torch.cat([layer.q_global.weight, layer.kv_global.weight]), layer.qkv.weight)
    assert torch.equal(torch.cat([layer.q_global.bias, layer.kv_global.bias]), layer.qkv.bias)
    assert layer.own_splits == {"qkv": (16, 16, 16), "kv_global": (16, 16)}
    for bare in (made("longformer", global_tokens=0), made("longformer", "causal", global_tokens=2)):
        assert {name for name, _ in bare.named_children()} == {"qkv", "out"}
        assert bare.own_splits == {"qkv": (16, 16, 16)}


def test_a_local_start_looks_at_neighbours():
    layer = made("longformer", window=8, global_tokens=0)
    nn.init.zeros_(layer.qkv.weight)
    layer.start_local(2.0)
    row_N = layer.weights(sequences(17))[0, 0, 8].tolist()
    assert row_N[8] > row_N[9] > row_N[10] > row_N[11], "the score falls off with distance"
    assert row_N[7] == pytest.approx(row_N[9])


def test_settings_that_cannot_be_are_refused():
    mechanism = Registry("mechanisms").load("longformer")
    for name, least in (("window", 1), ("dilation", 1), ("global_tokens", 0)):
        with pytest.raises(ValueError, match=f"{name}={least - 1}: input should be greater than or equal to {least}"):
            build("longformer", width=8, heads=2, **{name: least - 1})
    for name in ("dilation", "global_tokens"):
        config = validate_settings("mechanisms", "longformer", {name: 8})
        mechanism.check_positions(config, 9)
        with pytest.raises(ValueError, match=rf"longformer.{name}=8 must be below model.positions=8"):
            mechanism.check_positions(config, 8)
    with pytest.raises(ValueError, match="head width 12/4 = 3 is odd"):
        build("longformer", width=12, heads=4)
