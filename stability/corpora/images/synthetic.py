"""Synthetic images, the default of `data=images`, equal on every machine by integer arithmetic.

4,000 training and 500 held-out images of 32×32 pixels in three channels, drawn from a counter (SplitMix64), cycling
through ten classes. An image is a triangle-wave grating. Its class is one of five directions and one of two periods (6
and 12 pixels). Phase, strength and colour are random, as is noise of up to 64 of 256 levels at every pixel, stronger
than the grating. Results show how a model separates textures, and nothing about photographs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stability.corpora.tokens.synthetic_genome import Draws

SEED = 0
NUM_TRAIN, NUM_VAL, SIDE = 4000, 500, 32
DIRECTIONS, PERIODS = ((1, 0), (0, 1), (1, 1), (1, -1), (2, 1)), (6, 12)
NOISE, STRONGEST = 64, 8
DESCRIPTION = (
    "synthetic images (no data.path given; noisy gratings of five directions and two periods; nobody's photographs)"
)
CLASS_NAMES = tuple(f"direction {x},{y} period {period}" for x, y in DIRECTIONS for period in PERIODS)


def images(num: int, seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (uint8 pixels, class) of ``num`` images."""
    draws = Draws(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for index in range(num):
        label = index % len(CLASS_NAMES)
        (x, y), period = DIRECTIONS[label // len(PERIODS)], PERIODS[label % len(PERIODS)]
        strength, phase = 3 + draws.draw_one(STRONGEST - 2), draws.draw_one(period)
        # either sign, so light and dark are exchanged in some images
        color_C = draws.draw_below(9, 3).astype(np.int64) - 4
        place = (x * columns + y * rows + phase) % period
        wave = np.abs(12 * place - 6 * period) // period - 3  # from 3 down to −3 and back
        noise = draws.draw_below(2 * NOISE + 1, SIDE * SIDE * 3).astype(np.int64).reshape(SIDE, SIDE, 3) - NOISE
        yield np.clip(128 + strength * wave[..., None] * color_C // 2 + noise, 0, 255).astype(np.uint8), label
