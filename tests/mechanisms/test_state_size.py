"""How many numbers a mechanism keeps of a sequence to go on reading: by hand, by which positions later ones look at,
and by the rank of the map from the past to the future."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms._recurrent import AbstractRecurrent
from stability.registry import Registry
from tests.mechanisms import names
from tests.mechanisms.checks import build_seeded
from tests.mechanisms.plugins.remembering import Remembering
from tests.mechanisms.small import SMALL
from tests.mechanisms.state_checks import SHAPE, pairs_looked_at, positions_felt, recurrent_numbers

REGISTRY = Registry("mechanisms")
RECURRENT = [
    name for name in REGISTRY.names(cross=False, trainable=True) if issubclass(REGISTRY.load(name), AbstractRecurrent)
]
# in the place of SMALL: states so small that the rank of a map of that many rows is soon found, and of the past by the
# recurrence alone
FEW = {"mamba": {"state": 4}, "mamba2": {"state": 4}, "titans": {}}
# what is carried and not read: retnet's norm takes away each head's mean, and with it one of 8 columns of a state of 8 rows
UNREAD = {"retnet": 2 * 8}

# Two heads of 8: a key and a value of one position are 16 numbers in each head, 32 in both.
BY_HAND = [
    ("sa", {}, 1, 32),
    ("sa", {}, 9, 288),
    ("sa", {"kv_heads": 1}, 9, 144),
    ("sa", {"mask_diagonal": True}, 9, 288),  # what does not see itself is seen by what follows
    ("attentionx", {}, 9, 288),
    ("gated_softmax", {}, 9, 288),
    ("gated_softmax", {"kv_heads": 1}, 9, 144),
    ("sigmoid", {}, 9, 288),
    ("fasa", {"tokens": 2, "chunks": 1}, 9, 288),  # any key may be among the best of a later query
    ("fox", {}, 9, 288 + 2 * 9),
    ("sw", {"window": 4}, 3, 3 * 32),
    ("sw", {"window": 4}, 9, 4 * 32),
    ("longformer", {"window": 1, "global_tokens": 2}, 1, 32),
    ("longformer", {"window": 1, "global_tokens": 2}, 9, 3 * 32),
    ("longformer", {"window": 2, "dilation": 3, "global_tokens": 1}, 5, 5 * 32),
    ("longformer", {"window": 2, "dilation": 3, "global_tokens": 1}, 40, 7 * 32),
    ("bigbird", {"block": 2}, 9, 288),  # a link may go to any block
    ("bigbird", {"block": 2, "random": 0}, 3, 3 * 32),
    ("bigbird", {"block": 2, "random": 0}, 9, 5 * 32),  # 0, 1 | 6, 7, 8
    ("bigbird", {"block": 2, "random": 0}, 10, 4 * 32),  # 0, 1 | 8, 9
    ("sparse_transformer", {"stride": 3}, 2, 4 * 16),
    ("sparse_transformer", {"stride": 3}, 9, (3 + 9) * 16),
    ("sparse_transformer", {"stride": 4, "pattern": "fixed"}, 9, (1 + 2) * 16),  # 8 | 3, 7
    ("sparse_transformer", {"stride": 4, "pattern": "fixed", "summary": 2}, 7, (3 + 3) * 16),  # 4, 5, 6 | 2, 3, 6
    ("sparsek", {"k": 2, "window": 1}, 1, 32 + 2),
    ("sparsek", {"k": 2, "window": 1}, 9, 3 * 32 + 2 * 9),
    ("sparsek", {"k": 2, "window": None}, 9, 2 * 32 + 2 * 9),
    ("sparge", {"query_block": 4}, 8, 256),
    ("sparge", {"query_block": 4}, 9, 288 + 2 * 16),
    ("sparge", {"query_block": 4, "tau": 1.0}, 9, 288),
    # compressed blocks + positions that are not in a complete one + all for the selection + the window
    ("nsa", {"block": 2, "stride": 1, "selected_block": 2, "window": 3}, 9, (8 + 1 + 9 + 3) * 32),
    ("nsa", {}, 3, (0 + 3 + 3 + 3) * 32),
    ("nsa", {}, 9, (1 + 5 + 9 + 9) * 32),
    ("nsa", {"kv_heads": 1}, 9, (1 + 5 + 9 + 9) * 16),
    # keys by values of each head, and what the convolution still holds
    *((name, {}, 9, 2 * 8 * 8 + 3 * 48) for name in ("deltanet", "gated_deltanet", "kda")),
    *((name, {"expand_v": 3, "conv": 2}, 9, 2 * 8 * 24 + 80) for name in ("deltanet", "gated_deltanet", "kda")),
    ("mamba", {"expand": 3, "state": 5, "conv": 4}, 9, 48 * 5 + 3 * 48),
    ("mamba2", {"expand": 3, "state": 5, "conv": 4}, 9, 48 * 5 + 3 * (48 + 10)),
]
LOOKED_AT = [
    (name, settings)
    for name, settings in (
        ("sa", {}),
        ("attentionx", {}),
        ("gated_softmax", {}),
        ("sigmoid", {}),
        ("sw", {"window": 1}),
        ("sw", {"window": 5}),
        ("longformer", {"window": 1, "global_tokens": 2}),
        ("longformer", {"window": 3, "dilation": 3, "global_tokens": 0}),
        ("longformer", {"window": 2, "dilation": 4, "global_tokens": 1}),
        ("bigbird", {"block": 3, "random": 0}),
        ("bigbird", {"block": 2, "random": 0, "window": 2, "global_blocks": 2}),
        ("sparse_transformer", {"stride": 4}),
        ("sparse_transformer", {"stride": 5, "pattern": "fixed", "summary": 2}),
    )
]


def size(name, settings, num_positions, shape=SHAPE):
    return REGISTRY.load(name).state_size(validate_settings("mechanisms", name, settings), shape, num_positions)


def made(name, settings) -> Any:
    return build_seeded(lambda: build(name, width=16, heads=2, direction="causal", **settings))


@pytest.mark.parametrize(("name", "settings", "num_read", "expected"), BY_HAND)
def test_state_size_is_what_is_counted_by_hand(name, settings, num_read, expected):
    assert size(name, settings, num_read) == expected


@pytest.mark.parametrize(("name", "settings"), LOOKED_AT)
def test_keys_and_values_are_kept_of_what_later_positions_look_at_and_of_nothing_else(name, settings):
    module = made(name, settings)
    for num_read in (1, 2, 7, 12, 20):
        assert size(name, settings, num_read) == 16 * pairs_looked_at(module, num_read), f"after {num_read} positions"


def test_scores_that_are_close_to_each_other_all_have_a_part_in_the_threshold():
    """sparsek keeps few keys and all scores: its outputs hang on positions that it looks at no more."""
    module = made("sparsek", {"k": 2, "window": None})
    nn.init.constant_(module.scorer.weight, 1e-3)
    assert positions_felt(module, 9) == 9
    nn.init.constant_(module.scorer.weight, 5.0)
    assert positions_felt(module, 9) < 9, "scores far apart: whoever is not among the best is forgotten"


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, FEW.get(name, SMALL.get(name, {}))) for name in RECURRENT] + [("gla", {"chunk": 4, "conv": 3})],
)
def test_a_recurrent_mechanism_carries_as_many_numbers_as_it_says(name, settings):
    told = size(name, settings, 200)
    assert told == size(name, settings, 10_000), "it grows with what was read"
    assert told - UNREAD.get(name, 0) == recurrent_numbers(made(name, settings), told)


def test_numbers_that_a_recurrence_carries_are_measured_without_its_word():
    module: Any = build_seeded(lambda: Remembering(None, SHAPE))
    told = Remembering.state_size(None, SHAPE, 200)
    assert told == 16 * 8 + 2 * 16 == recurrent_numbers(module, told)
    module.convolution.weight.data[:, :, 0] = 0  # what is held and never read is a number all the same
    assert recurrent_numbers(module, told) == told
    module.key.weight.data[0], module.key.bias.data[0] = 0, 0  # a key's entry that is always 0 carries nothing
    assert recurrent_numbers(module, told) == told - 16


@pytest.mark.parametrize("name", names.ALL)
def test_only_what_is_causal_has_a_state(name):
    directions = REGISTRY.load(name).supported_directions(validate_settings("mechanisms", name, {}))
    if "bidirectional" in directions:
        both_sides = size(name, {}, 12, MixerShape(16, 2, "bidirectional", 0, 2))
        assert both_sides is None, "earlier positions see later ones"
    kept = size(name, {}, 12, MixerShape(16, 2, "causal", 0, 2))
    assert (kept is not None) == ("causal" in directions or name == "mix")
    assert kept is None or (isinstance(kept, int) and kept > 0)


def test_a_pattern_s_layer_keeps_what_its_mechanism_keeps():
    settings = {"pattern": ("sw", "sw", "sa"), "order": "cycled", "sw": {"window": 3}}
    sizes = [size("mix", settings, 9, MixerShape(16, 2, "causal", layer, 6)) for layer in range(6)]
    assert sizes == [3 * 32, 3 * 32, 288] * 2
    stretched = settings | {"order": "stretched"}
    sizes = [size("mix", stretched, 9, MixerShape(16, 2, "causal", layer, 6)) for layer in range(6)]
    assert sizes == [96] * 4 + [288] * 2
