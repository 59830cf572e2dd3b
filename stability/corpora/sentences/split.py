"""Split rows of sentences into a training and a held-out side that share no sentence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from stability.corpora.sentences.corpus import SentenceCorpus, Side
from stability.corpora.tokens.tokenizers import AbstractTokenizer


class Row(NamedTuple):
    """Sentences that belong together, their score, and groups that must stay on one side."""

    sentences: tuple[str, ...]
    score: float = 1.0
    groups: tuple[str, ...] = ()


def split_rows(
    rows: Iterable[Row], origin: str, *, tokenizer: AbstractTokenizer, scored: bool, hold_out: float
) -> SentenceCorpus:
    """Return the corpus of all different rows, split by connected components.

    Rows that share a sentence or a group are connected. Components are held out in the order of a digest of their
    first sentence until their rows are the share ``hold_out`` of all; a component that would exceed it by more than
    half stays in training. Equal rows count once. Rows are in the order of their digests.

    Args:
        rows: the rows, with equally many sentences each.
        origin: the source, for the description.
        tokenizer: makes tokens of sentences.
        scored: whether rows have scores.
        hold_out: share of rows to hold out.

    Raises:
        ValueError: there are too few rows, or all of them are connected; one or two lines.
    """
    # in the order of digests: chunks of neighbours are a mixture, as random batches are
    different = sorted(dict.fromkeys(rows), key=lambda row: _digest("\0".join(row.sentences)))
    if len(different) < 2:
        raise ValueError(f"data: {origin}: different rows: {len(different)}; at least 2 are needed, one to hold out")
    members: dict[str, list[int]] = {}
    for number, component in enumerate(_components(different)):
        members.setdefault(component, []).append(number)
    if len(members) < 2:
        raise ValueError(
            f"data: {origin}: all {len(different):,} rows are connected by shared sentences, so that nothing can be "
            "held out;\nrows of held-out and training side may share no sentence: give rows with other sentences"
        )
    held, limit = [], max(1.0, hold_out * len(different))
    for component in sorted(members, key=_digest):
        own = members[component]
        if len(held) < limit and len(own) < len(different) and len(held) + len(own) <= max(1.5 * limit, 1):
            held += own
    if not held:
        held = min(members.values(), key=lambda own: (len(own), own))
    is_held = np.isin(np.arange(len(different)), held)
    numbers: dict[str, int] = {}
    for row in different:
        for sentence in row.sentences:
            numbers.setdefault(sentence, len(numbers))
    rows_MS = np.array([[numbers[each] for each in row.sentences] for row in different], dtype=np.uint32)
    scores_M = np.array([row.score for row in different], dtype=np.float32)
    sides = [Side(rows_MS[which], scores_M[which]) for which in (~is_held, is_held)]
    vocab_size = len(tokenizer.vocabulary.pieces)
    encoded = [tokenizer.encode(sentence) for sentence in numbers]
    return SentenceCorpus.of(sides[0], sides[1], encoded, vocab_size=vocab_size, scored=scored, origin=origin)


def _components(rows: Sequence[Row]) -> list[str]:
    """Return each row's component, named by its smallest sentence."""
    joined = DisjointSet()
    names = [[*row.sentences, *(f"\0{group}" for group in row.groups)] for row in rows]
    for own in names:
        for name in own:
            joined.add(name)
            joined.merge(own[0], name)
    smallest: dict[str, str] = {}
    for own in names:
        root = joined[own[0]]
        smallest[root] = min(smallest.get(root, own[0]), *own[:1])
    return [smallest[joined[own[0]]] for own in names]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
