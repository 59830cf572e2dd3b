"""Decode image files to pixels by Pillow, imported at the first image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from stability.printable import line_of

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
