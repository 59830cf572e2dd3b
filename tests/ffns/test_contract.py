"""Every registered feed-forward network keeps the contract: shape and dtype, equal builds, saved parameters, second
derivatives, and settings that are read."""

from __future__ import annotations

from typing import Any

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


def last_maps(ffn: Any) -> list[Any]:
    """The last projection of a network, or of each of its experts."""
    found = [module for path, module in ffn.named_modules() if path.rsplit(".", 1)[-1] == "out"]
    assert found and all(isinstance(module, torch.nn.Linear) for module in found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_its_last_projection_is_scaled_down_with_the_depth(lab, name):
    """What the initialisation knows a branch's end by is the name ``out``."""
    spec = lab.spec(ffn=name)
    deep = spec.model_copy(update={"model": spec.model.model_copy(update={"layers": 4 * spec.model.layers})})
    for first, other in zip(*(last_maps(build_model(each, 8).blocks[0].ffn) for each in (spec, deep)), strict=True):
        torch.testing.assert_close(other.weight, first.weight / 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_multiple_that_rounds_to_nothing_leaves_a_hidden_layer_of_one(name):
    assert {each.in_features for each in last_maps(build(name, width=8, ffn_multiple=0.01))} == {1}
    if "multiple" in Registry("ffns").load(name).Config.model_fields:
        assert {each.in_features for each in last_maps(build(name, width=8, multiple=0.01))} == {1}


@pytest.mark.parametrize("name", NAMES)
def test_its_hidden_layer_is_dropped_where_the_model_says_and_in_training_alone(lab, name):
    spec = lab.spec(ffn=name)
    shares = {}
    for place in ("all", "maps"):
        size = spec.model.model_copy(update={"dropout": 0.25, "dropout_at": place})
        ffn: Any = build_model(spec.model_copy(update={"model": size}), 8).blocks[1].ffn
        shares[place] = ffn.dropped.p
    assert shares == {"all": 0.0, "maps": 0.25}
    reached, x_BND = [], torch.randn(4, 50, 16)
    last_maps(ffn)[0].register_forward_pre_hook(lambda _, args: reached.append(args[0]))
    for training in (False, True):
        ffn.train(training)(x_BND)
    whole, dropped = reached
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert (kept.double().mean() - 0.75).abs() < 4.5 * (0.25 * 0.75 / kept.numel()) ** 0.5
