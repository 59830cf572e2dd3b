"""Walks on a ring of places, a step to the left or to the right at a time: a data source with a kind of data of its
own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor

from stability.config import Settings
from stability.corpora.base import AbstractCorpus
from stability.corpora.io import disk
from stability.corpora.io.disk import sha256
from stability.data import AbstractDataSource

HELD_OUT = 20
FILES = {"walks": "walks.npy"}


@dataclass(frozen=True, eq=False)
class WalkCorpus(AbstractCorpus):
    """``walks_MN``: places from 0 on, the held-out walks first."""

    kind: ClassVar[str] = "walks"

    walks_MN: np.ndarray
    places: int
    fingerprint: str
    description: str

    @classmethod
    def of(cls, walks_MN: np.ndarray, places: int) -> WalkCorpus:
        fingerprint = disk.sha256_of_json(["walks", places, list(walks_MN.shape), sha256(walks_MN.reshape(-1))])
        return cls(walks_MN, places, fingerprint, f"ring of {places} places: {len(walks_MN)} walks")

    @property
    def format(self) -> int:
        return self.places

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        longest = self.walks_MN.shape[1] - more
        if positions > longest:
            raise ValueError(f"data: no walk is that long; model.positions={positions} must be at most {longest}")

    def batch(self, split: str, num: int, positions: int, generator: Generator) -> Tensor:
        side_MN = self._side(split)
        return side_MN[torch.randint(len(side_MN), (num,), generator=generator), :positions]

    def windows(self, split: str, num: int, positions: int) -> Tensor:
        return self._side(split)[:num, :positions]

    def log_frequencies(self) -> Tensor:
        counts = self._side("train").flatten().bincount(minlength=self.places) + 1
        return (counts.double() / counts.sum()).log()

    def _side(self, split: str) -> Tensor:
        rows = slice(HELD_OUT) if split == "val" else slice(HELD_OUT, None)
        return torch.from_numpy(self.walks_MN[rows].astype(np.int64))

    def _write(self, folder: Path) -> None:
        disk.write_array(folder / FILES["walks"], self.walks_MN.reshape(-1))
        disk.write_meta(folder, {"kind": self.kind, "places": self.places, "fingerprint": self.fingerprint})

    @classmethod
    def load(cls, folder: Path) -> WalkCorpus:
        meta = disk.read_meta(folder, {"kind", "places", "fingerprint"}, set())
        flat = np.load(folder / FILES["walks"], mmap_mode="r")
        return cls.of(flat.reshape(-1, Walks.LENGTH), meta["places"])


class Walks(AbstractDataSource):
    LENGTH: ClassVar[int] = 24

    class Config(Settings):
        places: int = Field(default=8, ge=3, le=100, description="places on the ring")
        num: int = Field(default=300, ge=2 * HELD_OUT, description="walks")

    corpus = WalkCorpus

    @classmethod
    def prepare(cls, config: Any, scratch: Path | None = None) -> WalkCorpus:
        draws = np.random.default_rng(0)
        steps_MN = draws.integers(2, size=(config.num, cls.LENGTH)) * 2 - 1
        return WalkCorpus.of(((steps_MN.cumsum(1)) % config.places).astype(np.uint16), config.places)

    @classmethod
    def cache_key(cls, config: Any) -> str:
        return f"1 {config.places} {config.num}"

    @classmethod
    def tokens_of(cls, config: Any) -> str:
        return "places on a ring"


EXPORT = Walks
