"""Images with classes: npz files, CIFAR, folders of pictures, or synthetic images.

CIFAR is CIFAR-10 or CIFAR-100. The synthetic images are documented; they are the default.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from stability.config import Settings
from stability.config.identity import Place, Since
from stability.corpora.base import AbstractCorpus
from stability.corpora.images import synthetic
from stability.corpora.images.cifar import CHANNELS, SIDE
from stability.corpora.images.corpus import ImageCorpus, Side
from stability.corpora.images.files import find, key_of
from stability.corpora.io import bar, step
from stability.corpora.io.disk import TokenFile
from stability.data import AbstractDataSource

# Increment if the same files (or no file) would give other images. Not in the fingerprint: unchanged images keep it.
# 2: pictures turned upright by EXIF, 16 bits scaled; channels first refused.
VERSION = 2
HOLD_OUT = 0.01
NUM_CLASSES = {"cifar10": 10, "cifar100": 100}
STAND_IN = 1024  # images of a side


class ImagesConfig(Settings):
    """The settings of data=images."""

    path: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="an .npz file, CIFAR-10's or CIFAR-100's python batches (folder or .tar.gz), or a folder with "
        "train/<class>/*.png; null: synthetic images",
    )
    dataset: Annotated[Literal["cifar10", "cifar100"] | None, Since(None)] = Field(
        default=None,
        description="what data.path must hold, and what a plan without data.path is made for; null: any images",
    )
    hold_out: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=(
            "share of the images that is held out where the data has no test (or val) side of its own; null: 0.01"
        ),
    )


class CollectedImages:
    """The images of one side in order of arrival: pixels on disk, classes in memory."""

    def __init__(self, scratch: Path | None):
        self._pixels, self._labels = TokenFile(np.uint8, scratch), array("H")

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, image_HWC: np.ndarray, label: int) -> None:
        self._pixels.append(image_HWC.reshape(-1))
        self._labels.append(label)
        step()

    def side(self, shape: tuple[int, ...]) -> Side:
        return Side(self._pixels.array().reshape(-1, *shape), np.array(self._labels, dtype=np.uint16))


class Images(AbstractDataSource):
    """RGB images (or an npz file's channels) of one size.

    Held out is the test (or val) side. Without one it is the first 1 % (rounded up), or another share, in the order of
    the pixels' sha256. This choice depends on nothing else, and its class shares are about those of all images.
    """

    Config: ClassVar[type[Settings]] = ImagesConfig
    corpus: ClassVar[type[AbstractCorpus]] = ImageCorpus

    @classmethod
    def prepare(cls, config: ImagesConfig, scratch: Path | None = None) -> ImageCorpus:
        """Decode every image once.

        Raises:
            ValueError: a file or image is invalid; the message names it.
            RuntimeError: Pillow is required but missing.
        """
        if config.path is None:
            if config.dataset is not None:
                raise ValueError(
                    f"data.dataset={config.dataset} needs data.path, its python batches: a folder or a .tar.gz; "
                    "data.dataset=null data.path=null reads synthetic images"
                )
            _refuse_hold_out(config, "the synthetic images have")
            sides = (("train", synthetic.NUM_TRAIN, synthetic.SEED), ("val", synthetic.NUM_VAL, synthetic.SEED + 1))
            made = (
                (side, pixels, label, "") for side, num, seed in sides for pixels, label in synthetic.images(num, seed)
            )
            return _corpus(made, synthetic.CLASS_NAMES, synthetic.DESCRIPTION, config, scratch)
        found = find(config.path)
        _require_dataset(config, len(found.class_names))
        with bar("reading images"):
            return _corpus(found.items, found.class_names, found.what, config, scratch)

    @classmethod
    def cache_key(cls, config: ImagesConfig) -> str:
        """Return name and sha256 of each file, the hold-out and the data set.

        For folders the class is included. The synthetic images have their seed instead of files.
        """
        files = ["synthetic", synthetic.SEED] if config.path is None else key_of(find(config.path))
        asked = [] if config.dataset is None else [config.dataset]
        return json.dumps([VERSION, config.hold_out, files, *asked])

    @classmethod
    def stand_in(cls, config: ImagesConfig) -> ImageCorpus | None:
        """Return random images of the named data set if no path is given."""
        if config.path is not None or config.dataset is None:
            return None
        classes, draws = NUM_CLASSES[config.dataset], np.random.default_rng(0)
        sides = [
            Side(draws.integers(256, size=(num, SIDE, SIDE, CHANNELS), dtype=np.uint8), labels.astype(np.uint16))
            for num, labels in ((STAND_IN, draws.integers(classes, size=STAND_IN)) for _ in range(2))
        ]
        return ImageCorpus.of(
            sides[0], sides[1], tuple(map(str, range(classes))), f"random images in place of {config.dataset}"
        )


def _corpus(
    items: Iterator[tuple[str, np.ndarray, int, str]],
    names: tuple[str, ...],
    origin: str,
    config: ImagesConfig,
    scratch: Path | None,
) -> ImageCorpus:
    """Collect the images into a corpus; hold out training images if no other side exists."""
    piles: dict[str, CollectedImages] = {}
    shape: tuple[int, ...] | None = None
    for side, image_HWC, label, place in items:
        shape = shape or image_HWC.shape
        if image_HWC.shape != shape:
            sizes = " and the first one ".join("×".join(map(str, each)) for each in (image_HWC.shape, shape))
            raise ValueError(f"{place} has {sizes} (height, width, channels); all must be of one size: resize them")
        piles.setdefault(side, CollectedImages(scratch)).add(image_HWC, label)
    if shape is None or "train" not in piles:
        raise ValueError(f"data: {origin}: no image to train on")
    if "val" in piles:
        _refuse_hold_out(config, f"{origin} has")
        train, val = (piles[side].side(shape) for side in ("train", "val"))
    else:
        train, val = _hold_out(piles["train"].side(shape), config.hold_out or HOLD_OUT, origin, scratch)
    return ImageCorpus.of(train, val, names, origin)


def _require_dataset(config: ImagesConfig, num_classes: int) -> None:
    """Raise a one-line ``ValueError`` if the data are not of the named data set."""
    if config.dataset is not None and num_classes != NUM_CLASSES[config.dataset]:
        raise ValueError(
            f"data.dataset={config.dataset} has {NUM_CLASSES[config.dataset]} classes, and data.path={config.path} has "
            f"{num_classes}; give its own files, or data.dataset=null"
        )


def _refuse_hold_out(config: ImagesConfig, who: str) -> None:
    if config.hold_out is not None:
        raise ValueError(
            f"data.hold_out={config.hold_out} changes nothing here: {who} a held-out side of its own; leave it out"
        )


def _hold_out(whole: Side, share: float, origin: str, scratch: Path | None) -> tuple[Side, Side]:
    """Return (training side, held-out side), both in the order of their digests."""
    num = len(whole.labels_M)
    if num < 2:
        raise ValueError(f"data: {origin} holds {num} image; at least 2 are needed, so that one can be held out")
    digests = [
        hashlib.sha256(image.tobytes() + bytes([label & 255, label >> 8])).digest()
        for image, label in zip(*whole, strict=True)
    ]
    order = sorted(range(num), key=digests.__getitem__)
    num_held_out = min(num - 1, max(1, -int(-num * share // 1)))
    piles = CollectedImages(scratch), CollectedImages(scratch)
    for place, index in enumerate(order):
        piles[place < num_held_out].add(whole.images_MHWC[index], int(whole.labels_M[index]))
    shape = whole.images_MHWC.shape[1:]
    return piles[0].side(shape), piles[1].side(shape)


EXPORT = Images
