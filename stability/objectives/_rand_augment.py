"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719).

N operations per image, each drawn uniformly from a list, all of one magnitude M of 30.

The list and its magnitudes are those of github.com/kentaroy47/vision-transformers-cifar10 (randomaug.py, taken from
EfficientNet's autoaugment.py in github.com/tensorflow/tpu): its ViT-small is trained with N = 2 and M = 14. They were
made for larger images: translations by M/30 of 100 pixels leave nothing of a 32×32 image, and Posterize and Solarize
change less at larger M. The operations equal Pillow's (ImageOps, ImageEnhance, Image.transform with the nearest pixel
and black background), computed for many images at a time, in integers wherever Pillow does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

HIGHEST = 30.0  # of magnitudes
GREY = (125, 123, 114)  # fill of cut_out
RED, GREEN, BLUE = 19595, 38470, 7471  # luminance over 2¹⁶ (ITU-R 601-2)
FIXED = 1 << 16  # Pillow's fixed-point units per pixel


class Drawn(NamedTuple):
    """Random direction and place of an operation for each of B images.

    The place is a share of the image.
    """

    signs_B: Tensor  # float64, −1 or 1
    corner_B2: Tensor  # float64 in [0, 1): columns, rows


Operation = Callable[[Tensor, float, Drawn], Tensor]


def rand_augment(images_BHWC: Tensor, num: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """Return the images after ``num`` random operations each.

    The number of draws does not depend on their values.

    Args:
        images_BHWC: uint8, three channels.
        num: operations per image.
        magnitude: 0 … 30.
        generator: source of randomness.
    """
    images_BHWC = images_BHWC.clone()
    for _ in range(num):
        chosen_B = torch.randint(len(OPERATIONS), (len(images_BHWC),), generator=generator)
        signs_B = torch.randint(2, (len(images_BHWC),), generator=generator).double() * 2 - 1
        corner_B2 = torch.rand(len(images_BHWC), 2, generator=generator, dtype=torch.float64)
        for number, (operation, lowest, highest) in enumerate(OPERATIONS):
            rows = (chosen_B == number).nonzero().squeeze(-1)
            if len(rows):
                drawn = Drawn(signs_B[rows], corner_B2[rows])
                value = magnitude / HIGHEST * (highest - lowest) + lowest
                images_BHWC[rows] = operation(images_BHWC[rows], value, drawn)
    return images_BHWC


def auto_contrast(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images with each channel stretched to all levels.

    A channel of a single level stays.

    Args:
        images_BHWC: uint8.
        value: unused.
        drawn: unused.
    """
    pixels = images_BHWC.double()
    low, high = pixels.amin((1, 2), keepdim=True), pixels.amax((1, 2), keepdim=True)
    span = (high - low).clamp_min(1)
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would multiply by a reciprocal: other last bits
    return torch.where(high > low, _levels(pixels * scale - low * scale), images_BHWC)


def equalize(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images with each channel's levels equally frequent.

    A channel of a single level stays.

    Args:
        images_BHWC: uint8.
        value: unused.
        drawn: unused.
    """
    rows_RP = images_BHWC.permute(0, 3, 1, 2).flatten(2).flatten(0, 1).long()
    counts_RV = torch.zeros(len(rows_RP), 256, dtype=torch.int64).scatter_add_(1, rows_RP, torch.ones_like(rows_RP))
    last_R1 = rows_RP.amax(1, keepdim=True)
    step_R1 = (rows_RP.shape[1] - counts_RV.gather(1, last_R1)) // 255
    before_RV = counts_RV.cumsum(1) - counts_RV
    table_RV = (step_R1 // 2 + before_RV) // step_R1.clamp_min(1)
    table_RV = torch.where(step_R1 > 0, table_RV, torch.arange(256))
    flat = table_RV.gather(1, rows_RP).clamp(0, 255).to(torch.uint8)
    batch, height, width, channels = images_BHWC.shape
    return flat.reshape(batch, channels, height, width).permute(0, 2, 3, 1)


def invert(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the negatives of the images.

    Args:
        images_BHWC: uint8.
        value: unused.
        drawn: unused.
    """
    return 255 - images_BHWC


def rotate(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images rotated about their centre.

    Args:
        images_BHWC: uint8.
        value: angle in degrees.
        drawn: its sign.
    """
    angle_B = -torch.deg2rad(value * drawn.signs_B)
    cos_B, sin_B = angle_B.cos(), angle_B.sin()
    x, y = images_BHWC.shape[2] / 2, images_BHWC.shape[1] / 2
    across = cos_B, sin_B, x - cos_B * x - sin_B * y
    down = -sin_B, cos_B, y + sin_B * x - cos_B * y
    return _transform(images_BHWC, across, down)


def posterize(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Keep the first bits of each level.

    Args:
        images_BHWC: uint8.
        value: number of bits, at least 1.
        drawn: unused.
    """
    bits = max(1, int(value))
    return images_BHWC & (255 - (2 ** (8 - bits) - 1))


def solarize(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images with high levels inverted.

    Args:
        images_BHWC: uint8.
        value: lowest level to invert.
        drawn: unused.
    """
    return torch.where(images_BHWC < value, images_BHWC, 255 - images_BHWC)


def solarize_add(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Add to every level, then invert those from 128 on.

    Args:
        images_BHWC: uint8.
        value: amount to add.
        drawn: unused.
    """
    return solarize(_levels(images_BHWC.double() + value), 128, drawn)


def color(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Mix the grey image with the image.

    Args:
        images_BHWC: uint8.
        value: 0: grey; 1: the image.
        drawn: unused.
    """
    return _blend(_grey(images_BHWC)[..., None].expand_as(images_BHWC), images_BHWC, value)


def contrast(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Mix the image's mean grey with the image.

    Args:
        images_BHWC: uint8.
        value: 0: mean grey; 1: the image.
        drawn: unused.
    """
    means_B = (_grey(images_BHWC).double().mean((1, 2)) + 0.5).floor()
    return _blend(means_B[:, None, None, None].expand(images_BHWC.shape), images_BHWC, value)


def brightness(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Mix black with the image.

    Args:
        images_BHWC: uint8.
        value: 0: black; 1: the image.
        drawn: unused.
    """
    return _blend(torch.zeros_like(images_BHWC), images_BHWC, value)


def sharpness(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Mix the smoothed image with the image.

    The smoothing kernel has weight 5 at the pixel and 1 at its eight neighbours; border pixels stay.

    Args:
        images_BHWC: uint8.
        value: 0: smoothed; 1: the image.
        drawn: unused.
    """
    wide, smooth = images_BHWC.long(), images_BHWC.clone()
    height, width = images_BHWC.shape[1:3]
    total = 4 * wide[:, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + wide[:, row : height - 2 + row, column : width - 2 + column]
    smooth[:, 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)
    return _blend(smooth, images_BHWC, value)


def shear_x(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images sheared along x.

    Args:
        images_BHWC: uint8.
        value: slope.
        drawn: its sign.
    """
    one_B, none_B = torch.ones_like(drawn.signs_B), torch.zeros_like(drawn.signs_B)
    return _transform(images_BHWC, (one_B, value * drawn.signs_B, none_B), (none_B, one_B, none_B))


def shear_y(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images sheared along y.

    Args:
        images_BHWC: uint8.
        value: slope.
        drawn: its sign.
    """
    one_B, none_B = torch.ones_like(drawn.signs_B), torch.zeros_like(drawn.signs_B)
    return _transform(images_BHWC, (one_B, none_B, none_B), (value * drawn.signs_B, one_B, none_B))


def translate_x(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images shifted along x.

    Args:
        images_BHWC: uint8.
        value: pixels.
        drawn: sign.
    """
    one_B, none_B = torch.ones_like(drawn.signs_B), torch.zeros_like(drawn.signs_B)
    return _transform(images_BHWC, (one_B, none_B, value * drawn.signs_B), (none_B, one_B, none_B))


def translate_y(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Return the images shifted along y.

    Args:
        images_BHWC: uint8.
        value: pixels.
        drawn: sign.
    """
    one_B, none_B = torch.ones_like(drawn.signs_B), torch.zeros_like(drawn.signs_B)
    return _transform(images_BHWC, (one_B, none_B, none_B), (none_B, one_B, value * drawn.signs_B))


def cut_out(images_BHWC: Tensor, value: float, drawn: Drawn) -> Tensor:
    """Fill a square with grey.

    It starts ``value``/2 before a drawn point, or at the border, and ends ``value`` pixels later, both ends included.

    Args:
        images_BHWC: uint8.
        value: side in pixels.
        drawn: the point.
    """
    height, width = images_BHWC.shape[1:3]
    inside = []
    for size, share_B in ((height, drawn.corner_B2[:, 1]), (width, drawn.corner_B2[:, 0])):
        first_B = (1 + (size - 1) * share_B - value / 2).clamp_min(0).floor()
        last_B = (first_B + value).clamp_max(size).floor()
        place = torch.arange(size)
        inside.append((place >= first_B[:, None]) & (place <= last_B[:, None]))
    square_BHW1 = (inside[0][:, :, None] & inside[1][:, None, :])[..., None]
    return torch.where(square_BHW1, torch.tensor(GREY, dtype=torch.uint8), images_BHWC)


# (operation, its value at magnitude 0, at magnitude 30)
OPERATIONS: tuple[tuple[Operation, float, float], ...] = (
    (auto_contrast, 0, 1),
    (equalize, 0, 1),
    (invert, 0, 1),
    (rotate, 0, 30),
    (posterize, 0, 4),
    (solarize, 0, 256),
    (solarize_add, 0, 110),
    (color, 0.1, 1.9),
    (contrast, 0.1, 1.9),
    (brightness, 0.1, 1.9),
    (sharpness, 0.1, 1.9),
    (shear_x, 0, 0.3),
    (shear_y, 0, 0.3),
    (cut_out, 0, 40),
    (translate_x, 0, 100),
    (translate_y, 0, 100),
)


def _levels(values: Tensor) -> Tensor:
    """Return values truncated to integers and clamped to 0 … 255."""
    return values.trunc().clamp(0, 255).to(torch.uint8)


def _grey(images_BHWC: Tensor) -> Tensor:
    """Return the luminance of each pixel, rounded (B, H, W)."""
    red, green, blue = images_BHWC.long().unbind(-1)
    return (red * RED + green * GREEN + blue * BLUE + FIXED // 2) // FIXED


def _blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Return first + share · (second − first) as levels, in float32 as Pillow; share may leave [0, 1]."""
    start = first.float()
    return _levels(start + torch.tensor(share, dtype=torch.float32) * (second.float() - start))


def _transform(
    images_BHWC: Tensor, across: tuple[Tensor, Tensor, Tensor], down: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the images under an affine map of coordinates; black outside, nearest pixel.

    Pixel (x, y) is taken from (a·x + b·y + c, d·x + e·y + f). ``across`` is a, b, c of each image, ``down`` is d, e, f,
    float64.
    """
    batch, height, width, _ = images_BHWC.shape
    columns, rows = torch.arange(width), torch.arange(height)[:, None]

    def place(slope_x_B: Tensor, slope_y_B: Tensor, start_B: Tensor) -> Tensor:
        middle_B = start_B + slope_x_B * 0.5 + slope_y_B * 0.5
        numbers = (slope_x_B, slope_y_B, middle_B)
        x, y, start = ((each * FIXED + 0.5).floor().long()[:, None, None] for each in numbers)
        return torch.div(start + y * rows + x * columns, FIXED, rounding_mode="floor")

    x_BHW, y_BHW = place(*across), place(*down)
    inside_BHW = (x_BHW >= 0) & (x_BHW < width) & (y_BHW >= 0) & (y_BHW < height)
    found = images_BHWC[torch.arange(batch)[:, None, None], y_BHW.clamp(0, height - 1), x_BHW.clamp(0, width - 1)]
    return torch.where(inside_BHW[..., None], found, 0).to(torch.uint8)
