"""Read and write a corpus's folder: arrays, vocabulary and description, with sha256 sums.

A folder is written under a temporary name and renamed as a whole.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stability.runs.directory import fsync
from stability.runs.leftovers import name_temporary, remove_abandoned

META = "corpus.json"


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of ``folder`` to write into.

    The neighbour is removed afterwards, as are those of killed processes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    partial = name_temporary(folder.parent / f"partial-{secrets.token_hex(8)}")
    partial.mkdir()
    try:
        yield partial
        fsync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_array(file: Path, array: np.ndarray) -> None:
    """Write a 1-D array as ``.npy`` in chunks."""
    with _open_synced(file) as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        for chunk in chunks(array):
            stream.write(np.ascontiguousarray(chunk).data)


def read_array(file: Path, expected_sha256: str) -> np.ndarray:
    """Return a 1-D array, memory-mapped read-only and verified.

    Raises:
        ValueError: the file is damaged; the message names the file.
    """
    try:
        array = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise make_damage_error(file, str(error)) from None
    if (
        array.dtype not in (np.uint8, np.uint16, np.uint32, np.int64, np.float32)
        or array.ndim != 1
        or sha256(array) != expected_sha256
    ):
        raise make_damage_error(file, "it was altered")
    return array


def write_text(file: Path, text: str) -> None:
    with _open_synced(file) as stream:
        stream.write(text.encode())


def read_text(file: Path, expected_sha256: str) -> str:
    """Read a text file and verify its sha256.

    Raises:
        ValueError: the file is damaged; the message names the file.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise make_damage_error(file, str(error)) from None
    if hashlib.sha256(text.encode()).hexdigest() != expected_sha256:
        raise make_damage_error(file, "it was altered")
    return text


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    write_text(folder / META, json.dumps({**meta, "sha256": sha256_of_json(meta)}, indent=1))


def read_verified_meta(folder: Path) -> dict[str, Any]:
    """Return the content of `write_meta`, for any kind of corpus.

    Raises:
        ValueError: the file is missing or altered; the message names the file.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise make_damage_error(folder / META, str(error)) from None
    if not isinstance(meta, dict) or meta.pop("sha256", None) != sha256_of_json(meta):
        raise make_damage_error(folder / META, "it was altered")
    return meta


def read_meta(folder: Path, required: set[str], optional: set[str]) -> dict[str, Any]:
    """Return `read_verified_meta`, checked for required and optional keys.

    Args:
        folder: the corpus's folder.
        required: keys that must exist.
        optional: keys that may exist.

    Raises:
        ValueError: as `read_verified_meta`, or the keys differ.
    """
    meta = read_verified_meta(folder)
    if not required <= set(meta) <= required | optional:
        raise make_damage_error(folder / META, "another version of this program wrote it")
    return meta


def sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def make_damage_error(file: Path, why: str) -> ValueError:
    return ValueError(f"prepared data: {file} is missing or damaged ({why}).\nDelete {file.parent} and run again.")


@contextmanager
def _open_synced(file: Path) -> Iterator[BinaryIO]:
    with open(file, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


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
