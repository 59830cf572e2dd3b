"""Base classes of prepared data: their interface for runs, and their storage in a folder."""

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
    """Base of prepared data.

    A subclass has a ``kind`` and implements all methods below except `save`.

    Attributes:
        kind: matches an objective's `AbstractObjective.corpus_kind`. Written in the folder's description, except for
            tokens: older token corpora have none.
        version: increased if equal data would be split or laid out differently; part of each prepared corpus's cache
            key.
        fingerprint: sha256 over the contents.
        description: one line on the source.
        format: input format of objectives and models, as plain JSON, written beside checkpoints; for tokens, the
            vocabulary size.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    fingerprint: str
    description: str

    @property
    def format(self) -> Any:
        raise NotImplementedError

    def describe(self, positions: int) -> str:
        """Return the description, with the effect of drawing ``positions`` at a time.

        ``positions`` is an objective's `tokens_needed`.
        """
        return self.description

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check that a model can be trained on the data.

        Args:
            positions: the model's positions.
            more: further positions drawn by the objective.
            remedy: additional advice for the message.

        Raises:
            ValueError: the model does not fit the data, or there are too few.
        """
        raise NotImplementedError

    def batch(self, split: str, num: int, positions: int, generator: Generator) -> Any:
        """Return random items, determined by ``generator`` alone.

        Args:
            split: "train" or "val".
            num: number of items.
            positions: the model's positions.
            generator: random generator.

        Returns:
            The input of an objective's `examples`, with a method ``split(rows)``.
        """
        raise NotImplementedError

    def longest_batch(self, num: int, positions: int, generator: Generator) -> Any:
        """Return a training batch with all items as long as ``positions`` allows.

        A step's peak memory is measured on this batch.

        Args:
            num: number of items.
            positions: the model's positions.
            generator: random generator.
        """
        return self.batch("train", num, positions, generator)

    def windows(self, split: str, num: int, positions: int) -> Any:
        """Return evenly spaced items from first to last, equal at every call.

        Args:
            split: "train" or "val".
            num: largest number of items.
            positions: the model's positions.

        Returns:
            As `batch`.
        """
        raise NotImplementedError

    def log_frequencies(self) -> Float64[Tensor, " outcomes"]:
        """Return the training targets' log frequencies, each count raised by one."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write to a temporary neighbour, fsync, and rename to ``folder``.

        If another process was faster, its equal copy stays.

        Raises:
            ValueError: ``folder`` exists with other content.
            OSError: from the disk.
        """
        with disk.partial_folder(folder) as partial:
            self._write(partial)
            try:
                partial.rename(folder)
            except OSError:  # a non-empty folder cannot be replaced: the loser of a race discards its copy
                if not folder.is_dir():
                    raise
                if disk.read_verified_meta(folder).get("fingerprint") != self.fingerprint:
                    raise ValueError(f"{folder} holds another corpus; choose another folder") from None

    def _write(self, folder: Path) -> None:
        """Write all files of the corpus into an empty folder, `disk.write_meta` last."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> AbstractCorpus:
        """Load a saved corpus, memory-mapped read-only and verified.

        Raises:
            ValueError: a file is missing, cut short or altered; the message names the file.
        """
        raise NotImplementedError


class AbstractRowCorpus(AbstractCorpus):
    """Base of corpora with two sides, each a pair of arrays with matching rows.

    A subclass implements `_gather_rows`.

    Attributes:
        files: file of each array by name; both sides' first arrays, then their second ones.
        plain: attributes written in the folder's description.
        sums: sha256 of each array by name.
    """

    files: ClassVar[Mapping[str, str]]
    plain: ClassVar[tuple[str, ...]]
    train: Any
    val: Any
    sums: Mapping[str, str]

    @classmethod
    def arrays(cls, train: Any, val: Any) -> dict[str, np.ndarray]:
        """Return every array, flattened, by its name in ``files``."""
        flat = (array.reshape(-1) for sides in zip(train, val, strict=True) for array in sides)
        return dict(zip(cls.files, flat, strict=True))

    def batch(self, split: str, num: int, positions: int, generator: Generator) -> Any:
        """Draw random rows, equally likely and with replacement.

        Args:
            split: "train" or "val".
            num: number of rows.
            positions: unused.
            generator: random generator.
        """
        side = self._side(split)
        rows = torch.randint(len(side[0]), (num,), generator=generator, device=generator.device)
        return self._gather_rows(side, rows.cpu().numpy())

    def windows(self, split: str, num: int, positions: int) -> Any:
        """Return evenly spaced rows from first to last.

        Args:
            split: "train" or "val".
            num: largest number of rows.
            positions: unused.
        """
        side = self._side(split)
        count = min(num, len(side[0]))
        return self._gather_rows(side, np.arange(count) * (len(side[0]) - 1) // max(count - 1, 1))

    def _side(self, split: str) -> Any:
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        return self.train if split == "train" else self.val

    def _gather_rows(self, side: Any, rows: np.ndarray) -> Any:
        """Return the batch of these rows of a side."""
        raise NotImplementedError

    def _write(self, folder: Path) -> None:
        for name, array in self.arrays(self.train, self.val).items():
            disk.write_array(folder / self.files[name], array)
        disk.write_meta(folder, {"kind": self.kind, **{key: getattr(self, key) for key in self.plain}, **self.sums})
        disk.fsync(folder)
