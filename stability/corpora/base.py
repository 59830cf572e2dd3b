"""Base classes of prepared data: their interface for runs, and their storage in a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float64
from torch import Generator, Tensor

from stability.corpora.io import disk
from stability.corpora.io.disk import sha256

OF_SIDES = 4  # arrays of the two sides of a row corpus


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

    def advise_more(self, num: int, asked: int, positions: int) -> str:
        """Return the amount of data that gives ``asked`` held-out examples.

        Args:
            num: held-out examples of these data, fewer than ``asked``.
            asked: held-out examples that are wanted.
            positions: as for `windows`.
        """
        return f"about {math.ceil(10 * asked / num) / 10:,g} times as much data would give them"

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

    A subclass is a frozen dataclass with the fields ``train``, ``val``, ``sums`` and those of ``plain``, and implements
    `_gather_rows` and `_shapes`.

    Attributes:
        files: file of each array by name: both sides' first arrays, their second ones, then arrays of both sides, which
            are fields.
        plain: attributes written in the folder's description.
        side: the class of a side.
        sums: sha256 of each array by name.
    """

    files: ClassVar[Mapping[str, str]]
    plain: ClassVar[tuple[str, ...]]
    side: ClassVar[type]
    train: Any
    val: Any
    sums: Mapping[str, str]

    @classmethod
    def make(cls, train: Any, val: Any, *shared: np.ndarray, **plain: Any) -> Any:
        """Return the corpus of these arrays, with their sums and its fingerprint.

        Args:
            train: the training side.
            val: the held-out side.
            *shared: arrays of both sides.
            **plain: values of ``plain``, without the fingerprint.
        """
        arrays = cls._list_arrays(train, val, *shared)
        sums = {name: sha256(array) for name, array in arrays.items()}
        return cls._restore(train, val, arrays, {**plain, "fingerprint": cls._fingerprint(plain, sums)}, sums)

    @classmethod
    def load(cls, folder: Path) -> Any:
        """Load a folder's corpus, memory-mapped and verified by its sums.

        Raises:
            ValueError: a file is damaged.
        """
        meta: dict[str, Any] = disk.read_meta(folder, {"kind", *cls.plain, *cls.files}, set())
        sums, plain = ({key: meta[key] for key in keys} for keys in (cls.files, cls.plain))
        if plain["fingerprint"] != cls._fingerprint(plain, sums):
            raise disk.make_damage_error(folder / disk.META, "its fingerprint is not that of its content")
        arrays = {name: disk.read_array(folder / file, sums[name]) for name, file in cls.files.items()}
        columns, (first, second) = list(arrays.values()), cls._shapes(plain)
        train, val = (cls.side(columns[at].reshape(first), columns[at + 2].reshape(second)) for at in (0, 1))
        return cls._restore(train, val, arrays, plain, sums)

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> Any:
        """Draw random rows, equally likely and with replacement.

        Args:
            split: "train" or "val".
            num: number of rows.
            positions: the model's positions.
            generator: random generator.
        """
        side = self._side(split)
        return self._gather_rows(side, self._draw_rows(len(side[0]), num, generator), positions)

    def windows(self, split: str, num: int, positions: int) -> Any:
        """Return evenly spaced rows from first to last.

        Args:
            split: "train" or "val".
            num: largest number of rows.
            positions: the model's positions.
        """
        side = self._side(split)
        count = min(num, len(side[0]))
        return self._gather_rows(side, np.arange(count) * (len(side[0]) - 1) // max(count - 1, 1), positions)

    def _side(self, split: str) -> Any:
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        return self.train if split == "train" else self.val

    def _draw_rows(self, size: int, num: int, generator: torch.Generator) -> np.ndarray:
        """Return ``num`` random row numbers below ``size``."""
        return torch.randint(size, (num,), generator=generator, device=generator.device).cpu().numpy()

    def _gather_rows(self, side: Any, rows: np.ndarray, positions: int) -> Any:
        """Return the batch of these rows of a side."""
        raise NotImplementedError

    @classmethod
    def _list_arrays(cls, train: Any, val: Any, *shared: np.ndarray) -> dict[str, np.ndarray]:
        """Return every array, flattened, by its name in ``files``."""
        arrays = [array.reshape(-1) for sides in zip(train, val, strict=True) for array in sides]
        return dict(zip(cls.files, [*arrays, *shared], strict=True))

    @classmethod
    def _shapes(cls, plain: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a side's two arrays, the number of rows as -1."""
        raise NotImplementedError

    @classmethod
    def _layout(cls, plain: Mapping[str, Any]) -> list[Any]:
        """Return the values of ``plain`` that are part of the fingerprint."""
        return [plain[key] for key in cls.plain if key not in ("fingerprint", "description")]

    @classmethod
    def _fields(cls, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of the values of ``plain``."""
        return plain

    @classmethod
    def _restore(
        cls,
        train: Any,
        val: Any,
        arrays: Mapping[str, np.ndarray],
        plain: Mapping[str, Any],
        sums: Mapping[str, str],
    ) -> Any:
        shared = {name: arrays[name] for name in list(cls.files)[OF_SIDES:]}
        make: Any = cls  # a dataclass
        return make(train=train, val=val, sums=sums, **shared, **cls._fields(plain))

    @classmethod
    def _fingerprint(cls, plain: Mapping[str, Any], sums: Mapping[str, str]) -> str:
        content = [cls.version, *cls._layout(plain), *(sums[name] for name in cls.files)]
        return disk.sha256_of_json([f"stability {cls.kind}", *content])

    def _write(self, folder: Path) -> None:
        shared = (getattr(self, name) for name in list(self.files)[OF_SIDES:])
        for name, array in self._list_arrays(self.train, self.val, *shared).items():
            disk.write_array(folder / self.files[name], array)
        disk.write_meta(folder, {"kind": self.kind, **{key: getattr(self, key) for key in self.plain}, **self.sums})
        disk.fsync(folder)
