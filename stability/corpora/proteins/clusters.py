"""Find which chains are one protein for the split: they share a group (four-letter code, accession) or at least 90 % of
their sequence.

Identity of two chains: the most residues that can be matched in order (their longest common subsequence), as a share of
the shorter chain's known residues. Gaps are free, so that a chain with an unresolved loop, a fragment and a construct
with a tag all count as their protein. Only pairs that share enough 5-mers are compared: two chains that differ by at
most 10 % substitutions always do, unrelated ones never.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.cluster.hierarchy import DisjointSet

from stability.corpora.proteins.alphabets import UNK, VOCAB_SIZE

IDENTITY = 0.9
K = 5
# of the shorter chain's 5-mers; errors of 10 % spread evenly leave one half, what is below leaves room for insertions
SHARED = 0.4
ROWS_AT_ONCE = 512
MARGIN = 1e-9  # 0.9 of a length may be a whole number that floating point misses


def clusters(sequences: Sequence[np.ndarray], groups: Sequence[str]) -> np.ndarray:
    """Return the number of each chain's cluster, int64: 0, 1, … by first occurrence. Which chains share one depends on
    the set of chains alone, not on their order.

    ``sequences``: tokens of `alphabets.PIECES` (uint8 or wider), a chain each. Time: one sparse product, and an
    alignment for each pair that it leaves and that no earlier pair has joined (about 0.1 ms for 300 residues).
    """
    forest = DisjointSet(range(len(sequences)))
    for first, other in _equals(groups):
        forest.merge(first, other)
    keys = [sequence.astype(np.uint8).tobytes() for sequence in sequences]
    for first, other in _equals(keys):
        forest.merge(first, other)
    distinct = list(dict.fromkeys(keys))
    chain_of = {key: at for at, key in reversed(list(enumerate(keys)))}
    for first, other in _candidates(distinct):
        one, two = chain_of[distinct[first]], chain_of[distinct[other]]
        if not forest.connected(one, two) and identity(distinct[first], distinct[other]) >= IDENTITY - MARGIN:
            forest.merge(one, two)
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(forest[at], len(numbers)) for at in range(len(sequences))], dtype=np.int64)


def identity(first: bytes, other: bytes) -> float:
    """Return the longest common subsequence of two chains over the shorter one's known residues; unknown residues match
    nothing. 0 where none is known.

    Bit-parallel (Hyyrö 2004): the row of the dynamic programme is one integer.
    """
    shorter, longer = sorted((tokens.replace(bytes([UNK]), b"") for tokens in (first, other)), key=len)
    if not shorter:
        return 0.0
    places: dict[int, int] = {}
    for at, token in enumerate(shorter):
        places[token] = places.get(token, 0) | 1 << at
    full = (1 << len(shorter)) - 1
    row = full
    for token in longer:
        matched = row & places.get(token, 0)
        row = ((row + matched) | (row - matched)) & full
    return (len(shorter) - row.bit_count()) / len(shorter)


def _equals(keys: Sequence[str] | Sequence[bytes]) -> list[tuple[int, int]]:
    first: dict[str | bytes, int] = {}
    return [(first[key], at) for at, key in enumerate(keys) if first.setdefault(key, at) != at]


def _candidates(sequences: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return the pairs (i < j) that share as many 5-mers as `SHARED` asks for, a k-mer that occurs n times in a chain
    counting n times."""
    features = [_kmers(np.frombuffer(sequence, dtype=np.uint8)) for sequence in sequences]
    if not sum(map(len, features)):
        return []
    columns, inverse = np.unique(np.concatenate(features), return_inverse=True)
    bounds = np.concatenate([[0], np.cumsum([len(feature) for feature in features])])
    table = sparse.csr_matrix(
        (np.ones(len(inverse), dtype=np.int32), inverse.astype(np.int32), bounds), shape=(len(sequences), len(columns))
    )
    lengths = np.array([len(sequence) - sequence.count(UNK) for sequence in sequences])
    counts = np.diff(bounds)
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(sequences), ROWS_AT_ONCE):
        shared = sparse.coo_matrix(table[start : start + ROWS_AT_ONCE] @ table.T)
        i, j = shared.row + start, shared.col
        shorter = np.where(lengths[i] <= lengths[j], i, j)
        enough = np.minimum(
            SHARED * counts[shorter], counts[shorter] - K * np.floor((1 - IDENTITY) * lengths[shorter] + MARGIN)
        )
        kept = (i < j) & (shared.data >= np.maximum(enough, 1))
        pairs += zip(i[kept].tolist(), j[kept].tolist(), strict=True)
    return pairs


def _kmers(tokens_N: np.ndarray) -> np.ndarray:
    """Return a number for each 5-mer of known residues: its residues, and which occurrence of it in the chain it is."""
    if len(tokens_N) < K:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens_N, K)
    codes = np.sort(windows[(windows != UNK).all(axis=1)].astype(np.int64) @ VOCAB_SIZE ** np.arange(K))
    occurrence = np.arange(len(codes)) - np.searchsorted(codes, codes, side="left")
    return codes * (1 << 20) + occurrence
