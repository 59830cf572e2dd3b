"""A user's own text: a file or a folder of ``.txt`` and ``.jsonl``, either of them with ``.gz``."""

from __future__ import annotations

import codecs
import difflib
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from stability.config import Settings
from stability.data._base import AbstractDataSource, Corpus, split_documents

# Raised when the same files would give other documents.
VERSION = 1
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
BLOCK_CHARACTERS = 4096
BYTES_PER_READ = 1 << 20
BYTE_ORDER_MARK = "\ufeff"  # Windows puts one at the start of a file; it is no text
NOT_TEXT = re.compile("[\0\ud800-\udfff]")


class TextConfig(Settings):
    """Where the text is."""

    path: str = Field(min_length=1, description="a .txt or .jsonl file (either with .gz), or a folder of such files, read with its subfolders")
    field: str = Field(default="text", min_length=1, description="key that holds the text in a line of a .jsonl file")


class Text(AbstractDataSource):
    """Documents: a ``.jsonl`` file's lines, a ``.txt`` file's blocks of about 4,096 characters (cut at line ends, see `blocks`). UTF-8, strictly."""

    Config: ClassVar[type[Settings]] = TextConfig

    @classmethod
    def prepare(cls, config: TextConfig) -> Corpus:
        """Read every file once. Errors: ``ValueError`` naming the file, the place in it and what would be right."""
        files = text_files(config.path)
        root = Path(config.path).expanduser().resolve()
        origin = f"text of {root.name}" + (f" ({len(files):,} files)" if root.is_dir() else "")
        hint = f".\nA document is a line of a .jsonl file or a block of {BLOCK_CHARACTERS:,} characters of a .txt file; repetitions count once."
        return split_documents((text for file in files for text in documents(file, config.field)), origin, hint)

    @classmethod
    def cache_key(cls, config: TextConfig) -> str:
        """The field, and kind and sha256 of each file: neither where the files lie nor how they are called."""
        files = [(_suffix(file), _sha256_of_file(file)) for file in text_files(config.path)]
        return json.dumps([VERSION, config.field, sorted(files)])


def text_files(path: str) -> list[Path]:
    """The file, or a folder's files of `SUFFIXES`, sorted; hidden ones are left out, links are followed.

    Errors: ``ValueError`` for a path that is missing (with a near miss beside it), of another kind, unreadable, or a folder without any.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if not _suffix(root):
            raise ValueError(f"data.path={path}: the name ends in none of {', '.join(SUFFIXES)}; rename or convert it")
        return [root]
    if not root.exists():
        neighbours = [file.name for file in root.parent.iterdir()] if root.parent.is_dir() and os.access(root.parent, os.R_OK) else []
        close = difflib.get_close_matches(root.name, neighbours, n=1)
        raise ValueError(f"data.path={path}: no such file or folder" + (f"; did you mean '{root.parent / close[0]}'?" if close else ""))
    if not root.is_dir():
        raise ValueError(f"data.path={path}: neither a file nor a folder; give one of {', '.join(SUFFIXES)} or a folder of them")
    found = sorted(file for file in _walk(root) if _suffix(file))
    if not found:
        raise ValueError(f"data.path={path}: the folder holds no text file; accepted are {', '.join(SUFFIXES)}")
    return found


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"data.path: cannot read the folder {error.filename}: {error.strerror}")

    seen: set[str] = set()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        if os.path.realpath(folder) in seen:  # a link back up would be followed for ever
            subfolders.clear()
            continue
        seen.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def documents(file: Path, field: str) -> Iterator[str]:
    """The documents of one file, never more of it in memory than one of them. Errors: ``ValueError`` naming file and place."""
    num_documents = 0
    with _opened(file) as stream:
        texts = records(stream, file, field) if _suffix(file).startswith(".jsonl") else blocks(characters(stream, file))
        for text in texts:
            num_documents += 1
            yield text
    if not num_documents:
        raise ValueError(f"data.path: {file} is empty (no document in it); remove it or fill it")


def records(stream: BufferedIOBase, file: Path, field: str) -> Iterator[str]:
    """The field's text of each line of JSON; lines that are blank and texts that are empty are no documents."""
    offset = 0
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(file, offset + error.start, line[error.start]) from None
        if not offset:
            text = text.removeprefix(BYTE_ORDER_MARK)
        offset += len(line)
        if text.strip():
            document = _record(text.rstrip(), f"data.path: {file}, line {number}", field)
            if document:
                yield document


def _record(line: str, place: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is no JSON ({error.msg}, column {error.colno}); each line must be one object with the key '{field}'") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets nested too deeply
        raise ValueError(f"{place} cannot be read as JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place} is {type(record).__name__}, no JSON object; each line must be one object with the key '{field}'")
    if field not in record:
        raise ValueError(f"{place} has no key '{field}'; it has: {', '.join(map(str, record)) or 'none'}; name one with data.field=KEY")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: '{field}' holds {type(text).__name__}, not text; name another key with data.field=KEY")
    if NOT_TEXT.search(text):
        raise ValueError(f"{place}: '{field}' holds U+0000 or half of a surrogate pair, which are no text; take them out")
    return text


def characters(stream: BufferedIOBase, file: Path) -> Iterator[str]:
    """The decoded file in pieces of about a million characters, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        piece = stream.read(BYTES_PER_READ)
        if b"\0" in piece:
            raise ValueError(f"data.path: {file} holds a zero byte at byte {offset + piece.index(0):,}: binary, or UTF-16; save it as UTF-8 text")
        held = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            at = offset - held + error.start
            raise _not_utf8(file, at, error.object[error.start]) from None
        yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
        offset += len(piece)
        if not piece:
            return


def blocks(pieces: Iterator[str]) -> Iterator[str]:
    """Cut after the first line end at or past 4,096 characters, at the latest after 8,192; the pieces' own borders make no difference."""
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


@contextmanager
def _opened(file: Path) -> Iterator[BufferedIOBase]:
    """The file's bytes, unpacked. Errors: ``ValueError`` where it cannot be opened, or proves no gzip or a cut one while it is read."""
    try:
        with gzip.open(file, "rb") if file.name.lower().endswith(".gz") else open(file, "rb") as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"data.path: {file} is cut short or no gzip file ({error}); fetch or pack it again") from None
    except OSError as error:
        raise ValueError(f"data.path: cannot read {file}: {error.strerror or error}") from None


def _not_utf8(file: Path, offset: int, byte: int) -> ValueError:
    unpacked = " of the unpacked text" if file.name.lower().endswith(".gz") else ""
    return ValueError(f"data.path: {file} is not UTF-8 at byte {offset:,}{unpacked} (0x{byte:02x}); convert it to UTF-8")


def _suffix(file: Path) -> str:
    """Which of `SUFFIXES` the name ends in, in either case; empty where in none."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")


def _sha256_of_file(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"data.path: cannot read {file}: {error.strerror}") from None


EXPORT = Text
