"""The scan's kernels are valid Triton and fit on an H100: compiled ahead of time for sm_90, with no GPU here."""

from __future__ import annotations

import pytest

from tests.kernels.ahead import compiled

CODE = """
from kernels import recurrent
draw = lambda width: torch.randn(1, 2, 70, width).requires_grad_()
q, k, v, g = draw({keys}), draw({keys}), draw({values}), draw({decays})
beta = draw(1) if {delta} else None
inputs = (q, k, v, beta, g)
recurrent.SCAN(*inputs, precision={precision!r}).sum().backward()
recurrent.SCAN.second_order(*((each, each, None) for each in inputs), precision={precision!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "values", "decays", "delta", "precision", "stack"),
    [
        (64, 64, 1, True, "tf32", 256),
        (64, 64, 64, False, "tf32", 1024),
        (16, 16, 1, False, "ieee", 0),
        (16, 16, 1, True, "ieee", 256),
    ],
)
def test_the_kernels_compile_for_hopper(keys, values, decays, delta, precision, stack):
    """``stack``: bytes of a thread that may lie outside of its registers."""
    found = compiled(CODE.format(keys=keys, values=values, decays=decays, delta=delta, precision=precision))
    assert [each.name for each in found] == ["walk", "walk", "walk_back", "walk_along_line"]
    for each in found:
        each.assert_fits()
        assert each.stack <= stack, each
