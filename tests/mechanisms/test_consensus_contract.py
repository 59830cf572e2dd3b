"""Every variant of sc and cc keeps the contract of a mechanism, and its curvature is the same by every exact method."""

from __future__ import annotations

import pytest

from tests.mechanisms import checks
from tests.mechanisms.variants import CROSS, SELF, WithContext, WithEdges, name_of

CASES = [pytest.param(lambda s=s: WithEdges(**s), id=f"sc-{name_of(s)}") for s in SELF]
CASES += [pytest.param(lambda s=s: WithContext(**s), id=f"cc-{name_of(s)}") for s in CROSS]
OF_A_MODULE = (
    checks.check_shape_and_dtype,
    checks.check_padding_is_unread,
    checks.check_wholly_padded_is_finite,
    checks.check_second_derivatives,
    checks.check_degenerate_inputs,
)


@pytest.mark.parametrize("make", CASES)
def test_variant_keeps_the_contract(make):
    for check in OF_A_MODULE:
        check(checks.build_seeded(make))
    checks.check_deterministic(make)
    checks.check_save_load(make)
    checks.check_taylor_is_double_backward(checks.build_seeded(make).double(), checks.inputs(), checks.padding())


@pytest.mark.parametrize("settings", SELF, ids=name_of)
def test_the_edges_that_a_variant_exposes_reproduce_its_forward(settings):
    module = checks.build_seeded(lambda: WithEdges(**settings))
    checks.check_edges_reproduce_forward(module.layer, **module.edges(checks.NUM_POSITIONS))
