"""Every registered norm keeps the contract: shape and dtype, equal builds, saved parameters, second derivatives, and
settings that are read."""

from __future__ import annotations

import pytest
import torch

from stability.build import build_model
from stability.norms import AbstractNorm, build
from stability.registry import Registry
from tests import position_wise
from tests.changes import settings_of_family

FAMILY = position_wise.Family("norms", AbstractNorm, build)
NAMES = Registry("norms").names()


@pytest.mark.parametrize("check", position_wise.CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_norm_keeps_the_contract_of_position_wise_parts(name, check):
    check(FAMILY, name)


@pytest.mark.parametrize(("name", "key"), settings_of_family("norms"))
def test_every_setting_changes_what_the_norm_gives(name, key):
    position_wise.check_setting_shows(FAMILY, name, key)


@pytest.mark.parametrize("name", NAMES)
def test_equal_settings_build_equal_norms_and_draw_nothing(name):
    before = torch.random.get_rng_state()
    one, two = FAMILY.built(name), FAMILY.built(name)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one(position_wise.inputs(torch.float32)), two(position_wise.inputs(torch.float32)))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_it_before_every_branch_and_the_head(lab, name):
    model = build_model(lab.spec(norm=name), 8)
    found = {key for key, module in model.named_modules() if isinstance(module, Registry("norms").load(name))}
    blocks = {f"blocks.{layer}.{norm}" for layer in range(len(model.blocks)) for norm in ("mixer_norm", "ffn_norm")}
    assert found == blocks | {"final_norm"}
