"""Encoded pictures → pixels, by Pillow, which is imported where there is one to decode."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")


def decoded(source: bytes | Path, place: str) -> np.ndarray:
    """Decode a picture to RGB pixels (H, W, 3), uint8; grey ones three times, transparency left out. ``place``: what to
    call the picture.

    Errors: ``ValueError`` where it cannot be decoded; ``RuntimeError`` without Pillow.
    """
    image = _pillow()
    try:
        with image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            return np.asarray(picture.convert("RGB"))
    # Pillow raises SyntaxError for broken PNGs
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{place} is cut short or no picture ({said}); fetch it again or take it out") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RuntimeError(
            "data=images: JPEG, PNG and the like are read by Pillow, which is not installed; pip install "
            "'stability-lab[images]'"
        ) from None
    return Image
