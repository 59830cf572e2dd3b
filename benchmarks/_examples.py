"""Draw random data for every objective, in the form its corpora have."""

from __future__ import annotations

from typing import Any

import torch

from stability.corpora.images.corpus import ImageBatch
from stability.models.images import ImageFormat
from stability.registry import Registry

PALETTE_SEED = 0
KINDS = ("tokens", "images")


def objectives(direction: str | None = None) -> list[str]:
    """Return the objectives with random data here; proteins' tracks are drawn by that objective's tests."""
    registry = Registry("objectives")
    return [
        name
        for name in (registry.names(direction=direction) if direction else registry.names())
        if registry.load(name).corpus_kind in KINDS
    ]


def format_of(objective: str, vocabulary: int, positions: int) -> Any:
    """Return `AbstractCorpus.format` for an objective's random data.

    Args:
        objective: the objective's name.
        vocabulary: token count, or count of different patches.
        positions: patches in a row, each 2×2 pixels in three colours.
    """
    if Registry("objectives").load(objective).corpus_kind == "tokens":
        return vocabulary
    # Few different patches: among many, one would embed with nearly no variance, and a LayerNorm of such an embedding
    # would be all rounding. The contrast gives the others a variance of about 1, like tokens.
    return ImageFormat(2, 2 * positions, 3, vocabulary, (127.5,) * 3, (25.0,) * 3)._asdict()


def drawn(objective: str, data_format: Any, tokens: int, num: int, generator: torch.Generator) -> Any:
    """Draw token sequences or images, as `AbstractCorpus.batch` does.

    Args:
        objective: the objective's name.
        data_format: from `format_of`.
        tokens: tokens per sequence.
        num: sequences or images to draw.
        generator: draws the data.
    """
    if Registry("objectives").load(objective).corpus_kind == "tokens":
        return torch.randint(0, data_format, (num, tokens), generator=generator)
    image = ImageFormat.of(data_format)
    palette = torch.randint(
        0,
        256,
        (image.classes, 2, 2, image.channels),
        generator=torch.Generator().manual_seed(PALETTE_SEED),
        dtype=torch.uint8,
    )
    patches = palette[torch.randint(0, image.classes, (num, image.width // 2), generator=generator)]
    return ImageBatch(
        patches.transpose(1, 2).flatten(2, 3), torch.randint(0, image.classes, (num,), generator=generator)
    )
