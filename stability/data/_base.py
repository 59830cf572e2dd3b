"""What every data source makes: a `Corpus`, split by content into training and validation tokens, with a fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from stability.config import Settings
from stability.data._tokenizers import ByteTokenizer

# Raised when the same documents would be split or laid out differently; it is part of every fingerprint.
SPLIT_VERSION = 1
HELD_OUT_PERCENT = 1
TOKENS_PER_CHUNK = 1 << 22
_ARRAYS = {"train_tokens": "train.npy", "val_tokens": "val.npy"}
_META = "corpus.json"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Prepared data. Build it with `Corpus.of` (from tokens) or `split_documents` (from documents), which compute what follows from the tokens.

    ``fingerprint``: sha256 over both arrays, the vocabulary's size and the split rule's version; where the data lay is not in it.
    ``description``: one line as of the first preparation (the same content read again from elsewhere keeps it).
    ``unigram_nats``: nats per token of the validation tokens under the training tokens' frequencies, each count raised by one.
    """

    train_tokens: np.ndarray
    val_tokens: np.ndarray
    vocab_size: int
    fingerprint: str
    description: str
    num_train_documents: int
    num_val_documents: int
    unigram_nats: float

    @classmethod
    def of(cls, train: np.ndarray, val: np.ndarray, *, vocab_size: int, description: str, num_train_documents: int, num_val_documents: int) -> Corpus:
        """A corpus from two 1-D uint16 arrays. Errors: ``ValueError`` where a side is empty or a token reaches ``vocab_size``."""
        for side, tokens in (("training", train), ("held-out", val)):
            assert tokens.ndim == 1 and tokens.dtype == np.uint16, f"{side} tokens: 1-D uint16 expected, got {tokens.ndim}-D {tokens.dtype}"
            if not tokens.size:
                raise ValueError(f"data: the {side} side holds no token")
            if int(tokens.max()) >= vocab_size:
                raise ValueError(f"data: token {int(tokens.max())} on the {side} side; the vocabulary has {vocab_size}")
        fingerprint = _fingerprint([_sha256(train), _sha256(val)], vocab_size)
        unigram = unigram_nats(train, val, vocab_size)
        return cls(train, val, vocab_size, fingerprint, description, num_train_documents, num_val_documents, unigram)

    def require(self, positions: int) -> None:
        """Errors: ``ValueError`` unless both sides hold at least two windows of ``positions`` tokens."""
        for side, tokens in ((f"the held-out {HELD_OUT_PERCENT} %", self.val_tokens), ("the training side", self.train_tokens)):
            if len(tokens) < 2 * positions:
                raise ValueError(
                    f"data: {side} has {len(tokens):,} tokens; model.positions={positions} needs at least {2 * positions:,} (two windows).\n"
                    f"Give more or longer documents, or model.positions={max(len(tokens) // 2, 1)} or less. Read: {self.description}"
                )

    def batch(self, split: str, num: int, positions: int, generator: torch.Generator) -> Int64[Tensor, "num positions"]:
        """``num`` random windows of ``positions`` tokens of ``split`` ("train" or "val"), every start equally likely.

        Only ``generator`` decides which. On the CPU. Errors: ``ValueError`` for another split or a split shorter than one window.
        """
        tokens = self._split(split, positions)
        starts = torch.randint(len(tokens) - positions + 1, (num,), generator=generator, device=generator.device)
        return _gather(tokens, starts.cpu().numpy(), positions)

    def windows(self, split: str, num: int, positions: int) -> Int64[Tensor, "at_most_num positions"]:
        """At most ``num`` windows of ``split``, evenly spaced from its first token to its last, none overlapping: the same ones at every call.

        Errors: as `batch`.
        """
        tokens = self._split(split, positions)
        count = min(num, len(tokens) // positions)
        starts = np.arange(count) * (len(tokens) - positions) // max(count - 1, 1)
        return _gather(tokens, starts, positions)

    def _split(self, split: str, positions: int) -> np.ndarray:
        if split not in ("train", "val"):
            raise ValueError(f"no split '{split}'; choices: train, val")
        tokens = self.train_tokens if split == "train" else self.val_tokens
        if len(tokens) < positions:
            raise ValueError(f"data: the split '{split}' has {len(tokens):,} tokens; one window of {positions} does not fit")
        return tokens

    def save(self, folder: Path) -> None:
        """Write to a temporary neighbour, fsync, rename to ``folder``. Where another process was first, its equal copy stays.

        Errors: ``ValueError`` where ``folder`` exists and holds something else; ``OSError`` from the disk.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.parent / f".partial-{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            self._write(partial)
            try:
                partial.rename(folder)
            except OSError:  # a non-empty folder cannot be replaced: the loser of a race discards its copy
                if not folder.is_dir():
                    raise
                if _read_meta(folder)["fingerprint"] != self.fingerprint:
                    raise ValueError(f"{folder} holds another corpus; choose another folder") from None
            _fsync(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, folder: Path) -> None:
        meta = self._meta()
        for name, file in _ARRAYS.items():
            with open(folder / file, "wb") as stream:
                np.save(stream, getattr(self, name))
                stream.flush()
                os.fsync(stream.fileno())
        with open(folder / _META, "w", encoding="utf-8") as stream:
            json.dump({**meta, "sha256": _sha256_of_json(meta)}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _fsync(folder)

    def _meta(self) -> dict[str, Any]:
        arrays = {name: _sha256(getattr(self, name)) for name in _ARRAYS}
        return {**{key: value for key, value in vars(self).items() if key not in _ARRAYS}, **arrays}

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """What `save` wrote, its tokens memory-mapped read-only, all of it checked against the sha256 sums beside it.

        Errors: ``ValueError`` naming the file that is missing, cut short or altered.
        """
        meta = _read_meta(folder)
        sums = [meta[name] for name in _ARRAYS]
        if meta["fingerprint"] != _fingerprint(sums, meta["vocab_size"]):
            raise _damaged(folder / _META, "its fingerprint is not that of its tokens")
        arrays = {name: _read_tokens(folder / file, meta[name]) for name, file in _ARRAYS.items()}
        return cls(**{**meta, **arrays})


class AbstractDataSource:
    """Base of every data source. A subclass holds its `Config` and implements `prepare`; `cache_key` spares a second preparation."""

    family: ClassVar[str] = "data"
    Config: ClassVar[type[Settings]]

    @classmethod
    def prepare(cls, config: Any) -> Corpus:
        """Read and tokenise everything. Errors: ``ValueError`` of one or two lines: field or file, place, what would be right."""
        raise NotImplementedError

    @classmethod
    def cache_key(cls, config: Any) -> str | None:
        """A string that changes whenever `prepare` would give another corpus, found without preparing it. None: prepare every time.

        Errors: ``ValueError`` as `prepare`, as far as what it looks at is concerned.
        """
        return None


def split_documents(documents: Iterable[str], origin: str, hint: str = "") -> Corpus:
    """Documents → `Corpus` of bytes: a function of the set of documents alone, not of their order, their files or exact repetitions.

    Distinct documents are sorted by sha256 of their UTF-8; the first 1 % (rounded up) are held out, the rest trained on; within each side
    they stand in that order, a separator between them. ``origin``: what was read, for the description. Errors: ``ValueError`` below two
    distinct documents, ending in ``hint``. Memory: 4 bytes a token while it runs, 2 after.
    """
    tokenizer = ByteTokenizer()
    tokens, spans, num_characters, num_repeated = array("H"), {}, 0, 0
    for text in documents:
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        if digest in spans:
            num_repeated += 1
            continue
        start = len(tokens)
        tokens.frombytes(tokenizer.encode(text).tobytes())
        spans[digest] = (start, len(tokens))
        num_characters += len(text)
    if len(spans) < 2:
        noun = "document" if len(spans) == 1 else "documents"
        raise ValueError(f"data: {origin} holds {len(spans)} distinct {noun}; at least 2 are needed, so that one can be held out{hint}")
    ordered = [spans[digest] for digest in sorted(spans)]
    num_held_out = -(-len(ordered) * HELD_OUT_PERCENT // 100)
    train = _joined(tokens, ordered[num_held_out:], tokenizer.separator)
    val = _joined(tokens, ordered[:num_held_out], tokenizer.separator)
    repeated = f", {num_repeated:,} exact repetitions left out" if num_repeated else ""
    return Corpus.of(
        train,
        val,
        vocab_size=tokenizer.vocab_size,
        description=f"{origin}: {len(ordered):,} documents, {num_characters:,} characters{repeated}",
        num_train_documents=len(ordered) - num_held_out,
        num_val_documents=num_held_out,
    )


def unigram_nats(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy of ``val`` under the add-one-smoothed unigram frequencies of ``train``, in nats per token."""
    train_counts, val_counts = _counts(train, vocab_size), _counts(val, vocab_size)
    log_probability = np.log(train_counts + 1) - math.log(len(train) + vocab_size)
    return float(-(val_counts @ log_probability) / len(val))


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    # bincount widens to int64, so not all at once
    chunks = (tokens[start : start + TOKENS_PER_CHUNK] for start in range(0, len(tokens), TOKENS_PER_CHUNK))
    return sum((np.bincount(chunk, minlength=vocab_size) for chunk in chunks), np.zeros(vocab_size, dtype=np.int64))


def _joined(tokens: array, spans: list[tuple[int, int]], separator: int) -> np.ndarray:
    source = np.frombuffer(tokens, dtype=np.uint16)
    joined = np.full(sum(stop - start for start, stop in spans) + len(spans) - 1, separator, dtype=np.uint16)
    position = 0
    for start, stop in spans:
        joined[position : position + stop - start] = source[start:stop]
        position += stop - start + 1
    return joined


def _gather(tokens: np.ndarray, starts: np.ndarray, positions: int) -> Tensor:
    return torch.from_numpy(tokens[starts[:, None] + np.arange(positions)].astype(np.int64))


def _fingerprint(array_sums: list[str], vocab_size: int) -> str:
    return _sha256_of_json(["stability corpus", SPLIT_VERSION, vocab_size, *array_sums])


def _sha256(tokens: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u2").data).hexdigest()


def _sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder / _META, str(error)) from None
    if not isinstance(meta, dict) or meta.pop("sha256", None) != _sha256_of_json(meta):
        raise _damaged(folder / _META, "it was altered")
    if set(meta) != {field.name for field in fields(Corpus)}:
        raise _damaged(folder / _META, "another version of this program wrote it")
    return meta


def _read_tokens(file: Path, expected_sha256: str) -> np.ndarray:
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(file, str(error)) from None
    if tokens.dtype != np.uint16 or tokens.ndim != 1 or _sha256(tokens) != expected_sha256:
        raise _damaged(file, "it was altered")
    return tokens


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"prepared data: {file} is missing or damaged ({why}).\nDelete {file.parent} and run again.")


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
