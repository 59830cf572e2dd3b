"""Read and write a corpus's folder: arrays, vocabulary and description, with sha256 sums.

A folder is written under a temporary name and renamed as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stability.corpora.io.arrays import chunks, sha256
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
