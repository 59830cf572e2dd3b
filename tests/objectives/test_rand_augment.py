"""RandAugment against Pillow, image by image: it computes none of what is tested."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from stability.objectives import _rand_augment as ours
from stability.objectives._rand_augment import OPERATIONS, Drawn, rand_augment

Image = pytest.importorskip("PIL.Image")
from PIL import ImageDraw, ImageEnhance, ImageOps  # noqa: E402


def affine(image, *matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def added(image, value):
    levels = np.clip(np.array(image).astype(int) + value, 0, 255).astype(np.uint8)
    return ImageOps.solarize(Image.fromarray(levels), 128)


def cut(image, value, corner):
    (width, height), image = image.size, image.copy()
    x, y = (
        int(max(0, size + (1 - size) * (1 - share) - value / 2))
        for size, share in zip((width, height), corner, strict=True)
    )
    box = (x, y, min(width, x + value), min(height, y + value))
    ImageDraw.Draw(image).rectangle(box, (125, 123, 114))
    return image


# by Pillow: of an image, a value with its sign, and a corner
PILLOW = {
    "auto_contrast": lambda image, v, c: ImageOps.autocontrast(image),
    "equalize": lambda image, v, c: ImageOps.equalize(image),
    "invert": lambda image, v, c: ImageOps.invert(image),
    "rotate": lambda image, v, c: image.rotate(v),
    "posterize": lambda image, v, c: ImageOps.posterize(image, max(1, int(abs(v)))),
    "solarize": lambda image, v, c: ImageOps.solarize(image, abs(v)),
    "solarize_add": lambda image, v, c: added(image, abs(v)),
    "color": lambda image, v, c: ImageEnhance.Color(image).enhance(abs(v)),
    "contrast": lambda image, v, c: ImageEnhance.Contrast(image).enhance(abs(v)),
    "brightness": lambda image, v, c: ImageEnhance.Brightness(image).enhance(abs(v)),
    "sharpness": lambda image, v, c: ImageEnhance.Sharpness(image).enhance(abs(v)),
    "shear_x": lambda image, v, c: affine(image, 1, v, 0, 0, 1, 0),
    "shear_y": lambda image, v, c: affine(image, 1, 0, 0, v, 1, 0),
    "cut_out": lambda image, v, c: cut(image, abs(v), c),
    "translate_x": lambda image, v, c: affine(image, 1, 0, v, 0, 1, 0),
    "translate_y": lambda image, v, c: affine(image, 1, 0, 0, 0, 1, v),
}


def pictures(height: int, width: int) -> torch.Tensor:
    """Noise, smooth ones of few levels, and one of a single colour."""
    draws = np.random.default_rng(0)
    noise = draws.integers(0, 256, (4, height, width, 3))
    rows, columns = np.mgrid[:height, :width]
    smooth = [np.stack([40 + 2 * rows, 90 + columns, 200 - rows - columns], -1) for _ in range(2)]
    return torch.from_numpy(np.stack([*noise, *smooth, np.full((height, width, 3), 77)]).astype(np.uint8))


@pytest.mark.parametrize("magnitude", [0.0, 2.0, 14.0, 30.0])
@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=[each.__name__ for each, _, _ in OPERATIONS])
def test_an_operation_changes_every_pixel_as_pillow_does(number, magnitude):
    operation, lowest, highest = OPERATIONS[number]
    value = magnitude / 30 * (highest - lowest) + lowest
    for images_BHWC in (pictures(32, 32), pictures(9, 14)):
        draws = np.random.default_rng(number)
        signs, corners = draws.choice([-1.0, 1.0], len(images_BHWC)), draws.random((len(images_BHWC), 2))
        drawn = Drawn(torch.from_numpy(signs), torch.from_numpy(corners))
        found = operation(images_BHWC, value, drawn)
        for image, sign, corner, got in zip(images_BHWC.numpy(), signs, corners, found.numpy(), strict=True):
            expected = np.array(PILLOW[operation.__name__](Image.fromarray(image), sign * value, corner))
            assert got.dtype == np.uint8 and (got == expected).all(), np.abs(got.astype(int) - expected).max()


def test_the_sixteen_operations_and_their_ranges_are_those_of_the_repository():
    assert {each.__name__: (low, high) for each, low, high in OPERATIONS} == {
        "auto_contrast": (0, 1), "equalize": (0, 1), "invert": (0, 1), "rotate": (0, 30), "posterize": (0, 4),
        "solarize": (0, 256), "solarize_add": (0, 110), "color": (0.1, 1.9), "contrast": (0.1, 1.9),
        "brightness": (0.1, 1.9), "sharpness": (0.1, 1.9), "shear_x": (0, 0.3), "shear_y": (0, 0.3),
        "cut_out": (0, 40), "translate_x": (0, 100), "translate_y": (0, 100),
    }  # fmt: skip


def test_every_operation_is_drawn_equally_often_both_ways_and_all_over_the_image(monkeypatch):
    seen, signs, corners = Counter(), [], []

    def recording(name):
        def record(images, value, drawn):
            seen[name] += len(images)
            signs.append(drawn.signs_B)
            corners.append(drawn.corner_B2)
            return images

        return record

    listed = tuple((recording(each.__name__), low, high) for each, low, high in OPERATIONS)
    monkeypatch.setattr(ours, "OPERATIONS", listed)
    num = 32000
    rand_augment(torch.zeros(num, 1, 1, 3, dtype=torch.uint8), 2, 14, torch.Generator().manual_seed(0))
    mean = 2 * num / 16
    assert len(seen) == 16 and max(abs(count - mean) for count in seen.values()) < 5 * mean**0.5
    assert abs(float(torch.cat(signs).mean())) < 0.02
    assert torch.allclose(torch.cat(corners).mean(0), torch.tensor(0.5).double(), atol=0.01)


def test_the_same_generator_gives_the_same_images_and_leaves_the_given_ones_alone():
    images = pictures(32, 32)
    before = images.clone()
    first, second = (rand_augment(images, 2, 14, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.equal(second) and images.equal(before) and not first.equal(images)
    assert not first.equal(rand_augment(images, 2, 14, torch.Generator().manual_seed(6)))
