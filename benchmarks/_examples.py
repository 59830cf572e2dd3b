"""Draw random data for every objective, in the form its corpora have."""

from __future__ import annotations

from typing import Any

import torch

from stability.corpora.images.corpus import ImageBatch
from stability.corpora.sentences.corpus import SentenceBatch
from stability.models.images import ImageFormat
from stability.registry import Registry

PALETTE_SEED = 0
KINDS = ("tokens", "images", "sentences")
EMBEDDING_WIDTH = 4


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
    kind = Registry("objectives").load(objective).corpus_kind
    if kind == "tokens":
        return vocabulary
    if kind == "sentences":
        return {"vocab_size": vocabulary, "sentences": 2, "scored": False}
    # Few different patches: among many, one would embed with nearly no variance, and a LayerNorm of such an embedding
    # would be all rounding. The contrast gives the others a variance of about 1, like tokens.
    return ImageFormat(2, 2 * positions, 3, vocabulary, (127.5,) * 3, (25.0,) * 3)._asdict()


def outputs_of(objective: Any) -> int:
    """Return the numbers of each output: logits, or an embedding for a model without a head."""
    return objective.num_outputs if objective.has_head else EMBEDDING_WIDTH


def drawn(objective: str, data_format: Any, tokens: int, num: int, generator: torch.Generator) -> Any:
    """Draw token sequences, images or rows of sentences, as `AbstractCorpus.batch` does.

    Args:
        objective: the objective's name.
        data_format: from `format_of`.
        tokens: tokens per sequence or sentence.
        num: sequences, images or rows to draw.
        generator: draws the data.
    """
    kind = Registry("objectives").load(objective).corpus_kind
    if kind == "tokens":
        return torch.randint(0, data_format, (num, tokens), generator=generator)
    if kind == "sentences":
        vocabulary, shape = data_format["vocab_size"], (num, data_format["sentences"], tokens)
        mask_BSN = torch.arange(tokens) < torch.randint(1, tokens + 1, (*shape[:2], 1), generator=generator)
        tokens_BSN = torch.randint(0, vocabulary, shape, generator=generator).masked_fill(~mask_BSN, vocabulary)
        return SentenceBatch(tokens_BSN, mask_BSN, torch.ones(num))
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
