"""A user's images: detect a path's layout, and yield its images one by one."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stability.corpora.images import cifar, folders
from stability.corpora.images.folders import decode_image
from stability.corpora.io.files import (
    describe_left_out,
    make_truncation_error,
    refuse_larger_than_memory,
    sha256_of_file,
)

ARCHIVES = (".tar.gz", ".tgz", ".tar")
LAYOUTS = "an .npz file, CIFAR's python batches (a folder or .tar.gz), or a folder with train/<class>/*.png"
MOST_CLASSES = 1 << 16  # labels are stored in two bytes
MOST_CHANNELS = 4  # a larger last axis suggests channels first
NPZ_KEYS = ("uint8 images under 'x' or 'images'", "'jpeg' with 'offsets'", "and classes under 'y' or 'labels'")


class Found(NamedTuple):
    """The images at a path.

    Attributes:
        what: the source, for the description.
        files: files to read, by location-independent names.
        class_names: name of each class.
        items: ("train" or "val", pixels (H, W, C) uint8, class, name for messages) of each image.
    """

    what: str
    files: dict[str, Path]
    class_names: tuple[str, ...]
    items: Iterator[tuple[str, np.ndarray, int, str]]


def find(path: str) -> Found:
    """Return the images at ``path``; nothing is decoded before ``items`` is iterated.

    Raises:
        ValueError: there are no images; one line.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"data.path={path}: no such file or folder; give {LAYOUTS}")
    if root.is_file():
        if root.name.lower().endswith(".npz"):
            return _npz(root)
        if root.name.lower().endswith(ARCHIVES):
            return _archive(root, path)
        raise ValueError(f"data.path={path}: the name ends in none of .npz, {', '.join(ARCHIVES)}; give {LAYOUTS}")
    if not os.access(root, os.R_OK | os.X_OK):
        raise ValueError(f"data.path={path}: the folder cannot be read; give a folder that you may read")
    for folder in (root, *(root / name for name in ("cifar-10-batches-py", "cifar-100-python"))):
        names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
        if cifar.layout_of(names):
            return _batches(folder, names, path)
    arrays = sorted(file for file in root.iterdir() if fnmatch(file.name.lower(), "*train*.npz"))
    if len(arrays) > 1:
        raise ValueError(
            f"data.path={path}: holds several training files ({', '.join(file.name for file in arrays)}); name one "
            "of them"
        )
    if arrays:
        return _npz(arrays[0])
    return _folders(root, path)


def _npz(file: Path) -> Found:
    """Return the images of one ``.npz`` file or a pair.

    ``…train….npz`` is paired with a neighbouring ``…test….npz``, the held-out side.
    """
    files = {"train": file}
    partner = file.with_name(file.name.replace("train", "test"))
    if partner != file and partner.is_file():
        files["val"] = partner
    names = _class_names(file)
    if "val" in files and _class_names(partner) != names:
        raise ValueError(
            f"data.path: {partner} names other classes than {file.name}; both must have the same 'classes'"
        )
    return Found(
        f"images of {file.name}", files, names, (item for side, each in files.items() for item in _read_npz(each, side))
    )


def _open_npz(file: Path) -> Any:
    """Open an ``.npz`` file.

    Raises:
        ValueError: the file is cut short, no ``.npz``, or a single array without labels.
    """
    refuse_larger_than_memory(file)
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise make_truncation_error(file, error) from None
    if isinstance(found, np.ndarray):
        raise ValueError(
            f"data.path: {file} holds one array without labels, as np.save writes it; np.savez(file, x=images, "
            "y=labels) writes both"
        )
    return found


def _array(archive: Any, file: Path, *names: str) -> np.ndarray | None:
    """Return the first existing array among ``names``, or None."""
    name = next((name for name in names if name in archive.files), None)
    try:
        return None if name is None else archive[name]
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(
            f"data.path: {file}: its array '{name}' is cut short or holds no numbers ({error}); fetch it again"
        ) from None


def _class_names(file: Path) -> tuple[str, ...]:
    """Return the file's class names, or "0", "1", … up to its largest label."""
    archive = _open_npz(file)
    names, labels = _array(archive, file, "classes"), _labels(archive, file)
    if names is not None and names.ndim != 1:
        raise ValueError(
            f"data.path: {file}: 'classes' must be a list of names, one for each class; it has {names.ndim} axes"
        )
    if names is not None:
        return tuple(map(str, names))
    return tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 0)))


def _labels(archive: Any, file: Path) -> np.ndarray:
    """Return an archive's labels, one a row.

    Raises:
        ValueError: the labels are missing or no class numbers.
    """
    labels = _array(archive, file, "y", "labels")
    if labels is None:
        raise ValueError(
            f"data.path: {file} must hold {', or '.join(NPZ_KEYS[:2])}, {NPZ_KEYS[2]}; it has: "
            f"{', '.join(archive.files) or 'nothing'}"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise ValueError(
            f"data.path: {file}: the labels are {_shape(labels)} {labels.dtype}"
            f"{f' from {labels.min()}' if labels.ndim == 1 and labels.dtype.kind == 'i' else ''}; give the number of "
            f"its class, a whole one from 0, for each image{_remedy(labels)}"
        )
    if len(labels) and labels.max() >= MOST_CLASSES:
        raise ValueError(
            f"data.path: {file}: label {labels.max()}; labels number the classes from 0, and there may be "
            f"{MOST_CLASSES:,} at most"
        )
    return labels


def _remedy(labels: np.ndarray) -> str:
    """Return code that turns such an array into labels; empty if there is none."""
    if labels.ndim == 2:
        return ": y.argmax(axis=1), if each row marks its class"
    return ": y.astype(int), if they are whole" if labels.ndim == 1 and labels.dtype.kind in "fb" else ""


def _shape(array: np.ndarray) -> str:
    return "×".join(map(str, array.shape)) or "a single"


def _refuse_channels_first(images: np.ndarray, file: Path) -> None:
    """Raise a ``ValueError`` for N×C×H×W.

    This is easily mistaken for images with 1, 3 or 4 rows and many channels.
    """
    _, second, third, last = images.shape
    if last > MOST_CHANNELS and (second in (3, 4) or (second == 1 and third == last)):
        raise ValueError(
            f"data.path: {file}: images are {_shape(images)}, channels first; give (number, height, width, channels): "
            "x.transpose(0, 2, 3, 1)"
        )


def _read_npz(file: Path, side: str) -> Iterator[tuple[str, np.ndarray, int, str]]:
    """Yield (side, image, label, place) from an archive.

    Its images are one array, or JPEG bytes with offsets.
    """
    archive = _open_npz(file)
    labels, images = _labels(archive, file).tolist(), _array(archive, file, "x", "images")
    jpeg, offsets = _array(archive, file, "jpeg"), _array(archive, file, "offsets")
    if images is not None:
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise ValueError(
                f"data.path: {file}: images must be uint8 (number, height, width, channels), one for each of "
                f"{len(labels):,} labels; they are {_shape(images)} {images.dtype}"
            )
        _refuse_channels_first(images, file)
        yield from (
            (side, image, label, f"image {number} of {file}")
            for number, (image, label) in enumerate(zip(images, labels, strict=True))
        )
        return
    if jpeg is None or offsets is None:
        raise ValueError(
            f"data.path: {file} must hold {', or '.join(NPZ_KEYS[:2])}, {NPZ_KEYS[2]}; it has: "
            f"{', '.join(archive.files)}"
        )
    if not _are_pieces(offsets, jpeg, len(labels)):
        raise ValueError(
            f"data.path: {file}: 'jpeg' must be uint8 bytes of all images and 'offsets' {len(labels) + 1:,} rising "
            f"integers up to {jpeg.size:,}: where each of {len(labels):,} images begins, and the last one's end"
        )
    for number, label in enumerate(labels):
        place = f"data.path: image {number} of {file}"
        yield side, decode_image(jpeg[offsets[number] : offsets[number + 1]].tobytes(), place), label, place


def _are_pieces(offsets: np.ndarray, jpeg: np.ndarray, num: int) -> bool:
    """Return whether ``offsets`` cut the bytes into ``num`` pieces."""
    if jpeg.dtype != np.uint8 or jpeg.ndim != 1 or offsets.dtype.kind not in "iu" or offsets.shape != (num + 1,):
        return False
    return bool(offsets[0] >= 0 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= len(jpeg))


def _archive(file: Path, path: str) -> Found:
    contents = cifar.archive_files(file)
    if not cifar.layout_of(set(contents)):
        raise ValueError(
            f"data.path={path}: the archive holds no python batches of CIFAR (data_batch_1, …); unpack it, and give "
            f"{LAYOUTS}"
        )
    name, images, names = cifar.read_batches(
        {key: lambda content=content: content for key, content in contents.items()}, path
    )
    return Found(f"{name} of {file.name}", {"archive": file}, names, _add_places(images, path))


def _batches(folder: Path, present: set[str], path: str) -> Found:
    files = {name: folder / name for name in sorted(present)}
    name, images, names = cifar.read_batches({key: file.read_bytes for key, file in files.items()}, path)
    layout = cifar.LAYOUTS[name]
    read = {key: files[key] for key in (*layout.train, layout.test, layout.meta)}
    return Found(f"{name} of {folder.name}", read, names, _add_places(images, path))


def _add_places(images: Iterator[tuple[str, np.ndarray, int]], path: str) -> Iterator[tuple[str, np.ndarray, int, str]]:
    return ((side, pixels, label, f"an image of data.path={path}") for side, pixels, label in images)


def _folders(root: Path, path: str) -> Found:
    names, pictures = folders.find(root, path, LAYOUTS)
    files = {f"{each.side}/{names[each.label]}/{each.name}": each.file for each in pictures}
    items = (
        (each.side, decode_image(each.file, f"data.path: {each.file}"), each.label, f"data.path: {each.file}")
        for each in pictures
    )
    others = describe_left_out(root, files.values())
    return Found(f"images of {root.resolve().name}" + (f" ({others[2:]})" if others else ""), files, names, items)


def key_of(found: Found) -> list[tuple[str, str]]:
    """Return the name and sha256 of each file, independent of their location."""
    return [(name, sha256_of_file(file)) for name, file in sorted(found.files.items())]
