"""Prepared rows of sentences: pairs, pairs with a score, or triplets, with random batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractRowCorpus
from stability.corpora.io.disk import token_dtype
from stability.corpora.tokens.vocabulary import BYTES

FEWEST_ROWS = 2  # of a side: in-batch negatives come from another row
FILES = {
    "train_rows": "train.npy",
    "val_rows": "val.npy",
    "train_scores": "train_scores.npy",
    "val_scores": "val_scores.npy",
    "tokens": "tokens.npy",
    "starts": "starts.npy",
}


@dataclass(frozen=True, eq=False)
class SentenceBatch:
    """A batch of rows of S sentences each.

    Attributes:
        tokens_BSN: int64, cut at N tokens; one id past the vocabulary at padding.
        mask_BSN: False at padding.
        scores_B: float32, the score of each row; 1 without scores.
    """

    tokens_BSN: Tensor
    mask_BSN: Tensor
    scores_B: Tensor

    def __len__(self) -> int:
        return len(self.tokens_BSN)

    def split(self, rows: int) -> list[SentenceBatch]:
        """Cut the batch into parts of ``rows`` rows, the last one shorter; views."""
        parts = zip(self.tokens_BSN.split(rows), self.mask_BSN.split(rows), self.scores_B.split(rows), strict=True)
        return [SentenceBatch(*part) for part in parts]


class Side(NamedTuple):
    """One side's ``rows_MS`` (uint32, numbers of sentences) and ``scores_M`` (float32)."""

    rows_MS: np.ndarray
    scores_M: np.ndarray


@dataclass(frozen=True, eq=False)
class SentenceCorpus(AbstractRowCorpus):
    """Rows of sentences, each sentence stored once; built with `SentenceCorpus.of`.

    Attributes:
        tokens: tokens of all sentences, one after the other.
        starts: int64, first token of each sentence, and the number of tokens at the end.
        vocab_size: vocabulary size.
        sentences: S, sentences of a row: 2 (first, second) or 3 (anchor, positive, negative).
        scored: whether rows have scores from -1 to 1; else the first two sentences of each row belong together.
        sums: sha256 of each array by name.
    """

    kind: ClassVar[str] = "sentences"
    files = FILES
    plain = ("fingerprint", "description", "vocab_size", "sentences", "scored")
    side = Side

    train: Side
    val: Side
    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int
    sentences: int
    scored: bool
    fingerprint: str
    description: str
    sums: Mapping[str, str]

    @classmethod
    def of(
        cls, train: Side, val: Side, sentences: Sequence[np.ndarray], *, vocab_size: int, scored: bool, origin: str
    ) -> SentenceCorpus:
        """Return a corpus from two sides.

        Args:
            train: the training side.
            val: the held-out side.
            sentences: tokens of each sentence.
            vocab_size: vocabulary size.
            scored: whether rows have scores.
            origin: the source, for the description.
        """
        starts = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        tokens = np.concatenate(sentences).astype(token_dtype(vocab_size))
        num = train.rows_MS.shape[1]
        what = "triplets" if num == 3 else "scored pairs" if scored else "pairs"
        description = f"{origin}: {len(train.scores_M):,} training and {len(val.scores_M):,} held-out {what}"
        plain = {"description": description, "vocab_size": vocab_size, "sentences": num, "scored": scored}
        return cls.make(train, val, tokens, starts, **plain)

    @property
    def format(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "sentences": self.sentences, "scored": self.scored}

    def describe(self, positions: int) -> str:
        lengths = np.diff(self.starts)
        share = (lengths > positions).mean()
        cut = f"; {100 * share:.0f} % of the sentences are cut at {positions} tokens" if share >= 0.005 else ""
        return f"{self.description}{cut}"

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check that both sides have enough rows; every length fits, since sentences are cut or padded.

        Args:
            positions: the model's positions.
            more: unused.
            remedy: unused.

        Raises:
            ValueError: a side has fewer than two rows.
        """
        for side, which in ((self.train, "training"), (self.val, "held-out")):
            if len(side.scores_M) < FEWEST_ROWS:
                raise ValueError(
                    f"data: {self.description}: the {which} side needs at least {FEWEST_ROWS} rows; give more that "
                    "share no sentence, or another data.hold_out"
                )

    def log_frequencies(self) -> Float64[Tensor, " 2"]:
        """Return the logs of (1 − ȳ)/2 and (1 + ȳ)/2, with ȳ the mean training score.

        Each of the two counts is raised by one.
        """
        scores = self.train.scores_M.astype(np.float64)
        counts = np.array([((1 - scores) / 2).sum(), ((1 + scores) / 2).sum()]) + 1
        return torch.from_numpy(np.log(counts / counts.sum()))

    def _draw_rows(self, size: int, num: int, generator: torch.Generator) -> np.ndarray:
        """Return random row numbers, without repetition as long as there are as many rows."""
        rounds = [
            torch.randperm(size, generator=generator, device=generator.device)[: num - start].cpu().numpy()
            for start in range(0, num, size)
        ]
        return np.concatenate(rounds)

    def list_texts(self, column: int) -> list[str]:
        """Return the different sentences of a column of both sides, whole, in the order of their numbers."""
        numbers = np.unique(np.concatenate([side.rows_MS[:, column] for side in (self.train, self.val)]))
        return [BYTES.decode(self.tokens[self.starts[each] : self.starts[each + 1]]) for each in numbers.astype(int)]

    def _gather_rows(self, side: Side, rows: np.ndarray, positions: int) -> SentenceBatch:
        numbers_BS = np.asarray(side.rows_MS[rows]).astype(np.int64)
        sentences = [self.tokens[self.starts[each] : self.starts[each + 1]] for each in numbers_BS.flatten()]
        tokens, mask = pad_sentences(sentences, positions, self.vocab_size)
        shape = (*numbers_BS.shape, positions)
        scores_B = torch.from_numpy(np.array(side.scores_M[rows], dtype=np.float32))
        return SentenceBatch(tokens.reshape(shape), mask.reshape(shape), scores_B)

    @classmethod
    def _shapes(cls, plain: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (-1, plain["sentences"]), (-1,)


def pad_sentences(sentences: Sequence[np.ndarray], positions: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return tokens (B, N), int64, and their mask, False at padding; sentences are cut at N tokens.

    Args:
        sentences: tokens of each sentence.
        positions: N.
        padding: token at padding.
    """
    tokens_BN = np.full((len(sentences), positions), padding, dtype=np.int64)
    lengths_B = np.array([min(len(sentence), positions) for sentence in sentences])
    for row, (sentence, length) in enumerate(zip(sentences, lengths_B, strict=True)):
        tokens_BN[row, :length] = sentence[:length]
    return torch.from_numpy(tokens_BN), torch.from_numpy(np.arange(positions) < lengths_B[:, None])
