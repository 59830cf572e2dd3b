"""Prepared rows of sentences: pairs, pairs with a score, or triplets, with random batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from stability.corpora.base import AbstractRowCorpus
from stability.corpora.io import disk
from stability.corpora.io.arrays import sha256, token_dtype
from stability.corpora.tokens.vocabulary import BYTES

VERSION = 1  # increased if equal rows would be laid out differently; part of every fingerprint
FEWEST_ROWS = 2  # of a side: in-batch negatives come from another row
OF_ROWS = {
    "train_rows": "train.npy",
    "val_rows": "val.npy",
    "train_scores": "train_scores.npy",
    "val_scores": "val_scores.npy",
}
FILES = {**OF_ROWS, "tokens": "tokens.npy", "starts": "starts.npy"}
PLAIN = ("fingerprint", "description", "vocab_size", "sentences", "scored")


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
    files = OF_ROWS
    plain = PLAIN

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
        arrays = cls.arrays(train, val) | {"tokens": tokens, "starts": starts}
        sums = {name: sha256(array) for name, array in arrays.items()}
        num = train.rows_MS.shape[1]
        what = "triplets" if num == 3 else "scored pairs" if scored else "pairs"
        description = f"{origin}: {len(train.scores_M):,} training and {len(val.scores_M):,} held-out {what}"
        fingerprint = _fingerprint(vocab_size, num, scored, sums)
        return cls(train, val, tokens, starts, vocab_size, num, scored, fingerprint, description, sums)

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
                    "share no sentence"
                )

    def log_frequencies(self) -> Float64[Tensor, " 2"]:
        """Return the logs of (1 − ȳ)/2 and (1 + ȳ)/2, with ȳ the mean training score.

        Each of the two counts is raised by one.
        """
        scores = self.train.scores_M.astype(np.float64)
        counts = np.array([((1 - scores) / 2).sum(), ((1 + scores) / 2).sum()]) + 1
        return torch.from_numpy(np.log(counts / counts.sum()))

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> SentenceBatch:
        """Draw random rows, without repetition as long as the side has as many.

        Args:
            split: "train" or "val".
            num: number of rows.
            positions: tokens after which a sentence is cut.
            generator: random generator.
        """
        side = self._side(split)
        size = len(side.scores_M)
        rounds = [
            torch.randperm(size, generator=generator, device=generator.device)[: num - start].cpu().numpy()
            for start in range(0, num, size)
        ]
        return self._gather(side, np.concatenate(rounds), positions)

    def longest_batch(self, num: int, positions: int, generator: torch.Generator) -> SentenceBatch:
        return self.batch("train", num, positions, generator)

    def windows(self, split: str, num: int, positions: int) -> SentenceBatch:
        """Return evenly spaced rows from first to last.

        Args:
            split: "train" or "val".
            num: largest number of rows.
            positions: tokens after which a sentence is cut.
        """
        side = self._side(split)
        count = min(num, len(side.scores_M))
        return self._gather(side, np.arange(count) * (len(side.scores_M) - 1) // max(count - 1, 1), positions)

    def list_texts(self, column: int) -> list[str]:
        """Return the different sentences of a column of both sides, whole, in the order of their numbers."""
        numbers = np.unique(np.concatenate([side.rows_MS[:, column] for side in (self.train, self.val)]))
        return [BYTES.decode(self.tokens[self.starts[each] : self.starts[each + 1]]) for each in numbers.astype(int)]

    def _gather(self, side: Side, rows: np.ndarray, positions: int) -> SentenceBatch:
        """Return the batch of these rows of a side."""
        numbers_BS = np.asarray(side.rows_MS[rows]).astype(np.int64)
        sentences = [self.tokens[self.starts[each] : self.starts[each + 1]] for each in numbers_BS.flatten()]
        tokens, mask = pad_sentences(sentences, positions, self.vocab_size)
        shape = (*numbers_BS.shape, positions)
        scores_B = torch.from_numpy(np.array(side.scores_M[rows], dtype=np.float32))
        return SentenceBatch(tokens.reshape(shape), mask.reshape(shape), scores_B)

    def _write(self, folder: Path) -> None:
        arrays = self.arrays(self.train, self.val) | {"tokens": self.tokens, "starts": self.starts}
        for name, array in arrays.items():
            disk.write_array(folder / FILES[name], array)
        disk.write_meta(folder, {"kind": self.kind, **{key: getattr(self, key) for key in PLAIN}, **self.sums})
        disk.fsync(folder)

    @classmethod
    def load(cls, folder: Path) -> SentenceCorpus:
        """Load a folder's corpus, memory-mapped and verified by its sums.

        Raises:
            ValueError: a file is damaged.
        """
        meta: dict[str, Any] = disk.read_meta(folder, {"kind", *PLAIN, *FILES}, set())
        sums = {name: meta[name] for name in FILES}
        if meta["fingerprint"] != _fingerprint(meta["vocab_size"], meta["sentences"], meta["scored"], sums):
            raise disk.make_damage_error(folder / disk.META, "its fingerprint is not that of its sentences")
        found = {name: disk.read_array(folder / file, sums[name]) for name, file in FILES.items()}
        train, val = (
            Side(found[f"{side}_rows"].reshape(-1, meta["sentences"]), found[f"{side}_scores"])
            for side in ("train", "val")
        )
        plain = {key: meta[key] for key in PLAIN}
        return cls(train, val, found["tokens"], found["starts"], **plain, sums=sums)


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


def _fingerprint(vocab_size: int, sentences: int, scored: bool, sums: Mapping[str, str]) -> str:
    layout = [VERSION, vocab_size, sentences, scored]
    return disk.sha256_of_json(["stability sentences", *layout, *(sums[name] for name in FILES)])
