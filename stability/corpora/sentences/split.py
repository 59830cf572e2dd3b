"""Read rows of sentences (csv, tsv, jsonl, parquet), and split them into two sides that share no sentence."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from stability.corpora.io import step
from stability.corpora.io.files import find_files, lines_of, open_unpacked, suffix_of
from stability.corpora.sentences.corpus import SentenceCorpus, Side
from stability.corpora.tokens.vocabulary import AbstractTokenizer


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


SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
OTHER = ("data=text", (".txt",))
SCORED, PAIRS, NEGATIVE = ("a", "b", "score"), ("anchor", "positive"), "negative"
WANTED = "a, b, score (pairs with a score) or anchor, positive and, if there are, negative"
CSV_FIELD = 1 << 24  # longest field of a csv file, in characters


def pair_files(path: str) -> list[Path]:
    """Return the files of a path; raises as `find_files`."""
    return find_files(path, SUFFIXES, "file of pairs", OTHER)


def read_rows(files: list[Path], score_range: tuple[float, float] | None) -> tuple[list[Row], bool]:
    """Return the rows of all files, and whether they have scores.

    Args:
        files: the files; all have the columns of the first one.
        score_range: lowest and highest score, mapped to 0 and 1; None: scores are between -1 and 1.

    Raises:
        ValueError: a file, column, text or score is invalid; the message names its place.
    """
    rows, columns = [], None
    for file in files:
        for place, record in _records(file):
            columns = columns or _choose_columns(record, place)
            rows.append(_row(record, columns, place, score_range))
            step()
    if columns is None:
        raise ValueError(f"data.path: {files[0]} holds no row; give rows with the columns {WANTED}")
    if score_range is not None and columns != SCORED:
        raise ValueError(f"data.range: the columns {', '.join(columns)} have no score; leave it out")
    return rows, columns == SCORED


def _choose_columns(record: Mapping[str, Any], place: str) -> tuple[str, ...]:
    if all(name in record for name in SCORED):
        return SCORED
    if all(name in record for name in PAIRS):
        return (*PAIRS, NEGATIVE) if NEGATIVE in record else PAIRS
    raise ValueError(f"{place}: columns {', '.join(map(str, record)) or 'none'}; rename them: {WANTED}")


def _row(
    record: Mapping[str, Any], columns: tuple[str, ...], place: str, score_range: tuple[float, float] | None
) -> Row:
    if missing := [name for name in columns if record.get(name) is None]:
        raise ValueError(f"{place}: {missing[0]} is missing; every row has {', '.join(columns)}")
    if columns == PAIRS and record.get(NEGATIVE) is not None:  # a row of a jsonl file, or another file
        raise ValueError(f"{place}: {NEGATIVE} is missing in the first row; every row has the same columns")
    texts = [record[name] for name in columns if name != "score"]
    for name, text in zip(columns, texts, strict=False):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: {name} is {'empty' if isinstance(text, str) else 'no text'}; give a sentence")
    cleaned = [" ".join(text.replace("\0", "\\0").encode("utf-8", "replace").decode().split()) for text in texts]
    return Row(tuple(cleaned), _score(record["score"], place, score_range) if columns == SCORED else 1.0)


def _score(value: Any, place: str, score_range: tuple[float, float] | None) -> float:
    """Return a score between -1 and 1."""
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    low, high = score_range or (-1.0, 1.0)
    if not low <= score <= high:
        remedy = "" if score_range else "; for other scores give their range, e.g. data.range=[0,5]"
        raise ValueError(f"{place}: score {value!r} is no number between {low:g} and {high:g}{remedy}")
    return (score - low) / (high - low) if score_range else score


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and columns of each row of a file."""
    suffix = suffix_of(file, SUFFIXES)
    if suffix == ".parquet":
        yield from _parquet_records(file)
        return
    with open_unpacked(file) as stream:
        if suffix == ".jsonl":
            for number, line in enumerate(lines_of(stream, file), 1):
                if line.strip():
                    yield f"data.path: {file}, line {number:,}", _parse(line, f"data.path: {file}, line {number:,}")
            return
        csv.field_size_limit(CSV_FIELD)
        text = io.TextIOWrapper(cast(BinaryIO, stream), encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter="\t" if suffix == ".tsv" else ",", strict=True)
        try:
            for record in reader:
                place, names = f"data.path: {file}, line {reader.line_num:,}", reader.fieldnames or ()
                if None in record:
                    raise ValueError(
                        f"{place}: {len(names) + len(record[None])} fields below {len(names)} columns; put a text that "
                        'holds a separator into quotes, "…"'
                    )
                if len(record) < len(names):
                    raise ValueError(f"{place}: two columns of the header have the same name: {', '.join(names)}")
                yield place, record
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"data.path: {file}, after line {reader.line_num:,}: {error}; save it as UTF-8 csv"
            ) from None
        finally:
            text.detach()


def _parse(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: no object; a row is an object with {WANTED}")
    return record


def _parquet_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"data.path: {file}, row {number:,}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"data.path: {file} is no parquet file, or is damaged ({str(error).partition(chr(10))[0]})"
        ) from None
