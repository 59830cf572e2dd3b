"""Nucleotide records to a `Corpus`: choose the held-out part, and set the borders between records.

No window crosses a border.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from stability.corpora.io import step
from stability.corpora.io.disk import TokenFile, chunks
from stability.corpora.tokens.augmentation import CODES, VOCABULARY, ReverseComplement, U, are_rna, gc_share
from stability.corpora.tokens.augmentation import either_strand as either_strand_of
from stability.corpora.tokens.corpus import HELD_OUT_PERCENT, Corpus
from stability.corpora.tokens.split import CollectedDocuments, Sorted, pieces

# increased if equal records would give another corpus
VERSION = 2
HoldOut = Literal["auto", "records", "region"]
# with fewer records, whole ones would exceed 1 % by far or differ from the rest
FEWEST_RECORDS = 20
# a record above this share of all nucleotides is not held out whole
LARGEST_SHARE = 0.05


def split_records(
    records: Iterable[tuple[str, bytes]],
    origin: str,
    hold_out: HoldOut,
    either_strand: bool,
    scratch: Path | None = None,
) -> Corpus:
    """Return a `Corpus` of nucleotides.

    A record, its reverse complement and the transcript of either (U for T) count once. Empty records are counted and
    skipped. Memory: three times the longest record.

    ``hold_out`` is one of:

    - "records": whole records, in order of their contents' sha256, until they reach 1 % of the nucleotides. Records
      above 5 % are never held out. The sha256 is over the alphabetically first strand, with T for U.
    - "region": the middle 1 % of every record, rounded up; the parts before and after become separate stretches.
    - "auto": records if there are at least 20, else region.

    Args:
        records: (name, tokens) of each record.
        origin: the source, for the description.
        hold_out: rule for the held-out side.
        either_strand: whether training windows become the other strand's with probability 0.5 (`Corpus.batch`); in RNA,
            U pairs with A.
        scratch: folder for temporary files; None: the system's.

    Raises:
        ValueError: nothing is left to train on, or nothing can be held out.
    """
    found = _pile_of(records, scratch).sort()
    if not len(found.starts):
        raise ValueError(f"data: {origin} holds no sequence: {found.num_empty:,} empty records; give others")
    by_records = hold_out == "records" or (hold_out == "auto" and len(found.starts) >= FEWEST_RECORDS)
    train, val = _hold_out_records(found) if by_records else _hold_out_regions(found)
    if not len(train.starts) or not len(val.starts):
        raise ValueError(
            f"data: {origin} holds {len(found.starts):,} records, too few or too short to hold out 1 %; give more, "
            "or data.hold_out=region"
        )
    (train_tokens, train_borders), (val_tokens, val_borders) = _stretches(train, scratch), _stretches(val, scratch)
    return Corpus.of(
        train_tokens,
        val_tokens,
        vocab_size=len(CODES),
        description=_description(origin, found, val_borders, by_records, either_strand),
        num_train_documents=len(train.starts) if by_records else len(found.starts),
        num_val_documents=len(val.starts),
        vocabulary=VOCABULARY,
        borders=(train_borders, val_borders),
        augmentation=ReverseComplement(_are_rna(found, train)) if either_strand else None,
    )


def _pile_of(records: Iterable[tuple[str, bytes]], scratch: Path | None) -> CollectedDocuments:
    pile = CollectedDocuments(len(CODES), scratch)
    for _, tokens in records:
        if not tokens:
            pile.num_empty += 1
            continue
        digest = hashlib.sha256(either_strand_of(tokens)).digest()
        pile.add(digest, np.frombuffer(tokens, dtype=np.uint8), len(tokens))
        step()
    return pile


def _hold_out_records(found: Sorted) -> tuple[Sorted, Sorted]:
    wanted = -(-int(found.sizes.sum()) * HELD_OUT_PERCENT // 100)
    eligible = np.where(found.sizes <= max(LARGEST_SHARE * found.sizes.sum(), found.sizes.min()), found.sizes, 0)
    before = np.cumsum(eligible) - eligible
    held_out = (eligible > 0) & (before < wanted)
    held_out &= np.cumsum(held_out) < len(held_out)  # keep at least one for training
    return found.select(~held_out), found.select(held_out)


def _hold_out_regions(found: Sorted) -> tuple[Sorted, Sorted]:
    width = -(-found.sizes * HELD_OUT_PERCENT // 100)
    first = found.starts + (found.sizes - width) // 2
    edges = np.stack([found.starts, first, first + width, found.stops])
    starts, stops = np.stack([edges[0], edges[2]], axis=1).ravel(), np.stack([edges[1], edges[3]], axis=1).ravel()
    some = stops > starts
    train = found._replace(starts=starts[some], stops=stops[some], sizes=(stops - starts)[some])
    return train, found._replace(starts=edges[1], stops=edges[2], sizes=width)


def _are_rna(found: Sorted, train: Sorted) -> np.ndarray | None:
    """Return 1 for each training stretch of an RNA record, else 0; None if there is no RNA."""
    if not any((chunk == U).any() for chunk in chunks(found.tokens)):
        return None
    order = np.argsort(found.starts)  # the file's order
    records = order[np.searchsorted(found.starts[order], train.starts, side="right") - 1]
    rna = are_rna(found.tokens, found.starts, found.stops)[records]
    return rna.astype(np.uint16) if rna.any() else None


def _stretches(items: Sorted, scratch: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (concatenated tokens, borders of the stretches)."""
    joined = TokenFile(np.uint16, scratch)
    for chunk in pieces(items, None):
        joined.append(chunk)
    return joined.array(), np.concatenate([[0], np.cumsum(items.sizes)]).astype(np.int64)


def _description(origin: str, found: Sorted, val_borders: np.ndarray, by_records: bool, either_strand: bool) -> str:
    """Describe the data in one line: records, nucleotides, GC content, held-out share."""
    counts = sum(
        (np.bincount(chunk, minlength=len(CODES)) for chunk in chunks(found.tokens)),
        np.zeros(len(CODES), dtype=np.int64),
    )
    num, num_held_out = int(found.sizes.sum()), int(val_borders[-1])
    num_whole = len(val_borders) - 1
    what = (
        f"{num_whole:,} whole {'record' if num_whole == 1 else 'records'}"
        if by_records
        else "the middle of every record"
    )
    repeated = f", {found.num_repeated:,} exact repetitions left out" if found.num_repeated else ""
    empty = f", {found.num_empty:,} empty left out" if found.num_empty else ""
    strands = "; training windows of both strands" if either_strand else ""
    noun = "record" if len(found.starts) == 1 else "records"
    share = f"held out {what}, {num_held_out / num:.2%}"
    return (
        f"{origin}: {len(found.starts):,} {noun}{repeated}{empty}, {num:,} nucleotides, GC {gc_share(counts):.3f}; "
        f"{share}{strands}"
    )
