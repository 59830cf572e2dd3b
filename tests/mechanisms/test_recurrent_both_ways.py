"""Every recurrent mechanism read from both ends, and every third layer of it softmax attention."""

from __future__ import annotations

import pytest
import torch

from stability.mechanisms import build
from tests.mechanisms import checks
from tests.mechanisms.names import RECURRENT
from tests.mechanisms.small import SMALL

CHECKS = (
    checks.check_both_sides_are_seen,
    checks.check_padding_is_unread,
    checks.check_wholly_padded_is_finite,
    checks.check_every_parameter_is_trained,
)


@pytest.mark.parametrize("name", RECURRENT)
def test_read_from_both_ends_it_keeps_the_contract(name):
    shape = {"width": checks.WIDTH, "heads": checks.HEADS, "num_layers": 2}
    for check in CHECKS:
        check(checks.build_seeded(lambda: build("two_way", **shape, of=name, **{name: SMALL.get(name, {})})))


@pytest.mark.parametrize("name", RECURRENT)
def test_read_backwards_it_is_the_mechanism_of_the_reversed_sequence(name):
    module = checks.build_seeded(lambda: build("two_way", width=16, heads=2, of=name, weights="shared")).double()
    x_BND = checks.inputs()
    expected = module.mixers[0](x_BND) + module.mixers[0](x_BND.flip(1)).flip(1)
    torch.testing.assert_close(module(x_BND), expected, rtol=1e-12, atol=1e-13)
