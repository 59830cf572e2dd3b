"""Token arrays larger than memory: written to unnamed files, read through a map in pieces that are let go at once."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TOKENS_PER_CHUNK = 1 << 22
BYTES_PER_WRITE = 1 << 20


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return uint16 where every token of the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class TokenFile:
    """Tokens on disk in a file without a name: it is gone with this object, or with the process that is killed.

    ``folder``: where; None: the system's temporary folder. Errors: ``OSError`` from the disk.
    """

    def __init__(self, dtype: type[np.generic], folder: Path | None):
        self.dtype = np.dtype(dtype)
        # lives as long as this object
        self._stream = tempfile.TemporaryFile(dir=folder, buffering=BYTES_PER_WRITE)  # noqa: SIM115
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, tokens: np.ndarray) -> None:
        """Add 1-D tokens at the end."""
        self._stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._num_tokens += len(tokens)

    def array(self) -> np.ndarray:
        """Return all tokens so far, mapped read-only; the map keeps the file."""
        self._stream.flush()
        if not self._num_tokens:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self._stream, dtype=self.dtype, mode="r", shape=(self._num_tokens,))


def chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array in pieces of 4 M tokens; of a mapped one, never more than a piece stands in memory."""
    for start in range(0, len(tokens), TOKENS_PER_CHUNK):
        yield np.asarray(tokens[start : start + TOKENS_PER_CHUNK])
        forget(tokens)


def forget(tokens: np.ndarray) -> None:
    """Let go of the pages that reading a mapped array brought in: they count as this process's memory until then. They
    are read again when needed."""
    if isinstance(tokens.base, mmap.mmap) and hasattr(tokens.base, "madvise"):
        tokens.base.madvise(mmap.MADV_DONTNEED)


def sha256(array: np.ndarray) -> str:
    """Return the sha256 of the elements, little-endian."""
    digest = hashlib.sha256()
    for chunk in chunks(array):
        digest.update(_little_endian(chunk))
    return digest.hexdigest()


def sha256_and_counts(tokens: np.ndarray, vocab_size: int) -> tuple[str, np.ndarray]:
    """Return in one pass the sha256 of tokens and how often each occurs (int64, longer than ``vocab_size`` where a
    token reaches it)."""
    digest, counts = hashlib.sha256(), np.zeros(vocab_size, dtype=np.int64)
    for chunk in chunks(tokens):
        digest.update(_little_endian(chunk))
        counts = sum_of_counts(counts, np.bincount(chunk, minlength=vocab_size))
    return digest.hexdigest(), counts


def sum_of_counts(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the sum of two count arrays, as long as the longer one."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total


def _little_endian(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data
