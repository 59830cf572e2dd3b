"""`Corpus`: training and held-out tokens with a fingerprint, and random windows.

All data sources of tokens produce a `Corpus`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, SupportsInt

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from stability.corpora.base import AbstractCorpus
from stability.corpora.io import disk
from stability.corpora.io.disk import sha256, sha256_and_counts
from stability.corpora.tokens.augmentation import ARRAY_NAMES, NAMES, AbstractAugmentation, load_augmentation
from stability.corpora.tokens.vocabulary import BYTES, Vocabulary
from stability.runs.directory import fsync

# increased if equal documents would be split or laid out differently; part of every fingerprint
SPLIT_VERSION = 1
HELD_OUT_PERCENT = 1
SPLITS = ("train", "val")
FEWEST_POSITIONS = 2  # smallest valid model.positions
STAND_IN_TOKENS = 1 << 20  # on each side of a dry run's random data: enough for any validation
_ARRAYS = {"train_tokens": "train.npy", "val_tokens": "val.npy"}
_BORDERS = {"train_borders": "train_borders.npy", "val_borders": "val_borders.npy"}
_OF_AUGMENTATION = {name: f"{name}.npy" for name in ARRAY_NAMES}
_VOCABULARY = "vocabulary.json"
_PLAIN = ("vocab_size", "fingerprint", "description", "num_train_documents", "num_val_documents", "unigram_nats")


@dataclass(frozen=True, eq=False)
class Corpus(AbstractCorpus):
    """Prepared tokens of a training and a held-out side.

    Build one with `Corpus.of` (from tokens), `split_documents` or `split_records`.

    Attributes:
        fingerprint: sha256 over both arrays, vocabulary, borders, augmentation and `SPLIT_VERSION`; independent of the
            data's location.
        description: one line from the first preparation; equal content read from elsewhere keeps this line.
        unigram_nats: nats per validation token under the training frequencies, each count raised by one. For comparing
            preparations between programs; runs are judged by `stability.training.evaluate.Validation.unigram_nll` on
            their own validation examples.
        vocabulary: the tokens' bytes; None: UTF-8 bytes if there are 256 tokens, else unknown.
        train_borders: int64, from 0 to the number of tokens; no window crosses one. None: a window may start anywhere.
        val_borders: the same for held-out tokens.
        augmentation: random change of training windows in `batch`; None: none.
        sums: sha256 of each array and of the vocabulary, by name.
    """

    kind: ClassVar[str] = "tokens"
    version: ClassVar[int] = SPLIT_VERSION

    train_tokens: np.ndarray
    val_tokens: np.ndarray
    vocab_size: int
    fingerprint: str
    description: str
    num_train_documents: int
    num_val_documents: int
    unigram_nats: float
    vocabulary: Vocabulary | None = None
    train_borders: np.ndarray | None = None
    val_borders: np.ndarray | None = None
    augmentation: AbstractAugmentation | None = None
    sums: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def format(self) -> int:
        return self.vocab_size

    @classmethod
    def of(
        cls,
        train: np.ndarray,
        val: np.ndarray,
        *,
        vocab_size: int,
        description: str,
        num_train_documents: int,
        num_val_documents: int,
        vocabulary: Vocabulary | None = None,
        borders: tuple[np.ndarray, np.ndarray] | None = None,
        augmentation: AbstractAugmentation | None = None,
    ) -> Corpus:
        """Return a corpus from two 1-D arrays, both uint16 or both uint32.

        Args:
            train: training tokens.
            val: held-out tokens.
            vocab_size: vocabulary size.
            description: one line on the source.
            num_train_documents: number of training documents or records.
            num_val_documents: number of held-out documents or records.
            vocabulary: the tokens' bytes, if known.
            borders: borders of training and held-out tokens, or None.
            augmentation: random change of training windows, or None.

        Raises:
            ValueError: a side is empty or a token reaches ``vocab_size``.
        """
        assert vocabulary is None or len(vocabulary.pieces) == vocab_size, (
            f"{vocab_size} tokens with a vocabulary of another size"
        )
        sums, counts = count_tokens(train, val, vocab_size)
        vocabulary = None if vocabulary == BYTES else vocabulary
        bounds = dict(zip(_BORDERS, borders, strict=True)) if borders else {}
        kept = {}
        if augmentation is not None:
            assert borders is not None, "an augmented corpus has borders"
            augmentation.require(vocabulary, len(borders[0]) - 1)
            kept = augmentation.arrays()
        extra = {
            **{name: sha256(array) for name, array in {**bounds, **kept}.items()},
            **({"vocabulary": vocabulary.sha256()} if vocabulary else {}),
        }
        return cls(
            train,
            val,
            vocab_size,
            _fingerprint(vocab_size, sums, {**extra, **_mark(augmentation)}),
            description,
            num_train_documents,
            num_val_documents,
            cross_entropy(*counts),
            vocabulary=vocabulary,
            augmentation=augmentation,
            sums={**sums, **extra},
            **bounds,
        )

    def require(self, positions: int, more: int = 0, remedy: str = "") -> None:
        """Check that both sides have at least two windows.

        Args:
            positions: the model's positions.
            more: further tokens in a window for the objective, e.g. a context or the next token.
            remedy: advice in addition to longer documents and fewer positions.

        Raises:
            ValueError: a side has fewer than two windows of ``positions + more`` tokens.
        """
        for side, split in ((f"the held-out {HELD_OUT_PERCENT} %", "val"), ("the training side", "train")):
            tokens, borders = self._side(split)
            if count_windows(len(tokens), borders, positions + more) < 2:
                stretches = "" if borders is None else f" in stretches of at most {int(np.diff(borders).max()):,}"
                windows = (
                    f"two windows{f' of {positions + more:,}' if more else ''}"
                    f"{' with objective.context' if more > 1 else ''}"
                )
                raise ValueError(
                    f"data: {side} has {len(tokens):,} tokens{stretches}; model.positions={positions} needs at least "
                    f"{2 * (positions + more):,} ({windows}).\nGive more or longer "
                    f"documents{remedy}{self._shorter(more)}. Read: {self.description}"
                )

    def _shorter(self, more: int) -> str:
        """Return advice with the most positions accepted by `require`; "" if below any model's."""
        most = min(longest_pair(len(tokens), borders) for tokens, borders in map(self._side, SPLITS)) - more
        return f", or model.positions={most} or less" if most >= FEWEST_POSITIONS else ""

    def describe(self, positions: int) -> str:
        """Return the description with the share of stretches shorter than ``positions`` tokens."""
        if self.train_borders is None or self.val_borders is None:
            return self.description
        found = [too_short(borders, positions) for borders in (self.train_borders, self.val_borders)]
        num, num_tokens = (sum(column) for column in zip(*found, strict=True))
        share = 100 * num_tokens / (len(self.train_tokens) + len(self.val_tokens))
        return self.description + (
            f"; stretches shorter than {positions:,} left out: {num:,}, {share:.2g} % of it" if num else ""
        )

    def log_frequencies(self) -> Float64[Tensor, " vocabulary"]:
        """Return the training tokens' log frequencies, as used by `unigram_nats`.

        Each count is raised by one. Reads the training side once.
        """
        return log_frequencies(self.train_tokens, self.vocab_size)

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> Int64[Tensor, "num positions"]:
        """Draw random windows, every start equally likely, none across a border.

        Windows and their augmentation depend on ``generator`` alone. Training seeds one by (seed, purpose, index), so
        the data order is a function of the step and a resumed run continues with the same windows.

        Args:
            split: "train" or "val".
            num: number of windows.
            positions: tokens per window.
            generator: random generator.

        Returns:
            Windows on the CPU.

        Raises:
            ValueError: the split is unknown or has no window.
        """
        tokens, borders = self._select_side(split, positions)
        starts = draw_starts(len(tokens), borders, positions, num, generator)
        windows = _gather(tokens, starts, positions)
        if self.augmentation is None or split != "train":
            return windows
        assert borders is not None
        stretch_B = stretches_of(borders, starts)
        return self.augmentation.augmented(windows, self.vocabulary, stretch_B, generator)

    def windows(self, split: str, num: int, positions: int) -> Int64[Tensor, "at_most_num positions"]:
        """Return evenly spaced windows from first to last, equal at every call.

        They neither overlap nor cross a border.

        Args:
            split: "train" or "val".
            num: largest number of windows.
            positions: tokens per window.

        Raises:
            ValueError: as `batch`.
        """
        tokens, borders = self._select_side(split, positions)
        return _gather(tokens, spread_starts(len(tokens), borders, positions, num), positions)

    def advise_more(self, num: int, asked: int, positions: int) -> str:
        """Return the number of documents that gives ``asked`` held-out windows.

        Documents are assumed to be as long as these on average. Without borders a window may cross documents, so only
        their tokens count.

        Args:
            num: held-out windows of these data.
            asked: held-out windows that are wanted.
            positions: tokens per window.
        """
        documents = self.num_train_documents + self.num_val_documents
        if self.val_borders is not None or not documents:
            return super().advise_more(num, asked, positions)
        # tokens of a document and the separator after it; the last document of each side has none
        each = (len(self.train_tokens) + len(self.val_tokens) + 2) / documents
        held_out = math.ceil((asked * positions + 1) / each)
        wanted = (held_out - 1) * 100 // HELD_OUT_PERCENT + 1  # the fewest of which 1 %, rounded up, are so many
        return (
            f"{HELD_OUT_PERCENT} % of the documents is held out: about {wanted:,} documents of this length give as "
            f"many ({documents:,} now)"
        )

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the tokens' text or nucleotides.

        Raises:
            ValueError: a token is outside the vocabulary, or the vocabulary is unknown.
        """
        vocabulary = self.vocabulary or (BYTES if self.vocab_size == len(BYTES.pieces) else None)
        if vocabulary is None:
            raise ValueError(
                f"data: what its {self.vocab_size:,} tokens stand for was not kept; read: {self.description}"
            )
        return vocabulary.decode(tokens)

    def _side(self, split: str) -> tuple[np.ndarray, np.ndarray | None]:
        return (self.train_tokens, self.train_borders) if split == "train" else (self.val_tokens, self.val_borders)

    def _select_side(self, split: str, positions: int) -> tuple[np.ndarray, np.ndarray | None]:
        if split not in SPLITS:
            raise ValueError(f"no split '{split}'; choices: train, val")
        tokens, borders = self._side(split)
        if not count_windows(len(tokens), borders, positions):
            raise ValueError(
                f"data: the split '{split}' has {len(tokens):,} tokens; one window of {positions} does not fit"
            )
        return tokens, borders

    def _write(self, folder: Path) -> None:
        kept = {} if self.augmentation is None else self.augmentation.arrays()
        for name, file in {**_ARRAYS, **_BORDERS, **_OF_AUGMENTATION}.items():
            if name in self.sums:
                disk.write_array(folder / file, kept[name] if name in kept else getattr(self, name))
        if self.vocabulary is not None:
            disk.write_text(folder / _VOCABULARY, self.vocabulary.to_json())
        # defaults are left out, so a corpus of bytes is written as in older versions
        plain = {key: getattr(self, key) for key in _PLAIN}
        disk.write_meta(folder, {**plain, **_mark(self.augmentation), **self.sums})
        fsync(folder)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Load a saved corpus, its tokens memory-mapped read-only, everything verified by sha256.

        Raises:
            ValueError: a file is missing, cut short or altered; the message names the file.
        """
        meta = disk.read_meta(folder, {*_PLAIN, *_ARRAYS}, {*_BORDERS, *_OF_AUGMENTATION, "vocabulary", *NAMES})
        sums = {name: meta[name] for name in _ARRAYS}
        extra = {name: meta[name] for name in (*_BORDERS, *_OF_AUGMENTATION, "vocabulary") if name in meta}
        marks = {name: meta[name] for name in NAMES if name in meta}
        if meta["fingerprint"] != _fingerprint(meta["vocab_size"], sums, {**extra, **marks}):
            raise disk.make_damage_error(folder / disk.META, "its fingerprint is not that of its tokens")
        files = {**_ARRAYS, **_BORDERS, **_OF_AUGMENTATION}
        parts: dict[str, Any] = {
            name: disk.read_array(folder / file, meta[name]) for name, file in files.items() if name in meta
        }
        if "vocabulary" in meta:
            parts["vocabulary"] = Vocabulary.from_json(disk.read_text(folder / _VOCABULARY, meta["vocabulary"]))
        augmentation = load_augmentation(meta, {name: parts.pop(name) for name in ARRAY_NAMES if name in parts})
        return cls(**{key: meta[key] for key in _PLAIN}, **parts, augmentation=augmentation, sums={**sums, **extra})


def _gather(tokens: np.ndarray, starts: np.ndarray, positions: int) -> Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(positions)].astype(np.int64))


def _mark(augmentation: AbstractAugmentation | None) -> dict[str, bool]:
    return {} if augmentation is None else {augmentation.name: True}


def draw_stand_in(vocab_size: int, description: str) -> Corpus:
    """Return random tokens in place of data that a dry run does not prepare.

    Args:
        vocab_size: size of the data's vocabulary.
        description: of the data.
    """
    draws = np.random.default_rng(0)
    train, val = (
        draws.integers(vocab_size, size=STAND_IN_TOKENS).astype(disk.token_dtype(vocab_size)) for _ in range(2)
    )
    return Corpus.of(
        train, val, vocab_size=vocab_size, description=description, num_train_documents=0, num_val_documents=0
    )


def _fingerprint(vocab_size: int, sums: Mapping[str, str], further: Mapping[str, Any]) -> str:
    listed = ["stability corpus", SPLIT_VERSION, vocab_size, *sums.values()]
    # without `further`, a corpus of bytes has the same fingerprint as in older versions
    return disk.sha256_of_json([*listed, further] if further else listed)


_AT_ONCE = 1 << 24  # tokens counted at a time


def count_tokens(
    train: np.ndarray, val: np.ndarray, vocab_size: int
) -> tuple[dict[str, str], tuple[np.ndarray, np.ndarray]]:
    """Return both sides' sha256 sums and token counts.

    Args:
        train: training tokens.
        val: held-out tokens.
        vocab_size: vocabulary size.

    Raises:
        ValueError: a side is empty or has a token beyond the vocabulary.
    """
    sums, counts = {}, []
    for (name, side), tokens in zip(
        {"train_tokens": "training", "val_tokens": "held-out"}.items(), (train, val), strict=True
    ):
        assert tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32), (
            f"{side} tokens: 1-D uint16 or uint32, got {tokens.ndim}-D {tokens.dtype}"
        )
        if not tokens.size:
            raise ValueError(f"data: the {side} side holds no token")
        sums[name], occurrences = sha256_and_counts(tokens, vocab_size)
        if len(occurrences) > vocab_size:
            raise ValueError(f"data: token {len(occurrences) - 1} on the {side} side; the vocabulary has {vocab_size}")
        counts.append(occurrences)
    return sums, (counts[0], counts[1])


def cross_entropy(train_counts: np.ndarray, val_counts: np.ndarray) -> float:
    """Return nats per held-out token under training frequencies, each count raised by one."""
    log_probability = np.log(train_counts + 1) - math.log(train_counts.sum() + len(train_counts))
    return float(-(val_counts @ log_probability) / val_counts.sum())


def log_frequencies(tokens: np.ndarray, vocab_size: int) -> Tensor:
    """Return the tokens' log frequencies (V), float64, each count raised by one.

    Reads all tokens once.
    """
    counts = np.ones(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _AT_ONCE):
        counts += np.bincount(tokens[start : start + _AT_ONCE], minlength=vocab_size)
    return torch.from_numpy(np.log(counts / counts.sum()))


# borders: int64, from 0 to the number of tokens; stretch i is borders[i]:borders[i + 1]


def count_windows(num_tokens: int, borders: np.ndarray | None, positions: int) -> int:
    """Return the number of windows that fit side by side.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
    """
    return int((_lengths(num_tokens, borders) // positions).sum())


def longest_pair(num_tokens: int, borders: np.ndarray | None) -> int:
    """Return the largest window length for which two windows fit.

    Both may be in the longest stretch, or one in each of the two longest.
    """
    longest = np.sort(_lengths(num_tokens, borders))[::-1]
    return max(int(longest[0]) // 2, int(longest[1]) if len(longest) > 1 else 0)


def draw_starts(
    num_tokens: int, borders: np.ndarray | None, positions: int, num: int, generator: torch.Generator
) -> np.ndarray:
    """Draw random starts, equally likely among windows inside a stretch.

    At least one window must fit.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
        num: number of starts.
        generator: random generator.
    """
    starts_of_stretch = np.maximum(_lengths(num_tokens, borders) - positions + 1, 0)
    ends = np.cumsum(starts_of_stretch)
    numbers = torch.randint(int(ends[-1]), (num,), generator=generator, device=generator.device).cpu().numpy()
    if borders is None:
        return numbers
    stretches = np.searchsorted(ends, numbers, side="right")
    return borders[stretches] + numbers - (ends - starts_of_stretch)[stretches]


def stretches_of(borders: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the index of each start's stretch."""
    return np.searchsorted(borders, starts, side="right") - 1


def spread_starts(num_tokens: int, borders: np.ndarray | None, positions: int, at_most: int) -> np.ndarray:
    """Return starts of non-overlapping windows, evenly spaced from first to last.

    Args:
        num_tokens: tokens in the array.
        borders: int64, from 0 to ``num_tokens``; None: one stretch.
        positions: tokens per window.
        at_most: largest number of starts.
    """
    count = min(at_most, count_windows(num_tokens, borders, positions))
    steps, last = np.arange(count), max(count - 1, 1)
    if borders is None:
        return steps * (num_tokens - positions) // last
    fitting = np.diff(borders) // positions  # side by side in each stretch
    ends = np.cumsum(fitting)
    numbers = steps * (int(ends[-1]) - 1) // last
    stretches = np.searchsorted(ends, numbers, side="right")
    return borders[stretches] + (numbers - (ends - fitting)[stretches]) * positions


def too_short(borders: np.ndarray, positions: int) -> tuple[int, int]:
    """Return (number of stretches shorter than a window, their tokens)."""
    lengths = np.diff(borders)
    short = lengths < positions
    return int(short.sum()), int(lengths[short].sum())


def _lengths(num_tokens: int, borders: np.ndarray | None) -> np.ndarray:
    return np.array([num_tokens], dtype=np.int64) if borders is None else np.diff(borders)
