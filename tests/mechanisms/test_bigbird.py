"""Blocks see near, global and random blocks; links are drawn from seed and layer alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.bigbird import block_links
from stability.registry import Registry
from tests.mechanisms import checks, sparse_oracles
from tests.mechanisms.small import OTHER
from tests.mechanisms.sparse_oracles import holes, made, sequences
from tests.sizes import with_slow

DIRECTIONS = ("bidirectional", "causal")
SETTINGS = OTHER["bigbird"]


def layer_of(layer=0, direction="bidirectional", **settings):
    shape = replace(MixerShape(checks.WIDTH, checks.HEADS, direction), layer=layer, num_layers=9)
    return Registry("mechanisms").load("bigbird").build(validate_settings("mechanisms", "bigbird", settings), shape)


def blocks_without_links(direction, num_blocks, block, window, global_blocks):
    """The near and the global blocks of one block of queries, and those that a link may go to."""
    end = block + 1 if direction == "causal" else num_blocks
    if direction == "bidirectional" and block < global_blocks:
        return set(range(num_blocks)), set()
    seen = {other for other in range(end) if abs(other - block) <= window or other < global_blocks}
    return seen, set(range(end)) - seen


def keys(layer, direction, num_positions, block=4, window=1, random=1, global_blocks=1, **of_logits):
    """Sets of positions: near and global ones from their definitions, and so many links as there are to be had."""
    num_blocks = -(-num_positions // block)
    links = layer.links(num_blocks)

    def of(head, i):
        known, open_blocks = blocks_without_links(direction, num_blocks, i // block, window, global_blocks)
        drawn = set(links[i // block]) - known
        assert drawn <= open_blocks and len(drawn) == min(random, len(open_blocks))
        seen = {j for j in range(num_positions) if j // block in known or j // block in drawn}
        return {j for j in seen if j <= i} if direction == "causal" else seen

    return of


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("num_positions", with_slow([1, 5, 17], [3, 4, 16, 40]))
def test_equals_a_loop_over_the_papers_sets(settings, direction, num_positions):
    layer, x_BND = made("bigbird", direction, **settings), sequences(num_positions)
    sets = keys(layer, direction, num_positions, **settings)
    for mask_BN in (None, holes(num_positions)):
        expected_BND = sparse_oracles.over_sets(layer, x_BND, sets, mask_BN)
        sparse_oracles.assert_equal_where_valid(layer(x_BND, mask_BN=mask_BN), expected_BND, mask_BN)


def test_links_are_drawn_from_seed_and_layer_and_from_nothing_else():
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        found.append(layer_of(layer=3, link_seed=5, random=2).links(40))
        block_links.cache_clear()
    assert found[0] == found[1]
    layer, state = layer_of(layer=3, link_seed=5, random=2), torch.get_rng_state()
    layer(torch.ones(1, 164, checks.WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    assert layer_of(layer=4, link_seed=5, random=2).links(40) != found[0]
    assert layer_of(layer=3, link_seed=6, random=2).links(40) != found[0]


def test_these_links_stay():
    """A trained model is another one with other links."""
    for direction, expected in (
        ("bidirectional", [1, 0, 9, 10, 2, 3, 1, 8, 4, 6, 0, 1]),
        ("causal", [None, 0, 1, 2, 0, 1, 1, 5, 2, 5, 0, 1]),
    ):
        links = layer_of(direction=direction, window=0, global_blocks=0, link_seed=7).links(12)
        drawn = [[key for key in row if key != block] for block, row in enumerate(links)]
        assert drawn == [[] if link is None else [link] for link in expected]


def test_every_open_block_is_linked_about_as_often():
    counts = Counter()
    for seed in range(500):
        known, open_blocks = blocks_without_links("bidirectional", 12, 6, 1, 1)
        counts.update(set(layer_of(link_seed=seed, random=2).links(12)[6]) - known)
    assert set(counts) == open_blocks
    expected = 2 * 500 / len(open_blocks)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_causal_links_stay_whatever_follows():
    layer = layer_of(direction="causal", random=2)
    assert layer.links(50)[:20] == layer.links(20)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_follows_does_not_change_a_causal_sequence(settings):
    layer = made("bigbird", "causal", **settings)
    sparse_oracles.assert_prefix_is_itself(layer)
    sparse_oracles.assert_padding_behind_adds_nothing(layer)


@pytest.mark.parametrize("settings", [{"window": 20}, {"random": 20}, {"global_blocks": 20}], ids=str)
def test_where_every_block_is_seen_it_is_softmax_attention(settings):
    layer, whole = made("bigbird", **settings), made("sa")
    whole.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(layer(sequences(37)), whole(sequences(37)), rtol=0, atol=1e-12)


def test_settings_that_cannot_be_are_refused():
    mechanism = Registry("mechanisms").load("bigbird")
    least_of = {"block": 1, "window": 0, "random": 0, "global_blocks": 0, "link_seed": 0}
    for name, least in least_of.items():
        with pytest.raises(ValueError, match=f"{name}={least - 1}: input should be greater than or equal to {least}"):
            build("bigbird", width=8, heads=2, **{name: least - 1})
    for settings, message in (
        ({"block": 9}, "bigbird.block=9 must fit in model.positions=8"),
        ({"global_blocks": 3}, "bigbird.global_blocks=3 of 4 positions must fit in model.positions=8"),
    ):
        config = validate_settings("mechanisms", "bigbird", settings)
        mechanism.check_positions(config, 12)
        with pytest.raises(ValueError, match=message):
            mechanism.check_positions(config, 8)
