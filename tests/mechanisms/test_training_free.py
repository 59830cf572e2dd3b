"""What `sparge` and `fasa` have in common: at the full budget they are `sa`, they look at nothing that follows, they
are not trained."""

from __future__ import annotations

import pytest
import torch

from stability.mechanisms import build
from tests.mechanisms import checks
from tests.mechanisms.names import UNTRAINED
from tests.mechanisms.test_fasa import DOMINANT, fasa
from tests.mechanisms.test_sparge import BASE, HEADS, WIDTH, inputs, layer_of

DIRECTIONS = ["bidirectional", "causal"]
OF_SA = [{}, {"mask_diagonal": True}, {"temperature": "learned"}, {"kv_heads": 1}]
FULL = [
    ("sparge", {"tau": 1.0, "skip": -1e9, "key_block": 4, "query_block": 4}),
    ("fasa", {}),
    ("fasa", {"tokens": 17}),
    ("fasa", {"tokens": 17, "chunks": 2}),
]


def leaving_out(name, direction):
    """A layer that leaves something out, small margins of its selection apart."""
    if name == "fasa":
        return fasa(direction, DOMINANT, sharp=1.0, seed=5, tokens=4, chunks=2)
    return layer_of("sparge", direction, seed=5, tau=0.6, theta=-0.5, skip=-0.7, query_block=3, key_block=2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("of_sa", OF_SA, ids=str)
@pytest.mark.parametrize(("name", "budget"), FULL)
def test_at_the_full_budget_it_is_sa(name, budget, of_sa, direction):
    trained = build("sa", width=WIDTH, heads=HEADS, direction=direction, **of_sa).double()
    layer = build(name, width=WIDTH, heads=HEADS, direction=direction, **of_sa, **budget).double()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    layer.load_state_dict(trained.state_dict(), strict=True)
    for num_positions in (1, 4, 9, 17):
        x_BND = inputs(num_positions, batch=3)
        torch.testing.assert_close(layer(x_BND), trained(x_BND), rtol=0, atol=1e-12)
        assert layer.skipped(x_BND) == 0
    mask_BN, x_BND = checks.padding(), inputs(checks.NUM_POSITIONS, batch=3)
    found, expected = layer(x_BND, mask_BN=mask_BN), trained(x_BND, mask_BN=mask_BN)
    torch.testing.assert_close(found[mask_BN], expected[mask_BN], rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_positions", [9, 17, 40])
@pytest.mark.parametrize("name", UNTRAINED)
def test_a_later_position_changes_nothing_before_it_whatever_is_chosen(name, num_positions):
    """Gradients would not show it: the choice has none."""
    layer = leaving_out("fasa", "causal") if name == "fasa" else layer_of("sparge", "causal", 1.0, **BASE)
    x_BND = inputs(num_positions, batch=4)
    assert layer.skipped(x_BND) > 0
    for place in range(1, num_positions):
        later_BND = x_BND.clone()
        later_BND[:, place:] = 5 * torch.randn(4, num_positions - place, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(layer(later_BND)[:, :place], layer(x_BND)[:, :place], rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", UNTRAINED)
def test_with_pairs_left_out_it_keeps_the_contract(name, direction):
    assert leaving_out(name, direction).skipped(checks.inputs()) > 0.1
    for check in (
        checks.check_shape_and_dtype,
        checks.check_padding_is_unread,
        checks.check_wholly_padded_is_finite,
        checks.check_second_derivatives,
        checks.check_degenerate_inputs,
        checks.check_weights_reproduce_forward,
    ):
        check(leaving_out(name, direction))


@pytest.mark.parametrize("name", UNTRAINED)
def test_heads_that_cannot_be_grouped_are_refused_in_one_line(name):
    with pytest.raises(ValueError) as caught:
        build(name, width=16, heads=4, kv_heads=3)
    assert str(caught.value) == f"mechanism.{name}.kv_heads=3 does not divide heads=4; choices: 1, 2, 4, null"


@pytest.mark.parametrize("name", UNTRAINED)
def test_it_cannot_be_trained(name, lab):
    with pytest.raises(
        ValueError, match=f"^mechanism={name} cannot be trained: it is for checkpoints that sa"
    ) as caught:
        lab.spec(mechanism={"name": name})
    assert len(str(caught.value).splitlines()) == 1
