"""CIFAR-10 and CIFAR-100 in their authors' format, batches pickled by Python 2.

Unpickling runs no code from the files.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stability.printable import line_of

SIDE, CHANNELS = 32, 3
GZIP = b"\x1f\x8b"  # first bytes of a gzip file; its name may differ
MOST_UNPACKED = 1 << 30  # bytes of all batches in an archive; the authors' are 186 MB


class Layout(NamedTuple):
    """Names of a data set's files, and of their keys."""

    train: tuple[str, ...]
    test: str
    meta: str
    labels: bytes
    class_names: bytes


LAYOUTS = {
    "CIFAR-10": Layout(
        tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta", b"labels", b"label_names"
    ),
    "CIFAR-100": Layout(("train",), "test", "meta", b"fine_labels", b"fine_label_names"),
}


def layout_of(names: set[str]) -> str | None:
    """Return the data set with at least two files among ``names``, or None."""
    return next(
        (name for name, layout in LAYOUTS.items() if len(names & {*layout.train, layout.test, layout.meta}) > 1), None
    )


def archive_files(path: Path) -> dict[str, bytes]:
    """Return a tar archive's contents by file name, for files in a `Layout`.

    Names have no folders.

    Raises:
        ValueError: the archive is damaged or unpacks to too much.
    """
    wanted = {name for layout in LAYOUTS.values() for name in (*layout.train, layout.test, layout.meta)}
    try:
        with path.open("rb") as stream:
            packing = "r:gz" if stream.read(len(GZIP)) == GZIP else "r:"
        with tarfile.open(path, packing) as archive:
            members = [member for member in archive if member.isfile() and Path(member.name).name in wanted]
            num_bytes = sum(member.size for member in members)
            if num_bytes > MOST_UNPACKED:
                raise ValueError(
                    f"data.path: {path}: its batches unpack to {num_bytes:,} bytes, more than any of CIFAR "
                    f"({MOST_UNPACKED:,} at most); fetch it again from its publisher"
                )
            return {
                Path(member.name).name: archive.extractfile(member).read()  # type: ignore[union-attr]
                for member in members
            }
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(
            f"data.path: {path} is cut short or no tar archive, plain or packed by gzip ({error}); fetch it again"
        ) from None


def read_batches(
    files: Mapping[str, Callable[[], bytes]], root: str
) -> tuple[str, Iterator[tuple[str, np.ndarray, int]], tuple[str, ...]]:
    """Return (data set, images, class names); an image is ("train" or "val", pixels, class).

    Args:
        files: reader of each file by name.
        root: the user's path, for messages.

    Raises:
        ValueError: a batch is missing, cut short, has another form, or contains code; one line.
    """
    name = layout_of(set(files))
    assert name is not None, "the caller looks first"
    layout = LAYOUTS[name]
    missing = [file for file in (*layout.train, layout.test) if file not in files]
    if missing:
        raise ValueError(f"data.path={root}: {missing[0]} of {name} is missing; unpack the archive again")
    return name, _images(files, layout, root), _class_names(files, layout, root)


def _images(
    files: Mapping[str, Callable[[], bytes]], layout: Layout, root: str
) -> Iterator[tuple[str, np.ndarray, int]]:
    for file in (*layout.train, layout.test):
        pixels_MHWC, labels = batch_of(files[file](), f"data.path={root}: {file}", layout.labels)
        for pixels_HWC, label in zip(pixels_MHWC, labels, strict=True):
            yield "val" if file == layout.test else "train", pixels_HWC, label


def batch_of(content: bytes, place: str, label_key: bytes) -> tuple[np.ndarray, list[int]]:
    """Return the pixels (M, 32, 32, 3) and labels of one pickled batch.

    The batch's rows have one plane per channel.

    Args:
        content: the pickle.
        place: name of the batch, for messages.
        label_key: key of the labels.

    Raises:
        ValueError: the content is no batch; the message begins with ``place``.
    """
    found = unpickle(content, place)
    data, labels = (found.get(b"data"), found.get(label_key)) if isinstance(found, dict) else (None, None)
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != CHANNELS * SIDE**2
    ):
        raise ValueError(f"{place} is no batch of CIFAR: its b'data' must be uint8 rows of {CHANNELS * SIDE**2:,}")
    if (
        not isinstance(labels, list)
        or len(labels) != len(data)
        or not all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    ):
        raise ValueError(
            f"{place} is no batch of CIFAR: {label_key!r} must be a list with a number of a class for each of its "
            f"{len(data):,} images"
        )
    return data.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels


def _class_names(files: Mapping[str, Callable[[], bytes]], layout: Layout, root: str) -> tuple[str, ...]:
    if layout.meta not in files:
        raise ValueError(
            f"data.path={root}: {layout.meta}, which names the classes, is missing; unpack the archive again"
        )
    place = f"data.path={root}: {layout.meta}"
    found = unpickle(files[layout.meta](), place)
    names = found.get(layout.class_names) if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise ValueError(f"{place} must hold the list {layout.class_names!r}")
    return tuple(name.decode("utf-8", "replace") for name in names)


def unpickle(content: bytes, place: str) -> Any:
    """Return the plain values and numpy arrays of a pickle.

    Raises:
        ValueError: the pickle is cut short, or would call anything else; the message begins with ``place``.
    """
    try:
        return _Harmless(io.BytesIO(content), encoding="bytes").load()
    except _Code as error:
        raise ValueError(
            f"{place} asks for {error} to be called, which no data needs: it was not run; fetch the file again from "
            "its publisher"
        ) from None
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        ImportError,
        MemoryError,
        OverflowError,
        struct.error,
    ) as error:
        said = line_of(error)
        raise ValueError(f"{place} is cut short or no pickle of CIFAR ({said}); fetch it again") from None


class _Code(Exception):
    """A pickle names a function to call."""


def _empty_array(kind: Any, shape: Any, typecode: Any) -> np.ndarray:
    """Return an empty array in place of numpy's `_reconstruct`.

    Its state follows in the pickle. Other classes are refused.
    """
    if kind is not np.ndarray:
        raise _Code(kind)
    return np.ndarray((0,), np.uint8)


def _latin_1(text: Any, encoding: Any = "latin1") -> bytes:
    """Return bytes pickled by Python 3 for Python 2, which arrive as latin-1 text."""
    if encoding not in ("latin1", b"latin1"):
        raise _Code(f"the codec {encoding!r}")
    return text if isinstance(text, bytes) else text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin_1,
}


class _Harmless(pickle._Unpickler):
    """Python's unpickler instead of C's, with admitted names only.

    The C unpickler's memo is an array as long as the file's largest index: gigabytes for 12 bytes.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise _Code(f"{module}.{name}")
        return ADMITTED[module, name]
