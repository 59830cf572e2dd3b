"""DeltaNet against its recurrence written out and against the released slow reference."""

from __future__ import annotations

from tests.mechanisms.delta_loops import module


def test_without_gates_it_has_as_many_weights_as_attention_but_for_strengths_and_convolution():
    layer = module("deltanet")
    counts = {key: value.numel() for key, value in layer.named_parameters()}
    assert counts == {
        "qkv.weight": 3 * 16 * 16,
        "conv.weight": 4 * 48,
        "beta.weight": 2 * 16,
        "norm.weight": 8,
        "out.weight": 16 * 16,
        "out.bias": 16,
    }
