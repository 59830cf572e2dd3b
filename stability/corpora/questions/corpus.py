"""Prepared questions: token sequences of one length with answers, memory-mapped, drawn from a seed or held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from pydantic import Field
from torch import Tensor

from stability.config import Settings
from stability.corpora.base import AbstractRowCorpus
from stability.corpora.tokens.synthetic_genome import Draws

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


ROUNDS = 8  # draws of a whole training side before a source is rejected as too small
LARGEST_VOCABULARY = 2**15


class AbstractDrawn(Settings):
    """Settings of every source with random sequences: number, length and seed."""

    vocab_size: int = Field(default=64, ge=4, le=LARGEST_VOCABULARY, description="tokens of the vocabulary")
    length: int = Field(default=64, ge=2, le=2**20, description="tokens of a sequence; model.positions must be as many")
    num: int = Field(default=50_000, ge=1, le=10**7, description="training sequences")
    held_out: int = Field(default=1000, ge=1, le=10**6, description="held-out sequences, none of which is trained on")
    seed: int = Field(default=0, ge=0, lt=2**20, description="seed that the sequences are drawn from")


def corpus_of(config: AbstractDrawn, draw: Callable[[Draws, int, bool], Side], origin: str) -> QuestionCorpus:
    """Return a source's corpus with disjoint sides.

    Held-out sequences are drawn first, without repetitions. Training sequences are further draws not among them.

    Args:
        config: the settings.
        draw: returns sequences with answers from (random stream, their number, whether they are for training).
        origin: the source, for the description.

    Raises:
        ValueError: the settings allow too few sequences for both sides.
    """
    draws = Draws(config.seed)
    val, held = _remove_known(draw(draws, config.held_out, False), set())
    parts, missing = [], config.num
    for _ in range(ROUNDS):
        drawn = draw(draws, config.num, True)
        known = np.array([row.tobytes() in held for row in drawn.tokens_MN])
        parts.append(Side(*(array[~known][:missing] for array in drawn)))
        missing -= len(parts[-1].tokens_MN)
        if not missing:
            train = Side(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
            return QuestionCorpus.of(train, val, config.vocab_size, origin)
    raise ValueError(
        f"data.held_out={config.held_out}: {origin} are so few that nearly all would be held out; hold out fewer, or "
        "make the vocabulary larger or the sequences longer"
    )


def _remove_known(side: Side, known: set[bytes]) -> tuple[Side, set[bytes]]:
    """Return a side without known sequences, and the known ones plus its own."""
    kept = []
    for row, tokens_N in enumerate(side.tokens_MN):
        if (content := tokens_N.tobytes()) not in known:
            known.add(content)
            kept.append(row)
    return Side(*(array[kept] for array in side)), known


def draw_different(draws: Draws, num: int, choices: int, chosen: int) -> np.ndarray:
    """Return different random numbers below ``choices``, every choice equally likely.

    Args:
        draws: the random stream.
        num: number of rows.
        choices: upper bound, exclusive.
        chosen: numbers in a row.

    Returns:
        (num, chosen) int64, in random order.
    """
    return np.argsort(draws.draw_below(2**53, num * choices).reshape(num, choices), axis=1, kind="stable")[:, :chosen]


def draw_different_weighted(draws: Draws, num: int, weights: np.ndarray, chosen: int) -> np.ndarray:
    """Return different random indices, drawn without replacement by weight.

    Each is drawn with a probability proportional to its weight among the remaining ones. The method ranks exponential
    variables divided by the weights (Efraimidis and Spirakis 2006).

    Args:
        draws: the random stream.
        num: number of rows.
        weights: positive weight of each index, 1-D.
        chosen: indices in a row.

    Returns:
        (num, chosen) int64, in drawing order.
    """
    uniform = (draws.draw_below(2**53, num * len(weights)).reshape(num, -1) + 0.5) / 2**53
    return np.argsort(-np.log(uniform) / weights, axis=1, kind="stable")[:, :chosen]
