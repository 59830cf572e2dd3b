"""Prepared questions: token sequences of one length with answers, memory-mapped, and random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractRowCorpus

UNASKED = -1  # answer at a position without a question
FILES = {
    "train_tokens": "train.npy",
    "val_tokens": "val.npy",
    "train_answers": "train_answers.npy",
    "val_answers": "val_answers.npy",
}


@dataclass(frozen=True, eq=False)
class QuestionBatch:
    """A batch of ``tokens_BN`` (int64) and ``answers_BN`` (int64).

    An answer is the correct token after its position, or `UNASKED`.
    """

    tokens_BN: Tensor
    answers_BN: Tensor

    def __len__(self) -> int:
        return len(self.tokens_BN)

    def split(self, rows: int) -> list[QuestionBatch]:
        """Cut the batch into parts of ``rows`` sequences, the last one shorter; views."""
        parts = zip(self.tokens_BN.split(rows), self.answers_BN.split(rows), strict=True)
        return [QuestionBatch(*part) for part in parts]


class Side(NamedTuple):
    """One side's ``tokens_MN`` and ``answers_MN``, both uint16.

    An answer equals the vocabulary's size at positions without a question.
    """

    tokens_MN: np.ndarray
    answers_MN: np.ndarray


@dataclass(frozen=True, eq=False)
class QuestionCorpus(AbstractRowCorpus):
    """Sequences of one length with their answers; built with `QuestionCorpus.of`.

    Attributes:
        vocab_size: vocabulary size.
        length: tokens of a sequence.
        sums: sha256 of each array by name.
    """

    kind: ClassVar[str] = "questions"
    files = FILES
    plain = ("fingerprint", "description", "vocab_size", "length")
    side = Side

    train: Side
    val: Side
    vocab_size: int
    length: int
    fingerprint: str
    description: str
    sums: Mapping[str, str]

    @classmethod
    def of(cls, train: Side, val: Side, vocab_size: int, origin: str) -> QuestionCorpus:
        """Return a corpus from two sides.

        Args:
            train: the training side.
            val: the held-out side.
            vocab_size: vocabulary size.
            origin: the source, for the description.
        """
        for tokens_MN, answers_MN in (train, val):
            assert tokens_MN.dtype == answers_MN.dtype == np.uint16 and tokens_MN.shape == answers_MN.shape
            assert tokens_MN.max() < vocab_size and (answers_MN < vocab_size).any(1).all(), "nothing is asked in a row"
        length = train.tokens_MN.shape[1]
        description = f"{origin}: {len(train.tokens_MN):,} training and {len(val.tokens_MN):,} held-out sequences"
        return cls.make(train, val, description=description, vocab_size=vocab_size, length=length)

    @property
    def format(self) -> int:
        return self.vocab_size

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check that a sequence is as long as the model needs.

        Args:
            positions: the model's positions.
            more: further positions drawn by the objective.
            remedy: unused.

        Raises:
            ValueError: the lengths differ.
        """
        if positions + more != self.length:
            raise ValueError(
                f"model.positions={positions}: every sequence has {self.length} tokens; give "
                f"model.positions={self.length - more} or data.length={positions + more}"
            )

    def log_frequencies(self) -> Float64[Tensor, " vocabulary"]:
        """Return log frequencies of the training answers, each count raised by one."""
        asked = self.train.answers_MN[self.train.answers_MN < self.vocab_size]
        counts = np.bincount(asked, minlength=self.vocab_size) + 1
        return torch.from_numpy(np.log(counts / counts.sum()))

    def _gather_rows(self, side: Side, rows: np.ndarray, positions: int) -> QuestionBatch:
        tokens_BN, answers_BN = (torch.from_numpy(array[rows].astype(np.int64)) for array in side)
        return QuestionBatch(tokens_BN, answers_BN.masked_fill(answers_BN == self.vocab_size, UNASKED))

    @classmethod
    def _shapes(cls, plain: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (-1, plain["length"]), (-1, plain["length"])
