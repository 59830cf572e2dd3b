"""Patches against a loop and against a strided convolution, pooling against a loop, and which numbers of patches there
are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stability.models.embedding import mean_over_positions
from stability.models.images import ImageFormat, PatchEmbedding


def image_format(height=8, width=12, channels=3):
    return ImageFormat(height, width, channels, 5, (100.0,) * channels, (50.0,) * channels)


def embedding(positions=6, **sizes):
    torch.manual_seed(0)
    return PatchEmbedding(image_format(**sizes), 10, positions).double()


def images(batch=3, height=8, width=12, channels=3):
    return torch.randn(batch, height, width, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("positions", "side"), [(6, 4), (24, 2), (96, 1)])
def test_every_patch_is_embedded_where_it_stands(positions, side):
    layer, x = embedding(positions), images()
    found = layer(x)
    assert found.shape == (3, positions, 10)
    for row in range(8 // side):
        for column in range(12 // side):
            position = row * (12 // side) + column
            patch = [
                x[1, row * side + i, column * side + j, c] for i in range(side) for j in range(side) for c in range(3)
            ]
            expected = layer.patches.weight @ torch.stack(patch) + layer.patches.bias + layer.positions_ND[position]
            assert torch.allclose(found[1, position], expected, rtol=0, atol=1e-12)


def test_patches_are_a_convolution_with_the_stride_of_its_kernel():
    layer, x = embedding(6), images()
    kernel = layer.patches.weight.unflatten(1, (4, 4, 3)).permute(0, 3, 1, 2)
    expected = (
        nn.functional.conv2d(x.permute(0, 3, 1, 2), kernel, layer.patches.bias, stride=4).flatten(2).mT
        + layer.positions_ND
    )
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_positions_start_small_and_are_learned():
    layer = PatchEmbedding(image_format(32, 32), 64, 64)
    assert layer.positions_ND.std().item() == pytest.approx(0.02, rel=0.1)
    layer(torch.zeros(1, 32, 32, 3)).sum().backward()
    assert torch.equal(layer.positions_ND.grad, torch.ones(64, 64))


def test_a_number_of_positions_that_are_no_patches_is_told_those_that_are():
    with pytest.raises(ValueError) as caught:
        image_format(32, 32).patch_side(50)
    assert str(caught.value) == (
        "model.positions=50: a position is a square patch, and images of 32×32 have as many as "
        "4 (16×16 pixels), 16 (8×8 pixels), 64 (4×4 pixels), 256 (2×2 pixels), 1024 (1×1 pixels)"
    )
    assert image_format(32, 32).patch_side(64) == 4 and image_format(1, 7).patch_side(7) == 1


def test_format_survives_json():
    import json

    image = image_format()
    assert ImageFormat.of(json.loads(json.dumps(image._asdict()))) == image


def test_the_head_reads_the_mean_of_the_valid_positions_whatever_the_others_hold():
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    assert torch.allclose(mean_over_positions(x, None)[:, 0], sum(x[:, n] for n in range(5)) / 5)
    mask = torch.tensor([[True, True, False, False, True], [False, True, False, False, False]])
    poisoned = x.where(mask[..., None], float("nan"))
    found = mean_over_positions(poisoned, mask)
    assert torch.allclose(found[0, 0], (x[0, 0] + x[0, 1] + x[0, 4]) / 3) and torch.allclose(found[1, 0], x[1, 1])
