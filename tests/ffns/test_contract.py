"""Every registered feed-forward network keeps the contract: shape and dtype, equal builds, saved parameters, second
derivatives, and settings that are read."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model
from stability.ffns import AbstractFeedForward, build
from stability.registry import Registry
from tests import position_wise
from tests.changes import settings_of_family

FAMILY = position_wise.Family("ffns", AbstractFeedForward, build)
NAMES = Registry("ffns").names()


@pytest.mark.parametrize("check", position_wise.CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_network_keeps_the_contract_of_position_wise_parts(name, check):
    check(FAMILY, name)


@pytest.mark.parametrize(("name", "key"), settings_of_family("ffns"))
def test_every_setting_changes_what_the_network_gives(name, key):
    position_wise.check_setting_shows(FAMILY, name, key)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_builds_the_same_network(name):
    one, two = FAMILY.shaken(name), FAMILY.shaken(name)
    first, second = (position_wise.all_given(each, position_wise.inputs(torch.float32)) for each in (one, two))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_it_in_every_block_at_the_model_s_multiple(lab, name):
    spec = lab.spec(ffn=name)
    wide = spec.model_copy(update={"model": spec.model.model_copy(update={"ffn_multiple": 6.0})})
    model, wider = (build_model(each, 8) for each in (spec, wide))
    for block, other in zip(model.blocks, wider.blocks, strict=True):
        assert isinstance(block.ffn, Registry("ffns").load(name))
        assert sum(p.numel() for p in block.ffn.parameters()) < sum(p.numel() for p in other.ffn.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_its_last_projection_is_scaled_down_with_the_depth(lab, name):
    """What the initialisation knows a branch's end by is the name ``out``."""
    assert isinstance(FAMILY.built(name).out, torch.nn.Linear)
    spec = lab.spec(ffn=name)
    deep = spec.model_copy(update={"model": spec.model.model_copy(update={"layers": 4 * spec.model.layers})})
    first, other = (build_model(each, 8).blocks[0].ffn.out.weight for each in (spec, deep))
    torch.testing.assert_close(other, first / 2)
