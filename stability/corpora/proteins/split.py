"""Protein chains to a `ProteinCorpus`, which depends only on their set and file names.

The split clusters chains by protein. Chains share one if they share a group (four-letter code, accession) or at least
90 % of their sequence. Identity is the longest common subsequence as a share of the shorter chain's known residues.
Gaps are free, so chains with an unresolved loop, fragments and constructs with a tag count as their protein. Only pairs
with enough shared 5-mers are compared: two chains with at most 10 % substitutions always have enough, unrelated ones
never.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.cluster.hierarchy import DisjointSet

from stability.corpora.io import step
from stability.corpora.io.disk import TokenFile
from stability.corpora.proteins.alphabets import NUM_ATOMS, SPECIALS, UNK, VOCAB_SIZE
from stability.corpora.proteins.annotations import Annotation
from stability.corpora.proteins.chain import ProteinChain
from stability.corpora.proteins.corpus import ProteinCorpus
from stability.corpora.proteins.stored_chains import Tables

_TRACKS = {
    "sequence": np.uint8,
    "atoms14": np.uint32,
    "ss": np.uint8,
    "sasa": np.uint32,
    "plddt": np.uint32,
    "numbers": np.uint32,
}
_ROW = {name: NUM_ATOMS * 3 if name == "atoms14" else 1 for name in _TRACKS}

Names = tuple[str, ...]


class _Named(NamedTuple):
    id: str
    group: str
    accession: str
    digest: bytes
    sequence: np.ndarray


class CollectedChains:
    """Chains in order of arrival: tracks on disk, names and sequences in memory.

    Chains with equal tracks count once.
    """

    def __init__(self, scratch: Path | None):
        self._files = {name: TokenFile(dtype, scratch) for name, dtype in _TRACKS.items()}
        self.chains: list[_Named] = []
        self.num_repeated = self.num_backbones = 0
        self._seen: set[bytes] = set()

    def add(self, chain: ProteinChain) -> None:
        """Add a chain, unless an equal one was added before."""
        rows = {
            "sequence": chain.sequence.astype(np.uint8),
            "atoms14": chain.atoms14_NAX.astype(np.float32).reshape(-1).view(np.uint32),
            "ss": chain.ss_N.astype(np.uint8),
            "sasa": chain.sasa_N.astype(np.float32).view(np.uint32),
            "plddt": chain.plddt_N.astype(np.float32).view(np.uint32),
            "numbers": chain.numbers_N.astype(np.int32).view(np.uint32),
        }
        digest = hashlib.sha256(
            b"".join(row.astype(row.dtype.newbyteorder("<")).tobytes() for row in rows.values())
        ).digest()
        if digest in self._seen:
            self.num_repeated += 1
            return
        self._seen.add(digest)
        for name, row in rows.items():
            self._files[name].append(row)
        self.num_backbones += int(chain.mask_N.sum())
        self.chains.append(_Named(chain.id, chain.group, chain.accession, digest, rows["sequence"]))

    def arrange(self, order: Sequence[int], scratch: Path | None) -> dict[str, np.ndarray]:
        """Return the tracks with the chains in another order."""
        starts = np.cumsum([0, *(len(chain.sequence) for chain in self.chains)])
        arranged = {}
        for name, dtype in _TRACKS.items():
            found, target = self._files[name].array(), TokenFile(dtype, scratch)
            for at in order:
                target.append(found[starts[at] * _ROW[name] : starts[at + 1] * _ROW[name]])
            arranged[name] = target.array()
        lengths = [len(self.chains[at].sequence) for at in order]
        return {"offsets": np.cumsum([0, *lengths], dtype=np.int64), **arranged}


def corpus_of(
    chains: Iterable[ProteinChain],
    skipped: Sequence[tuple[str, str]],
    annotations: Mapping[str, Annotation] | None,
    origin: str,
    held_out: float,
    scratch: Path | None = None,
) -> ProteinCorpus:
    """Collect chains into a corpus and choose the held-out ones.

    Clusters of chains (`clusters.clusters`) are held out in order of their contents' sha256, as long as each fits into
    the share. One more is added if the total then is nearer to the share. A cluster is not held out if it exceeds both
    a quarter of the share and the median cluster, since validation should use several proteins; without any other, the
    smallest is. Each side's chains are in order of their sha256.

    Args:
        chains: the chains.
        skipped: (file or chain, reason) of unusable ones; read after the chains.
        annotations: annotations by accession, or None.
        origin: the source, for the description.
        held_out: share of chains to hold out.
        scratch: folder for temporary files; None: the system's.

    Raises:
        ValueError: there are fewer than two clusters, or no annotation matches.
    """
    pile = CollectedChains(scratch)
    for chain in chains:
        pile.add(chain)
        step()
    found = pile.chains
    numbers = clusters([chain.sequence for chain in found], [chain.group for chain in found])
    if not found or numbers.max() < 1:
        some = f"; {len(skipped):,} left out, the first: {': '.join(skipped[0])}" if skipped else ""
        raise ValueError(
            f"data: {origin} holds {len(found):,} chains of {min(len(found), 1)} protein; at least 2 proteins are "
            f"needed, one to hold out{some}"
        )
    known = _find_annotations(found, annotations)
    is_val = _choose_held_out(numbers, [chain.digest for chain in found], held_out)
    asked = int(np.ceil(held_out * len(found)))
    order = sorted(range(len(found)), key=lambda at: (bool(is_val[at]), found[at].digest))
    num_train = int((~is_val).sum())
    arrays = pile.arrange(order, scratch)
    chosen = [found[at] for at in order]
    words, vocabularies = _annotate([known.get(at, Annotation()) for at in order], num_train, arrays)
    first_seen: dict[int, int] = {}
    relabelled = tuple(first_seen.setdefault(int(numbers[at]), len(first_seen)) for at in order)
    ids, groups, accessions = (tuple(getattr(chain, name) for chain in chosen) for name in ("id", "group", "accession"))
    tables = Tables(ids, groups, accessions, relabelled, *vocabularies, skipped=tuple(skipped))
    return ProteinCorpus.of(
        {**arrays, **words}, tables, num_train, _description(origin, pile, numbers, is_val, asked, tables, len(known))
    )


def _choose_held_out(numbers: np.ndarray, digests: Sequence[bytes], share: float) -> np.ndarray:
    """Return the mask of held-out chains."""
    sizes = np.bincount(numbers)
    wanted = int(np.ceil(share * len(numbers)))
    content: dict[int, list[bytes]] = {}
    for number, digest in zip(numbers.tolist(), digests, strict=True):
        content.setdefault(number, []).append(digest)
    order = sorted(content, key=lambda number: hashlib.sha256(b"".join(sorted(content[number]))).digest())
    most = min(max(wanted / 4, float(np.median(sizes))), wanted)
    chosen: list[int] = []
    left = wanted
    for number in order:
        if sizes[number] <= min(most, left) and len(chosen) < len(order) - 1:
            chosen.append(number)
            left -= int(sizes[number])
    nearer = [number for number in order if number not in chosen and sizes[number] <= most and sizes[number] < 2 * left]
    if nearer and len(chosen) < len(order) - 1:
        chosen.append(min(nearer, key=lambda number: sizes[number]))
    return np.isin(numbers, chosen or [min(order, key=lambda number: sizes[number])])


def _find_annotations(chains: Sequence[_Named], annotations: Mapping[str, Annotation] | None) -> dict[int, Annotation]:
    """Return each chain's annotations by its place.

    They are found by accession, else by entry, a four-letter code in either case.

    Raises:
        ValueError: annotations are given but none matches, so they would have no effect.
    """
    if annotations is None:
        return {}
    named = ((at, (chain.accession, chain.group, chain.group.upper())) for at, chain in enumerate(chains))
    known = {
        at: annotations[found]
        for at, names in named
        if (found := next((name for name in names if name in annotations), None))
    }
    if not known:
        names = list(dict.fromkeys(chain.accession or chain.group for chain in chains))
        own = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        raise ValueError(
            f"data.annotations: none of its {len(annotations):,} accessions is that of a chain ({own}); give these "
            "proteins', or leave it out"
        )
    return known


def _annotate(
    known: Sequence[Annotation], num_train: int, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], tuple[Names, Names, Names]]:
    """Return annotation tokens as arrays, and their vocabularies.

    Arrays are each residue's domains and each chain's descriptions and orthologous groups, with offsets. A vocabulary
    has the special tokens and the sorted training names; other names become `UNK`.
    """
    vocabularies = (
        _vocabulary(name for each in known[:num_train] for name, _, _ in each.domains),
        _vocabulary(name for each in known[:num_train] for name in each.descriptions),
        _vocabulary(name for each in known[:num_train] for name in each.orthologs),
    )
    tokens = [{name: token for token, name in enumerate(vocabulary)} for vocabulary in vocabularies]
    # a residue is in a domain if its database number is between the domain's ends
    counts, values = [], []
    for number, annotation in enumerate(known):
        place = slice(arrays["offsets"][number], arrays["offsets"][number + 1])
        count, value = _domains_of(annotation, arrays["numbers"][place].view(np.int32), tokens[0])
        counts.append(count)
        values.append(value)
    offsets, domains = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64), np.concatenate(values)
    words = {"domain_offsets": offsets, "domains": domains}
    for name, table in (("description", tokens[1]), ("ortholog", tokens[2])):
        rows = [[table.get(word, UNK) for word in getattr(each, f"{name}s")] for each in known]
        words[f"{name}_offsets"] = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        words[f"{name}s"] = np.array([token for row in rows for token in row], dtype=np.uint32)
    return words, vocabularies


def _vocabulary(names: Iterable[str]) -> Names:
    return (*SPECIALS, *sorted(set(names)))


def _domains_of(
    annotation: Annotation, numbers_N: np.ndarray, tokens: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return each residue's number of domains, and their tokens residue by residue."""
    kinds: dict[int, np.ndarray] = {}
    for name, first, last in annotation.domains:
        inside_N = (numbers_N >= first) & (numbers_N <= last)
        token = tokens.get(name, UNK)
        kinds[token] = kinds[token] | inside_N if token in kinds else inside_N
    if not kinds:
        return np.zeros(len(numbers_N), dtype=np.int64), np.empty(0, dtype=np.uint32)
    inside_NK = np.stack([kinds[token] for token in sorted(kinds)], axis=1)
    values = np.broadcast_to(np.array(sorted(kinds), dtype=np.uint32), inside_NK.shape)[inside_NK]
    return inside_NK.sum(axis=1), values


def _description(
    origin: str,
    pile: CollectedChains,
    numbers: np.ndarray,
    is_val: np.ndarray,
    asked: int,
    tables: Tables,
    num_annotated: int,
) -> str:
    """Describe the data in one line: counts, repetitions, annotations, held-out share."""
    num_residues = sum(len(chain.sequence) for chain in pile.chains)
    num_val, val_clusters = int(is_val.sum()), len(set(numbers[is_val].tolist()))
    repeated = f", {pile.num_repeated:,} exact repetitions left out" if pile.num_repeated else ""
    skipped = f"; {len(tables.skipped):,} files or chains could not be used and were skipped" if tables.skipped else ""
    kinds = sum(len(names) - len(SPECIALS) for names in (tables.domains, tables.descriptions, tables.orthologs))
    words = f", {kinds:,} kinds of annotation on {num_annotated:,} of the chains" if num_annotated else ""
    backbones = f"{pile.num_backbones / num_residues:.1%} with a backbone"
    share = f"held out {num_val:,} chains of {val_clusters:,} proteins, {num_val / len(numbers):.2%}"
    if np.bincount(numbers).min() > asked:
        share += f" (data.held_out asks for {asked:,} chains, and every protein has more; the smallest is held out)"
    return (
        f"{origin}: {len(numbers):,} chains of {numbers.max() + 1:,} proteins{repeated}, {num_residues:,} residues, "
        f"{backbones}{words}; {share}{skipped}"
    )


IDENTITY = 0.9
K = 5
# share of the shorter chain's 5-mers: 10 % evenly spread errors leave one half, the margin allows for insertions
SHARED = 0.4
ROWS_AT_ONCE = 512
MARGIN = 1e-9  # for lengths with an integer 0.9 · length, inexact in floating point


def clusters(sequences: Sequence[np.ndarray], groups: Sequence[str]) -> np.ndarray:
    """Return each chain's cluster number, int64: 0, 1, … by first occurrence.

    The partition depends on the set of chains alone, not on their order. Time: one sparse product, and an alignment
    (about 0.1 ms for 300 residues) for each remaining pair not yet joined.

    Args:
        sequences: tokens of `alphabets.PIECES` (uint8 or wider), one array a chain.
        groups: each chain's group.
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
    """Return the longest common subsequence over the shorter chain's known residues.

    Unknown residues match nothing. The result is 0 without known residues. Bit-parallel (Hyyrö 2004): one row of the
    dynamic programme is one integer.
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
    """Return the pairs (i < j) with enough shared 5-mers by `SHARED`.

    A k-mer occurring n times in a chain counts n times.
    """
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
    """Return a number for each 5-mer of known residues, from residues and occurrence."""
    if len(tokens_N) < K:
        return np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens_N, K)
    codes = np.sort(windows[(windows != UNK).all(axis=1)].astype(np.int64) @ VOCAB_SIZE ** np.arange(K))
    occurrence = np.arange(len(codes)) - np.searchsorted(codes, codes, side="left")
    return codes * (1 << 20) + occurrence
