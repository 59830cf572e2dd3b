"""Attention logits and entropy against softmax rows written out in loops."""

import math

import pytest
import torch
from torch import nn

from stability.mechanisms import build
from stability.models.position import rope
from stability.probes.layers.attention import attention_statistics


def by_loops(layer, x, mask, sees):
    """(largest logit, entropies by head) over valid queries."""
    qkv = layer.qkv(x)
    largest, sums, rows = -math.inf, [0.0] * layer.heads, 0
    width = x.shape[-1] // layer.heads
    for b in range(len(x)):
        for i in range(x.shape[1]):
            rows += int(mask[b, i])
            for h in range(layer.heads):
                if not mask[b, i]:
                    continue
                q = rope(qkv[b, :, h * width : (h + 1) * width])[i]
                k = rope(qkv[b, :, x.shape[-1] + h * width : x.shape[-1] + (h + 1) * width])
                logits = torch.stack(
                    [q @ k[j] / math.sqrt(width) for j in range(x.shape[1]) if sees(i, j) and mask[b, j]]
                )
                p = logits.softmax(0)
                largest = max(largest, float(logits.max()))
                sums[h] -= float((p * p.log()).sum())
    return largest, [total / rows for total in sums]


@pytest.mark.parametrize(("name", "direction", "sees"), [
    ("sa", "bidirectional", lambda i, j: True),
    ("sa", "causal", lambda i, j: j <= i),
    ("sw", "bidirectional", lambda i, j: abs(i - j) <= 2),
    ("sw", "causal", lambda i, j: i - 2 <= j <= i),
])  # fmt: skip
def test_statistics_are_those_of_the_rows_written_out(name, direction, sees):
    torch.manual_seed(0)
    layer = build(name, width=8, heads=2, direction=direction).double()
    x, mask = 3 * torch.randn(2, 7, 8, dtype=torch.float64), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    found = attention_statistics(nn.ModuleList([layer]), lambda: layer(x, mask_BN=mask))
    with torch.no_grad():
        largest, entropies = by_loops(layer, x, mask, sees)
    assert list(found) == ["0"]
    assert found["0"].logit_max == pytest.approx(largest, rel=1e-9)
    assert found["0"].entropy == pytest.approx(sum(entropies) / 2, rel=1e-9)
    assert found["0"].lowest_head_entropy == pytest.approx(min(entropies), rel=1e-9)


def test_equal_logits_have_the_entropy_of_the_uniform_distribution():
    layer = build("sa", width=8, heads=2)
    nn.init.zeros_(layer.qkv.weight)
    nn.init.zeros_(layer.qkv.bias)
    found = attention_statistics(nn.ModuleDict({"mixer": layer}), lambda: layer(torch.randn(1, 5, 8)))
    assert found["mixer"].entropy == pytest.approx(math.log(5), rel=1e-6)
    assert found["mixer"].logit_max == 0


def test_hooks_are_gone_afterwards_and_other_mechanisms_are_left_out():
    attention, consensus = build("sa", width=8, heads=2), build("sc", width=8, heads=2)
    both = nn.ModuleList([attention, consensus])
    assert list(attention_statistics(both, lambda: [module(torch.randn(1, 5, 8)) for module in both])) == ["0"]
    assert not attention.qkv._forward_hooks
    assert not attention._forward_pre_hooks
    with pytest.raises(ZeroDivisionError):
        attention_statistics(both, lambda: 1 / 0)
    assert not attention.qkv._forward_hooks
