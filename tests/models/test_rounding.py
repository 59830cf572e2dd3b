"""Matrices in few bits: against slow loops over Python floats, against torchao, and half a step at most from the weight."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stability.build import build_model
from stability.models.rounding import find_matrices, find_routers, round_matrix
from tests.conftest import Lab

BITS = (8, 6, 4, 3, 2)


def weights(rows: int = 7, columns: int = 150) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 1, rows)[:, None]


def loop(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """The same rounding entry by entry in float64: Python's `round` takes halves to even."""
    most, found = 2 ** (bits - 1) - 1, np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            part = weight[row, start : start + group]
            step = max(abs(value) for value in part) / most
            for place, value in enumerate(part):
                found[row, start + place] = 0.0 if step == 0 else max(-most, min(most, round(value / step))) * step
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [None, 64, 150, 1])
def test_rounding_is_that_of_a_slow_loop(bits, group):
    weight = weights()
    found = round_matrix(weight, bits, group)
    expected = loop(weight.double().numpy(), bits, group or 150)
    # a scale and a product in float32: two roundings
    torch.testing.assert_close(found.restore().double(), torch.from_numpy(expected), rtol=4 * 2.0**-24, atol=0)
    assert found.scales_OG.shape == (7, math.ceil(150 / (group or 150)))
    assert int(found.codes_OI.abs().max()) == 2 ** (bits - 1) - 1  # each group's largest weight


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [None, 64])
def test_no_weight_moves_by_more_than_half_a_step(bits, group):
    weight = weights()
    found = round_matrix(weight, bits, group)
    steps = found.scales_OG.repeat_interleave(found.group, 1)[:, :150]
    assert bool(((found.restore() - weight).abs() <= steps * (0.5 + 1e-5)).all())
    moved = ((found.restore() - weight).abs() / steps).max()
    assert float(moved) > 0.4  # some weight lies near the middle: the bound is used


def test_a_row_of_zeros_stays_and_halves_go_to_even():
    weight = torch.tensor([[0.0, 0.0, 0.0], [127.0, 2.5, 3.5]])
    assert round_matrix(weight, 8).restore().tolist() == [[0.0, 0.0, 0.0], [127.0, 2.0, 4.0]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [None, 64])
def test_torchao_rounds_the_same_way(bits, group):
    """Its primitives over the same codes; its ready-made `Int8WeightOnlyConfig` takes −128 … 127 and max |w| / 127.5."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives", reason="torchao is not installed")
    weight, most = weights(64, 256), 2 ** (bits - 1) - 1
    block, codes = (1, group or 256), {"quant_min": -most, "quant_max": most}
    scale, zero = primitives.choose_qparams_affine(
        weight, primitives.MappingType.SYMMETRIC, block, torch.int8, **codes, eps=1e-12, scale_dtype=torch.float32
    )
    theirs = primitives.quantize_affine(weight, block, scale, zero, torch.int8, **codes)
    ours = round_matrix(weight, bits, group)
    torch.testing.assert_close(ours.scales_OG, scale.reshape(64, -1), rtol=2.0**-22, atol=0)
    apart = (theirs.int() - ours.codes_OI.int()).abs()
    # it multiplies by 1 / s, we divide by s: a weight within rounding of a half may go the other way
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 1e-3


def test_matrices_are_those_of_mixers_and_feed_forward_networks(lab: Lab):
    def names(**changes) -> set[str]:
        return set(find_matrices(build_model(lab.spec(**changes), 256)))

    of_block = {"mixer.qkv", "mixer.out", "ffn.hidden", "ffn.out"}
    assert names() == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in of_block}  # not the head
    experts = names(ffn={"name": "moe", "experts": 2, "top_k": 1, "normalise": False})
    of_expert = {f"ffn.experts.{index}.{name}" for index in (0, 1) for name in ("gate", "hidden", "out")}
    assert experts == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in {"mixer.qkv", "mixer.out", *of_expert}}
    routers = find_routers(build_model(lab.spec(ffn="moe"), 256))
    assert set(routers) == {f"blocks.{layer}.ffn.router" for layer in (0, 1)}
