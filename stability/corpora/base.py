"""Prepared data of every kind share this base: what a run asks of them, and how they are kept in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Generator, Tensor

from stability.corpora.io import disk


class AbstractCorpus:
    """Base of prepared data. A subclass has a ``kind`` and implements the methods below but for `save`.

    ``kind``: what an objective asks for (`AbstractObjective.corpus_kind`); it stands in the folder's description, but
      for tokens, which had none at first.
    ``version``: raised when the same data would be split or laid out otherwise: it is in the key of every prepared one.
    ``fingerprint``: sha256 over the contents; ``description``: one line on what was read. ``format``: what an objective
      and a model are built for, as plain JSON; it is written beside checkpoints. For tokens the vocabulary's size.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    fingerprint: str
    description: str

    @property
    def format(self) -> Any:
        raise NotImplementedError

    def described(self, positions: int) -> str:
        """Return the description, with what becomes of the data where ``positions`` of them are drawn at a time (an
        objective's `tokens_needed`)."""
        return self.description

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Raise a ``ValueError`` where a model of ``positions`` cannot be trained on the data, or there is too little
        of them."""
        raise NotImplementedError

    def batch(self, split: str, num: int, positions: int, generator: Generator) -> Any:
        """Return ``num`` random training (or held-out) items, which only ``generator`` decides: what the objective's
        `examples` reads, with a ``split(rows)``."""
        raise NotImplementedError

    def longest_batch(self, num: int, positions: int, generator: Generator) -> Any:
        """Return a training batch each item of which is as long as ``positions`` let it be: what a step takes at most
        is measured on it."""
        return self.batch("train", num, positions, generator)

    def windows(self, split: str, num: int, positions: int) -> Any:
        """Return at most ``num`` items of ``split``, evenly spaced from first to last, the same ones at every call;
        otherwise as `batch`."""
        raise NotImplementedError

    def log_frequencies(self) -> Float64[Tensor, " outcomes"]:
        """Return the log of the training side's frequencies of what is predicted, each count raised by one."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write to a temporary neighbour, fsync, rename to ``folder``. Where another process was first, its equal copy
        stays.

        Errors: ``ValueError`` where ``folder`` exists and holds something else; ``OSError`` from the disk.
        """
        with disk.partial_folder(folder) as partial:
            self._write(partial)
            try:
                partial.rename(folder)
            except OSError:  # a non-empty folder cannot be replaced: the loser of a race discards its copy
                if not folder.is_dir():
                    raise
                if disk.verified_meta(folder).get("fingerprint") != self.fingerprint:
                    raise ValueError(f"{folder} holds another corpus; choose another folder") from None

    def _write(self, folder: Path) -> None:
        """Write every file of the corpus into an empty folder, `disk.write_meta` the last."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> AbstractCorpus:
        """Load what `save` wrote, memory-mapped read-only and checked. Errors: ``ValueError`` naming the file that is
        missing, cut short or altered."""
        raise NotImplementedError


class AbstractRowCorpus(AbstractCorpus):
    """Prepared data of two sides, each two arrays whose rows belong together. A subclass implements `_gathered`.

    ``files``: of each array by its name, the sides of the first before those of the second; ``plain``: the attributes
    that stand in the folder's description; ``sums``: sha256 of each array by name.
    """

    files: ClassVar[Mapping[str, str]]
    plain: ClassVar[tuple[str, ...]]
    train: Any
    val: Any
    sums: Mapping[str, str]

    @classmethod
    def arrays(cls, train: Any, val: Any) -> dict[str, np.ndarray]:
        """Return every array, one-dimensional, by the name that it is kept under."""
        flat = (array.reshape(-1) for sides in zip(train, val, strict=True) for array in sides)
        return dict(zip(cls.files, flat, strict=True))

    def batch(self, split: str, num: int, positions: int, generator: Generator) -> Any:
        """Draw ``num`` random rows of ``split`` ("train" or "val"), each equally likely, with replacement."""
        side = self._side(split)
        rows = torch.randint(len(side[0]), (num,), generator=generator, device=generator.device)
        return self._gathered(side, rows.cpu().numpy())

    def windows(self, split: str, num: int, positions: int) -> Any:
        """Return at most ``num`` rows, evenly spaced from first to last."""
        side = self._side(split)
        count = min(num, len(side[0]))
        return self._gathered(side, np.arange(count) * (len(side[0]) - 1) // max(count - 1, 1))

    def _side(self, split: str) -> Any:
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        return self.train if split == "train" else self.val

    def _gathered(self, side: Any, rows: np.ndarray) -> Any:
        """Return the batch of these rows of a side."""
        raise NotImplementedError

    def _write(self, folder: Path) -> None:
        for name, array in self.arrays(self.train, self.val).items():
            disk.write_array(folder / self.files[name], array)
        disk.write_meta(folder, {"kind": self.kind, **{key: getattr(self, key) for key in self.plain}, **self.sums})
        disk.fsync(folder)
