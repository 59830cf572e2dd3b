"""Token counts, and the held-out tokens' cross-entropy under training frequencies."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stability.corpora.io.arrays import sha256_and_counts

_AT_ONCE = 1 << 24  # tokens counted at a time


def count_tokens(
    train: np.ndarray, val: np.ndarray, vocab_size: int
) -> tuple[dict[str, str], tuple[np.ndarray, np.ndarray]]:
    """Return both sides' sha256 sums and token counts.

    Args:
        train: training tokens.
        val: held-out tokens.
        vocab_size: vocabulary size.

    Raises:
        ValueError: a side is empty or has a token beyond the vocabulary.
    """
    sums, counts = {}, []
    for (name, side), tokens in zip(
        {"train_tokens": "training", "val_tokens": "held-out"}.items(), (train, val), strict=True
    ):
        assert tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32), (
            f"{side} tokens: 1-D uint16 or uint32, got {tokens.ndim}-D {tokens.dtype}"
        )
        if not tokens.size:
            raise ValueError(f"data: the {side} side holds no token")
        sums[name], occurrences = sha256_and_counts(tokens, vocab_size)
        if len(occurrences) > vocab_size:
            raise ValueError(f"data: token {len(occurrences) - 1} on the {side} side; the vocabulary has {vocab_size}")
        counts.append(occurrences)
    return sums, (counts[0], counts[1])


def cross_entropy(train_counts: np.ndarray, val_counts: np.ndarray) -> float:
    """Return nats per held-out token under training frequencies, each count raised by one."""
    log_probability = np.log(train_counts + 1) - math.log(train_counts.sum() + len(train_counts))
    return float(-(val_counts @ log_probability) / val_counts.sum())


def log_frequencies(tokens: np.ndarray, vocab_size: int) -> Tensor:
    """Return the tokens' log frequencies (V), float64, each count raised by one.

    Reads all tokens once.
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _AT_ONCE):
        counts += np.bincount(tokens[start : start + _AT_ONCE], minlength=vocab_size)
    return torch.from_numpy(np.log(counts / counts.sum()))
