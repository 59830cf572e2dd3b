"""Image folders as read by torchvision's ImageFolder, decoded by Pillow, which is imported at the first image.

``train/<class>/…`` with ``val/`` or ``test/`` beside ``train/``, or ``<class>/…`` alone.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stability.printable import line_of

HELD_OUT = ("val", "test")  # the first existing one is used


class Picture(NamedTuple):
    """An image file in a class's folder.

    Attributes:
        side: "train" or "val".
        label: number of the class.
        name: path below the class's folder.
        file: the file.
    """

    side: str
    label: int
    name: str
    file: Path


def find(root: Path, path: str, layouts: str) -> tuple[tuple[str, ...], list[Picture]]:
    """Return (class names, pictures).

    Classes are sorted. A class has all images below its folder at any depth, in the order of their paths. Hidden files
    and folders are skipped.

    Args:
        root: the folder.
        path: the user's name for ``root``, for messages.
        layouts: other accepted layouts, for messages.

    Raises:
        ValueError: there are no images, the held-out side has a class missing in training, or folders are ambiguous;
            one line.
    """
    has_sides = (root / "train").is_dir()
    train = root / "train" if has_sides else root
    held_out = next((root / name for name in HELD_OUT if has_sides and (root / name).is_dir()), None)
    names = _classes(train)
    if not names and has_sides and any(map(_is_picture, train.iterdir())):
        raise ValueError(
            f"data.path={path}: train/ holds pictures but no folders of classes; give train/<class>/*.png (a class "
            "cannot be called 'train')"
        )
    if not names:
        raise ValueError(f"data.path={path}: holds no images; give {layouts} ({', '.join(SUFFIXES)})")
    if not has_sides:
        _refuse_sides_by_other_names(root, names, path)
    if held_out is not None and (strange := sorted(set(_classes(held_out)) - set(names))):
        raise ValueError(
            f"data.path={path}: {held_out.name}/ has the class '{strange[0]}', which train/ lacks; both must have "
            "the same folders"
        )
    sides = (("train", train), ("val", held_out))
    return names, [picture for side, folder in sides if folder for picture in _pictures(side, folder, names)]


def _refuse_sides_by_other_names(root: Path, names: tuple[str, ...], path: str) -> None:
    """Refuse ``training/<class>`` and ``testing/<class>``, otherwise read as two classes.

    They are recognised as folders without own images but with subfolders of the same name.
    """
    if len(names) < 2 or any(_is_picture(file) for name in names for file in (root / name).iterdir()):
        return
    shared = sorted(set.intersection(*(set(_classes(root / name)) for name in names)))
    if shared:
        raise ValueError(
            f"data.path={path}: {names[0]}/ and {names[1]}/ both hold a folder '{shared[0]}': if they are the sides, "
            "call them train/ and val/ or test/; if they are classes, put them into a folder train/"
        )


def _classes(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the subfolders with images."""
    return tuple(
        sorted(
            each.name
            for each in folder.iterdir()
            if each.is_dir() and not each.name.startswith(".") and any(_below(each))
        )
    )


def _pictures(side: str, folder: Path, names: tuple[str, ...]) -> Iterator[Picture]:
    for label, name in enumerate(names):
        if (folder / name).is_dir():
            yield from (
                Picture(side, label, file.relative_to(folder / name).as_posix(), file) for file in _below(folder / name)
            )


def _below(folder: Path) -> Iterator[Path]:
    for parent, _, names in sorted(os.walk(folder, followlinks=True)):
        if not any(step.startswith(".") for step in Path(parent).relative_to(folder).parts):
            yield from (file for name in sorted(names) if _is_picture(file := Path(parent, name)))


def _is_picture(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".") and file.is_file()


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
ORIENTATION, BITS_PER_SAMPLE = 0x0112, 258  # tags of EXIF and of TIFF
ALWAYS_16_BITS = ("PNG", "PPM")  # grey images above 8 bits fill the range of 16 in these formats
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}  # EXIF orientation: the transposition that undoes it


def decode_image(source: bytes | Path, place: str) -> np.ndarray:
    """Decode an image to RGB pixels (H, W, 3), uint8, upright by its EXIF.

    Grey is repeated three times, transparency is dropped, and only the upper 8 bits are used. ``place`` names the image
    in messages.

    Raises:
        ValueError: the image cannot be decoded, or its pixels' range is unknown.
        RuntimeError: Pillow is missing.
    """
    image = _pillow()
    try:
        with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            picture.load()
            # not ImageOps.exif_transpose, which also rewrites the other tags and fails on damaged ones
            turn = UPRIGHT.get(picture.getexif().get(ORIENTATION))
            upright = picture if turn is None else picture.transpose(image.Transpose[turn])
            if not picture.mode.startswith(("I", "F")):
                return np.asarray(upright.convert("RGB"))
            bits = getattr(picture, "tag_v2", {}).get(BITS_PER_SAMPLE, (16,))[0]
            pixels_HW, format_, mode = np.asarray(upright), picture.format, picture.mode
    # Pillow raises SyntaxError for broken PNGs
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        said = line_of(error)
        raise ValueError(f"{place} is cut short or no picture ({said}); fetch it again or take it out") from None
    if mode == "F":
        raise ValueError(f"{place} has floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    if mode == "I" and format_ not in ALWAYS_16_BITS:
        bits = _bits_of_integers(pixels_HW, place)
    return np.repeat((pixels_HW >> (bits - 8)).astype(np.uint8)[..., None], 3, axis=-1)


def _bits_of_integers(pixels_HW: np.ndarray, place: str) -> int:
    """Return 16 if 32-bit integers have the range of 16-bit ones.

    Raises:
        ValueError: the range is another one, including 8 bits: neighbouring images may have 16.
    """
    least, most = int(pixels_HW.min()), int(pixels_HW.max())
    if least < 0 or not 1 << 8 <= most < 1 << 16:
        raise ValueError(
            f"{place} has 32-bit pixels from {least:,} to {most:,}, of which the range is not known; save it with 8 or "
            "16 bits"
        )
    return 16


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RuntimeError(
            "data=images: JPEG, PNG and the like are read by Pillow, which is not installed; pip install "
            "'stability-lab[images]'"
        ) from None
    return Image
