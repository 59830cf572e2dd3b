"""Token arrays larger than memory: unnamed files, read through a memory map in chunks."""

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
    """Return uint16 if every token of the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class TokenFile:
    """Tokens on disk in an unnamed file, removed with this object or its process.

    ``folder`` is the file's folder; None: the system's temporary folder.

    Raises:
        OSError: from the disk.
    """

    def __init__(self, dtype: type[np.generic], folder: Path | None):
        self.dtype = np.dtype(dtype)
        # no `with`: open as long as this object lives
        self._stream = tempfile.TemporaryFile(dir=folder, buffering=BYTES_PER_WRITE)  # noqa: SIM115
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def append(self, tokens: np.ndarray) -> None:
        """Add 1-D tokens at the end."""
        self._stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._num_tokens += len(tokens)

    def array(self) -> np.ndarray:
        """Return all tokens so far, mapped read-only; the map keeps the file open."""
        self._stream.flush()
        if not self._num_tokens:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(self._stream, dtype=self.dtype, mode="r", shape=(self._num_tokens,))


def chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array in chunks of 4 M tokens.

    At most one chunk of a mapped array is in memory.
    """
    for start in range(0, len(tokens), TOKENS_PER_CHUNK):
        yield np.asarray(tokens[start : start + TOKENS_PER_CHUNK])
        forget(tokens)


def forget(tokens: np.ndarray) -> None:
    """Free the memory pages of a mapped array; later reads load them again."""
    # read pages count as this process's memory until then
    if isinstance(tokens.base, mmap.mmap) and hasattr(tokens.base, "madvise"):
        tokens.base.madvise(mmap.MADV_DONTNEED)


def sha256(array: np.ndarray) -> str:
    """Return the sha256 of the elements, little-endian."""
    digest = hashlib.sha256()
    for chunk in chunks(array):
        digest.update(_little_endian(chunk))
    return digest.hexdigest()


def sha256_and_counts(tokens: np.ndarray, vocab_size: int) -> tuple[str, np.ndarray]:
    """Return the sha256 and the count of each token, in one pass.

    The counts are int64, and longer than ``vocab_size`` if a token exceeds the vocabulary.
    """
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
