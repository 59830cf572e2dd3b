"""Prepared images: uint8 pixels and labels of two memory-mapped sides, with random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractRowCorpus
from stability.models.images import ImageFormat

KIND = "images"
IMAGES_PER_CHUNK = 1 << 10
FEWEST_HELD_OUT = 100  # below, accuracy has steps above 1 %, and the description mentions them
FILES = {
    "train_images": "train.npy",
    "val_images": "val.npy",
    "train_labels": "train_labels.npy",
    "val_labels": "val_labels.npy",
}


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """A batch of ``images_BHWC`` (uint8) and class numbers ``labels_B`` (int64)."""

    images_BHWC: Tensor
    labels_B: Tensor

    def __len__(self) -> int:
        return len(self.labels_B)

    def split(self, rows: int) -> list[ImageBatch]:
        """Cut the batch into parts of ``rows`` images, the last one shorter; views."""
        return [ImageBatch(*part) for part in zip(self.images_BHWC.split(rows), self.labels_B.split(rows), strict=True)]


class Side(NamedTuple):
    """One side's ``images_MHWC`` (uint8) and class numbers ``labels_M`` (uint16)."""

    images_MHWC: np.ndarray
    labels_M: np.ndarray


@dataclass(frozen=True, eq=False)
class ImageCorpus(AbstractRowCorpus):
    """Images with one size, and their classes; built with `ImageCorpus.of`.

    Attributes:
        class_names: name of each class.
        image: size, number of classes, and the training side's mean and deviation of each channel.
        sums: sha256 of each array by name.
    """

    kind: ClassVar[str] = KIND
    files = FILES
    plain = ("fingerprint", "description", "format", "class_names")
    side = Side

    train: Side
    val: Side
    class_names: tuple[str, ...]
    image: ImageFormat
    fingerprint: str
    description: str
    sums: Mapping[str, str]

    @classmethod
    def of(cls, train: Side, val: Side, class_names: tuple[str, ...], origin: str) -> ImageCorpus:
        """Return a corpus from two sides, with moments and digests computed from them.

        Args:
            train: the training side.
            val: the held-out side.
            class_names: name of each class.
            origin: the source, for the description.

        Raises:
            ValueError: a side is empty, there are fewer than two classes, a label exceeds the classes, or sizes differ.
        """
        for side, which in ((train, "training"), (val, "held-out")):
            if not len(side.labels_M):
                raise ValueError(f"data: {origin}: the {which} side holds no image")
            assert (
                side.images_MHWC.dtype == np.uint8
                and side.labels_M.dtype == np.uint16
                and len(side.images_MHWC) == len(side.labels_M)
            )
        if len(class_names) < 2:
            raise ValueError(f"data: {origin}: {len(class_names)} class; at least 2 are needed to tell images apart")
        if train.images_MHWC.shape[1:] != val.images_MHWC.shape[1:]:
            shapes = " and held-out ones ".join("×".join(map(str, side.images_MHWC.shape[1:])) for side in (train, val))
            raise ValueError(
                f"data: {origin}: training images have {shapes} (height, width, channels); all must be of one size"
            )
        if max(int(side.labels_M.max()) for side in (train, val)) >= len(class_names):
            raise ValueError(
                f"data: {origin}: label {max(int(side.labels_M.max()) for side in (train, val))}, where there are "
                f"{len(class_names)} classes"
            )
        height, width, channels = train.images_MHWC.shape[1:]
        image = ImageFormat(height, width, channels, len(class_names), *moments(train.images_MHWC))
        size = f"{height}×{width} pixels, {len(class_names)} classes"
        description = f"{origin}: {len(train.labels_M):,} training and {len(val.labels_M):,} held-out images of {size}"
        return cls.make(train, val, description=description, format=image._asdict(), class_names=class_names)

    @property
    def format(self) -> dict[str, Any]:
        return {**self.image._asdict(), "mean": list(self.image.mean), "std": list(self.image.std)}

    def describe(self, positions: int) -> str:
        side = self.image.patch_side(positions)
        num = len(self.val.labels_M)
        coarse = f"; {num} held-out images: accuracy in steps of {100 / num:.2g} %" if num < FEWEST_HELD_OUT else ""
        return f"{self.description}, a patch of {side}×{side} a position{coarse}"

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check that images can be cut into square patches.

        Args:
            positions: the model's positions, one a patch.
            more: unused.
            remedy: unused.

        Raises:
            ValueError: ``positions`` square patches do not fit.
        """
        self.image.patch_side(positions)

    def log_frequencies(self) -> Float64[Tensor, " classes"]:
        """Return log frequencies of the training images' classes, each count raised by one."""
        counts = np.bincount(self.train.labels_M, minlength=self.image.classes) + 1
        return torch.from_numpy(np.log(counts / counts.sum()))

    def _gather_rows(self, side: Side, rows: np.ndarray, positions: int) -> ImageBatch:
        return ImageBatch(
            torch.from_numpy(np.asarray(side.images_MHWC[rows])), torch.from_numpy(side.labels_M[rows].astype(np.int64))
        )

    @classmethod
    def _shapes(cls, plain: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        image = ImageFormat.of(plain["format"])
        return (-1, image.height, image.width, image.channels), (-1,)

    @classmethod
    def _layout(cls, plain: Mapping[str, Any]) -> list[Any]:
        return [list(ImageFormat.of(plain["format"])[:4]), list(plain["class_names"])]

    @classmethod
    def _fields(cls, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {"image": ImageFormat.of(plain["format"]), "class_names": tuple(plain["class_names"])}
        return {"fingerprint": plain["fingerprint"], "description": plain["description"], **own}


def moments(images_MHWC: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation, from 0 to 255.

    A constant channel's deviation is 1.
    """
    # sums in float64, which represents these integers exactly
    total, squares, num_pixels = np.zeros(images_MHWC.shape[-1]), np.zeros(images_MHWC.shape[-1]), 0
    for start in range(0, len(images_MHWC), IMAGES_PER_CHUNK):
        pixels = images_MHWC[start : start + IMAGES_PER_CHUNK].reshape(-1, images_MHWC.shape[-1]).astype(np.float64)
        total, squares, num_pixels = total + pixels.sum(0), squares + (pixels**2).sum(0), num_pixels + len(pixels)
    mean = total / num_pixels
    std = np.sqrt(np.maximum(squares / num_pixels - mean**2, 0.0))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
