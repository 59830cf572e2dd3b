"""Documents in text files: plain, JSON lines or Parquet, optionally compressed."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from stability.corpora.io.files import (
    PACKED,
    add_location,
    find_compression,
    find_files,
    lines_of,
    open_unpacked,
    suffix_of,
)
from stability.corpora.tokens.fasta import SUFFIXES as FASTA_SUFFIXES
from stability.printable import line_of

JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*(kind + packed for kind in (".txt", *JSON_LINES) for packed in ("", *PACKED)), ".parquet")
BLOCK_CHARACTERS = 4096
BYTES_PER_READ = 1 << 20
ROWS_PER_READ = 256
BYTE_ORDER_MARK = "\ufeff"  # written by Windows at the start of a file; not text
NOT_TEXT = re.compile("[\0\ud800-\udfff]")


def text_files(path: str) -> list[Path]:
    """Return a file, or a folder's files of `SUFFIXES`, sorted.

    Raises:
        ValueError: as `find_files`.
    """
    return find_files(path, SUFFIXES, "text file", other=("data=dna", FASTA_SUFFIXES))


def documents(file: Path, field: str) -> Iterator[str | None]:
    """Yield one file's documents, at most one in memory; None for a null text.

    Empty texts are skipped.

    Raises:
        ValueError: the file is invalid or has no document; the message names the place.
    """
    num_documents = num_null = num_blank = 0
    with open_unpacked(file) as stream:
        kind = suffix_of(file, SUFFIXES)
        if kind == ".parquet":
            texts = rows(stream, file, field)
        else:
            texts = records(stream, file, field) if kind.startswith(JSON_LINES) else blocks(characters(stream, file))
        for text in texts:
            num_null += text is None
            num_blank += text == ""
            num_documents += bool(text)
            if text != "":
                yield text
    if num_null and not num_documents:
        counts = f"null ({num_null:,})" + (f" or empty ({num_blank:,})" if num_blank else "")
        raise ValueError(
            f"data.path: {file} holds no document: every '{field}' is {counts}; remove it, or name another key with "
            "data.field=KEY"
        )
    if not num_documents:
        raise ValueError(f"data.path: {file} is empty (no document in it); remove it or fill it")


def records(stream: BufferedIOBase, file: Path, field: str) -> Iterator[str | None]:
    """Yield the field's text from each JSON line that is not blank; None for null.

    Args:
        stream: the bytes of an `open_unpacked` file.
        file: its path, for messages.
        field: key of the text.

    Raises:
        ValueError: a line is invalid; the message names the place.
    """
    offset = 0
    for number, line in lines(stream, file):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _make_utf8_error(file, offset + error.start, line[error.start], number) from None
        if not offset:
            text = text.removeprefix(BYTE_ORDER_MARK)
        offset += len(line)
        if text.strip():
            yield _record(text.rstrip(), f"data.path: {file}, line {number}", field)


def lines(stream: BufferedIOBase, file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line) of an `open_unpacked` file.

    Raises:
        ValueError: as `lines_of`.
    """
    number = 0
    with add_location(lambda: f"{number:,} whole lines were read"):
        for line in lines_of(stream, file):
            number += 1
            yield number, line


def _record(line: str, place: str, field: str) -> str | None:
    """Return one JSON line's text, or None for null.

    Raises:
        ValueError: the line is no object or lacks the field.
    """
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place} is no JSON ({error.msg}, column {error.colno}); each line must be one object with the key "
            f"'{field}'"
        ) from None
    except (ValueError, RecursionError) as error:  # e.g. numbers with thousands of digits, deeply nested brackets
        raise ValueError(f"{place} cannot be read as JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{place} is {type(record).__name__}, no JSON object; each line must be one object with the key '{field}'"
        )
    if field not in record:
        raise ValueError(
            f"{place} has no key '{field}'; it has: {', '.join(map(str, record)) or 'none'}; name one with "
            "data.field=KEY"
        )
    return check_text(record[field], place, field)


def check_text(text: Any, place: str, field: str) -> str | None:
    """Return a table's value if it is text or None.

    Args:
        text: the value.
        place: its location, for messages.
        field: its key, for messages.

    Raises:
        ValueError: the value is no text.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: '{field}' holds {type(text).__name__}, not text; name another key with data.field=KEY"
        )
    if NOT_TEXT.search(text):
        raise ValueError(
            f"{place}: '{field}' holds U+0000 or half of a surrogate pair, which are no text; take them out"
        )
    return text


def rows(stream: BufferedIOBase, file: Path, field: str) -> Iterator[str | None]:
    """Yield the field's text from each row of a Parquet file; None for null.

    Args:
        stream: the bytes of an `open_unpacked` file.
        file: its path, for messages.
        field: column of the text.

    Raises:
        ValueError: the file is invalid or lacks the column.
    """
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        table = parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"data.path: {file} has no column '{field}'; it has: {', '.join(names) or 'none'}; name one with "
                "data.field=COLUMN"
            )
        for batch in table.iter_batches(batch_size=ROWS_PER_READ, columns=[field], use_threads=False):
            for value in batch.column(0).to_pylist():
                number += 1
                yield check_text(value, f"data.path: {file}, row {number}", field)
    except (pyarrow.ArrowException, OSError) as error:  # Arrow raises bare OSErrors for pages that do not unpack
        message = line_of(error)
        raise ValueError(
            f"data.path: {file} is cut short or no Parquet file ({message}; {number:,} rows were read); fetch or "
            "write it again"
        ) from None


def characters(stream: BufferedIOBase, file: Path) -> Iterator[str]:
    """Yield the decoded file in pieces of at most about a million characters.

    A byte order mark is removed.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, num_lines = 0, 0
    while True:
        with add_location(lambda: f"{num_lines:,} whole lines were read"):  # noqa: B023 called before the loop goes on
            piece = stream.read1(BYTES_PER_READ)  # returns the bytes before an error
        if b"\0" in piece:
            raise ValueError(
                f"data.path: {file} holds a zero byte at byte {offset + piece.index(0):,}: binary, or UTF-16; save "
                "it as UTF-8 text"
            )
        held = len(decoder.getstate()[0])  # bytes of a character cut by the last piece
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            at = offset - held + error.start
            line = num_lines + 1 + error.object[: error.start].count(b"\n")
            raise _make_utf8_error(file, at, error.object[error.start], line) from None
        num_lines += piece.count(b"\n")
        yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
        offset += len(piece)
        if not piece:
            return


def blocks(pieces: Iterator[str]) -> Iterator[str]:
    """Cut text into blocks of 4,096 to 8,192 characters.

    A block ends after the first line end at or past 4,096 characters, at the latest after 8,192. The pieces' borders
    have no effect.
    """
    text, start = "", 0
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while len(text) - start >= 2 * BLOCK_CHARACTERS:
            stop = _block_end(text, start)
            yield text[start:stop]
            start = stop
    while start < len(text):
        stop = _block_end(text, start)
        yield text[start:stop]
        start = stop


def _block_end(text: str, start: int) -> int:
    line_end = text.find("\n", start + BLOCK_CHARACTERS - 1, start + 2 * BLOCK_CHARACTERS)
    return line_end + 1 if line_end >= 0 else start + 2 * BLOCK_CHARACTERS


def _make_utf8_error(file: Path, offset: int, byte: int, line: int) -> ValueError:
    unpacked = " of the unpacked text" if find_compression(file) else ""
    return ValueError(
        f"data.path: {file} is not UTF-8 at byte {offset:,}{unpacked} (0x{byte:02x}), in line {line:,}; convert it "
        "to UTF-8"
    )
