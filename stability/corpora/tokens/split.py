"""Documents to a `Corpus`, which depends only on their set.

Order, files and exact repetitions do not matter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stability.corpora.io import step
from stability.corpora.io.disk import TOKENS_PER_CHUNK, TokenFile, forget, sum_of_counts, token_dtype
from stability.corpora.tokens.corpus import HELD_OUT_PERCENT, Corpus
from stability.corpora.tokens.vocabulary import REPLACEMENT, AbstractTokenizer, ByteTokenizer, Vocabulary

MOST_PIECES = 1 << 18  # bounds the memory of short documents' array objects


class CollectedDocuments:
    """Items in order of arrival: tokens on disk, a digest and lengths in memory.

    Memory is 48 bytes an item, without an object for each.
    """

    def __init__(self, vocab_size: int, scratch: Path | None):
        self._tokens = TokenFile(token_dtype(vocab_size), scratch)
        self._digests, self._stops, self._sizes = bytearray(), array("Q", [0]), array("Q")
        self.num_empty = 0  # items without content, counted by the caller

    def add(self, digest: bytes, tokens: np.ndarray, size: int) -> None:
        """Add one item's tokens.

        Args:
            digest: sha256 of the item.
            tokens: 1-D.
            size: length reported in the description, e.g. characters.
        """
        self._tokens.append(tokens)
        self._digests += digest
        self._stops.append(len(self._tokens))
        self._sizes.append(size)

    def sort(self) -> Sorted:
        """Return the distinct items by digest; among equal ones, the first."""
        words = np.frombuffer(self._digests, dtype=">u8").reshape(len(self._sizes), 4)
        order = np.lexsort(words.T[::-1])
        distinct = np.ones(len(order), dtype=bool)
        distinct[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
        order, stops = order[distinct], np.asarray(self._stops, dtype=np.int64)
        sizes = np.asarray(self._sizes, dtype=np.int64)[order]
        return Sorted(
            self._tokens.array(), stops[order], stops[order + 1], sizes, len(distinct) - len(order), self.num_empty
        )


class Sorted(NamedTuple):
    """Distinct items in order of their digests; item i is ``tokens[starts[i]:stops[i]]``.

    Attributes:
        sizes: length of each item for descriptions.
        num_repeated: number of skipped repetitions.
        num_empty: number of skipped items without content.
    """

    tokens: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    sizes: np.ndarray
    num_repeated: int
    num_empty: int

    def select(self, chosen: slice | np.ndarray) -> Sorted:
        return self._replace(starts=self.starts[chosen], stops=self.stops[chosen], sizes=self.sizes[chosen])


def split_documents(
    documents: Iterable[str | None],
    origin: str,
    hint: str = "",
    *,
    tokenizer: AbstractTokenizer | None = None,
    keep: int | None = None,
    scratch: Path | None = None,
) -> Corpus:
    """Return a `Corpus` of documents, as bytes or another tokenizer's tokens.

    Distinct documents are sorted by the sha256 of their UTF-8. The first 1 % (rounded up) are held out, the rest
    trained on. Each side has this order, with a separator between documents. Memory: 48 bytes a document and some tens
    of megabytes.

    Args:
        documents: texts; None is a document without text, counted and skipped.
        origin: the source, for the description.
        hint: end of the error message.
        tokenizer: None: bytes.
        keep: as in `keep_commonest`; None: all tokens.
        scratch: folder for temporary files; None: the system's.

    Raises:
        ValueError: there are fewer than two distinct documents.
    """
    tokenizer = tokenizer or ByteTokenizer()
    vocabulary = tokenizer.vocabulary
    found = _pile_of(documents, tokenizer, scratch).sort()
    num = len(found.sizes)
    noun = "text" if found.num_empty == 1 else "texts"
    empty = f", {found.num_empty:,} null {noun} left out" if found.num_empty else ""
    if num < 2:
        noun = "document" if num == 1 else "documents"
        raise ValueError(
            f"data: {origin} holds {num} distinct {noun}{empty}; at least 2 are needed, so that one can be held "
            f"out{hint}"
        )
    num_held_out = -(-num * HELD_OUT_PERCENT // 100)
    sides = found.select(slice(num_held_out, None)), found.select(slice(num_held_out))
    table, how = None, "" if tokenizer.label is None else f"; {tokenizer.label}"
    if keep is not None:
        vocabulary, table, shares = keep_commonest(sides, vocabulary, keep)
        how += f", {keep:,} commonest kept, unknown {shares[0]:.2%} of training and {shares[1]:.2%} of held-out tokens"
    train, val = (_join(side, tokenizer.vocabulary.separator, table, vocabulary, scratch) for side in sides)
    repeated = f", {found.num_repeated:,} exact repetitions left out" if found.num_repeated else ""
    return Corpus.of(
        train,
        val,
        vocab_size=len(vocabulary.pieces),
        description=f"{origin}: {num:,} documents, {int(found.sizes.sum()):,} characters{repeated}{empty}{how}",
        num_train_documents=num - num_held_out,
        num_val_documents=num_held_out,
        vocabulary=vocabulary,
    )


def keep_commonest(
    sides: tuple[Sorted, Sorted], vocabulary: Vocabulary, keep: int
) -> tuple[Vocabulary, np.ndarray, tuple[float, float]]:
    """Return a smaller vocabulary with the commonest training tokens.

    Kept are the separator and the ``keep − 1`` tokens most frequent in training documents, ties by number, in the old
    order. One more token, the last, replaces all others, so the size is ``keep + 1`` for any text.

    Args:
        sides: training and held-out documents.
        vocabulary: the old vocabulary.
        keep: number of kept tokens.

    Returns:
        (new vocabulary, new number of each old token, shares of unknown tokens in training and held-out documents).

    Raises:
        ValueError: nothing would be left out.
    """
    size, separator = len(vocabulary.pieces), vocabulary.separator
    assert separator is not None
    if keep >= size:
        raise ValueError(
            f"data.keep={keep}: the tokenizer has {size:,} tokens; give fewer, or data.keep=null for all of them"
        )
    train_counts, val_counts = (_counts(side, size) for side in sides)
    ranked = np.lexsort((np.arange(size), -train_counts))
    kept = np.sort(np.append(ranked[ranked != separator][: keep - 1], separator))
    table = np.full(size, keep, dtype=token_dtype(keep + 1))
    table[kept] = np.arange(keep)
    smaller = Vocabulary(
        vocabulary.name, (*(vocabulary.pieces[token] for token in kept), REPLACEMENT), separator=int(table[separator])
    )
    shares = [1 - counts[kept].sum() / max(counts.sum(), 1) for counts in (train_counts, val_counts)]
    return smaller, table, (float(shares[0]), float(shares[1]))


def _pile_of(documents: Iterable[str | None], tokenizer: AbstractTokenizer, scratch: Path | None) -> CollectedDocuments:
    pile = CollectedDocuments(len(tokenizer.vocabulary.pieces), scratch)
    for text in documents:
        if text is None:
            pile.num_empty += 1
            continue
        pile.add(hashlib.sha256(text.encode("utf-8")).digest(), tokenizer.encode(text), len(text))
        step()
    return pile


def _counts(items: Sorted, size: int) -> np.ndarray:
    counts = np.zeros(size, dtype=np.int64)
    for chunk in pieces(items, None):
        counts = sum_of_counts(counts, np.bincount(chunk, minlength=size))
    return counts


def _join(
    items: Sorted, separator: int | None, table: np.ndarray | None, vocabulary: Vocabulary, scratch: Path | None
) -> np.ndarray:
    joined = TokenFile(token_dtype(len(vocabulary.pieces)), scratch)
    for chunk in pieces(items, separator):
        joined.append(chunk if table is None else table[chunk])
    return joined.array()


def pieces(items: Sorted, separator: int | None) -> Iterator[np.ndarray]:
    """Yield the items' concatenated tokens in arrays of about 4 M tokens.

    ``separator`` is inserted between two items; None: nothing.
    """
    tokens, between = (
        np.asarray(items.tokens),
        np.array([] if separator is None else [separator], dtype=items.tokens.dtype),
    )
    held: list[np.ndarray] = []
    num_held = 0
    for index, (start, stop) in enumerate(zip(items.starts.tolist(), items.stops.tolist(), strict=True)):
        held += [between, tokens[start:stop]] if index else [tokens[start:stop]]
        num_held += stop - start
        if num_held >= TOKENS_PER_CHUNK or len(held) >= MOST_PIECES:
            yield np.concatenate(held)
            held, num_held = [], 0
            forget(items.tokens)
    if held:
        yield np.concatenate(held)
    forget(items.tokens)
