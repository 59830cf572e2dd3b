"""Prepared data of every kind share this base: what a run asks of them, and how they are kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

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
