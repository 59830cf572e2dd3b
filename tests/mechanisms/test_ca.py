from __future__ import annotations

import pytest
import torch

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.mechanisms.ca import CrossAttention
from tests.mechanisms.checks import build_seeded, inputs, padding
from tests.mechanisms.cross_checks import NUM_CONTEXT, context, context_padding
from tests.mechanisms.oracles import rotated


def module(**settings) -> torch.nn.Module:
    return build_seeded(lambda: build("ca", width=16, heads=2, **settings)).double()


def explicit(
    layer: torch.nn.Module, x_BND: torch.Tensor, c_BJD: torch.Tensor, mask_BJ: torch.Tensor, *, turned: bool = True
) -> torch.Tensor:
    """Softmax over the valid context, one output position and one context position at a time."""
    heads, head_width = 2, 8
    y_BND = torch.zeros_like(x_BND)
    for b in range(len(x_BND)):
        q_ND = x_BND[b] @ layer.q.weight.T + layer.q.bias
        k_JD, v_JD = (c_BJD[b] @ layer.kv.weight.T + layer.kv.bias).split(16, 1)
        mixed_ND = torch.zeros_like(q_ND)
        for head in range(heads):
            part = slice(head * head_width, (head + 1) * head_width)
            q_NK, k_JK = (rotated(q_ND[:, part]), rotated(k_JD[:, part])) if turned else (q_ND[:, part], k_JD[:, part])
            for i in range(len(q_NK)):
                valid = [j for j in range(len(k_JK)) if mask_BJ[b, j]]
                weights = {j: torch.exp(q_NK[i] @ k_JK[j] / head_width**0.5) for j in valid}
                total = sum(weights.values())
                for j in valid:
                    mixed_ND[i, part] += weights[j] / total * v_JD[j, part]
        y_BND[b] = mixed_ND @ layer.out.weight.T + layer.out.bias if mask_BJ[b].any() else 0.0
    return y_BND


@pytest.mark.parametrize("rope", ["absolute", "none"])
def test_equals_explicit_softmax_over_the_context(rope):
    layer, whole = module(rope=rope), torch.ones(context_padding().shape, dtype=torch.bool)
    expected = explicit(layer, inputs(), context(), whole, turned=rope == "absolute").detach()
    torch.testing.assert_close(layer(inputs(), context()).detach(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(inputs(), context(), context_mask_BJ=whole).detach(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        layer.float()(inputs().float(), context().float()).detach(), expected.float(), rtol=0, atol=1e-5
    )


def test_equals_explicit_softmax_over_the_valid_context():
    layer, mask_BN, mask_BJ = module(), padding(), context_padding()
    mask_BJ[2] = False
    expected = explicit(layer, inputs(), context(), mask_BJ)
    found = layer(inputs(), context(), mask_BN=mask_BN, context_mask_BJ=mask_BJ)
    torch.testing.assert_close(found[mask_BN], expected[mask_BN], rtol=0, atol=1e-10)


def test_a_row_without_context_gets_exactly_zero():
    mask_BJ = context_padding()
    mask_BJ[1] = False
    found = module()(inputs(), context(), context_mask_BJ=mask_BJ)
    assert not found[1].count_nonzero()
    assert found[0].count_nonzero() == found[0].numel()


def test_rope_changes_the_output_and_without_it_the_order_of_the_context_does_not_matter():
    order = torch.arange(NUM_CONTEXT).flip(0)
    assert not torch.allclose(module()(inputs(), context()), module(rope="none")(inputs(), context()))
    assert not torch.allclose(module()(inputs(), context()), module()(inputs(), context()[:, order]))
    torch.testing.assert_close(
        module(rope="none")(inputs(), context()), module(rope="none")(inputs(), context()[:, order]), rtol=0, atol=1e-12
    )


def test_equal_shifts_of_both_positions_change_nothing():
    """RoPE enters by differences of positions: padding both on the left moves source and context alike."""
    layer = module()
    moved_x, moved_c = (
        torch.cat([torch.full((3, 4, 16), float("nan"), dtype=torch.float64), tensor], 1)
        for tensor in (inputs(), context())
    )
    masks = {
        "mask_BN": torch.arange(13).expand(3, -1) >= 4,
        "context_mask_BJ": torch.arange(4 + NUM_CONTEXT).expand(3, -1) >= 4,
    }
    torch.testing.assert_close(layer(moved_x, moved_c, **masks)[:, 4:], layer(inputs(), context()), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("masks", "message"), [
    ({"context_mask_BJ": torch.ones(3, NUM_CONTEXT + 1, dtype=torch.bool)}, r"context_mask_BJ has shape \(3, 8\); expected \(3, 7\)"),
    ({"mask_BN": torch.ones(3, NUM_CONTEXT, dtype=torch.bool)}, r"mask_BN has shape \(3, 7\); expected \(3, 9\)"),
    ({"context_mask_BJ": torch.ones(3, NUM_CONTEXT)}, "context_mask_BJ has dtype float32; expected bool"),
])  # fmt: skip
def test_a_wrong_mask_is_told_by_its_name(masks, message):
    with pytest.raises(ValueError, match=message):
        module()(inputs(), context(), **masks)


@pytest.mark.parametrize("shape", [(3, 7, 8), (2, 7, 16), (7, 16)])
def test_a_context_of_another_width_or_batch_is_refused_in_one_line(shape):
    with pytest.raises(ValueError) as caught:
        module()(inputs(), torch.zeros(shape, dtype=torch.float64))
    assert str(caught.value) == f"the context has shape {shape}; expected (3, J, 16), as the source is (3, 9, 16)"


def test_an_empty_context_gives_exactly_zero():
    assert not module()(inputs(), context()[:, :0]).count_nonzero()
    assert not module()(inputs(), context()[:, :0], context_mask_BJ=context_padding()[:, :0]).count_nonzero()


def test_has_four_projections_with_bias():
    assert sum(parameter.numel() for parameter in module().parameters()) == 4 * (16 * 16 + 16)


def test_cost_is_what_the_flop_counter_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module().float()(torch.zeros(1, 32, 16), torch.zeros(1, 20, 16))
    assert counter.get_total_flops() == 2 * CrossAttention.cost(
        validate_settings("mechanisms", "ca", {}), MixerShape(16, 2), 32, 20
    )
