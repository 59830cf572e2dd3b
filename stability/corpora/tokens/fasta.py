"""Read FASTA a megabyte at a time, each record's nucleotides as one-byte tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path

from stability.corpora.io.files import PACKED, UNREADABLE, lines_of, machine_memory, open_unpacked
from stability.corpora.tokens.augmentation import CODES, INVALID, encode

SUFFIXES = tuple(kind + packed for kind in (".fa", ".fasta", ".fna", ".fas", ".ffn") for packed in ("", *PACKED))
BYTES_PER_READ = 1 << 20
BLANK = b" \t\r\n"
COMMENT = b";"
END = b"*\x1a"  # record ends in some programs' files: a stop, and DOS's end of file
COPIES = 4  # largest number of copies of a record in memory


def records(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, tokens) of each record.

    The name is the header's first word; a record without sequence has no tokens. Lines beginning with a semicolon are
    comments.

    Raises:
        ValueError: the file is invalid; the message names file, record, line and character.
    """
    with open_unpacked(file) as stream:
        yield from _Reader(file).records(stream)


class _Reader:
    def __init__(self, file: Path):
        self.file, self.name = file, ""
        self.line = self.header_line = 0
        self.tokens: list[bytes] = []
        self.is_ended = False  # by `END`

    def records(self, stream: BufferedIOBase) -> Iterator[tuple[str, bytes]]:
        """Yield (name, tokens) of each record in a stream.

        Raises:
            ValueError: there is no record.
        """
        for lines in batches(lines_of(stream, self.file), self._describe_progress):
            if not self.line:
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            first = 0
            for index, line in enumerate(lines):
                if line[:1] == COMMENT:
                    lines[index] = b""
                if line[:1] != b">":
                    continue
                self._add(lines[first:index])
                if self.header_line:
                    yield self._finish_record()
                self._start(line)
                first = index + 1
            self._add(lines[first:])
        if not self.header_line:
            raise ValueError(f"data.path: {self.file} is empty (no record in it); remove it or fill it")
        yield self._finish_record()

    def _describe_progress(self) -> str:
        return f"{self.line:,} whole lines were read" + (
            f", the last in record '{self.name}'" if self.header_line else ""
        )

    def _start(self, header: bytes) -> None:
        """Begin a record by its header line.

        Raises:
            ValueError: the header is not UTF-8, or lines end in a carriage return alone.
        """
        self.line += 1
        self.header_line = self.line
        try:
            words = header[1:].decode("utf-8").split(maxsplit=1)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.path: {self.file}, line {self.line}: the header is not UTF-8 "
                f"(0x{header[1 + error.start]:02x}); convert it"
            ) from None
        if b"\r" in header.rstrip(BLANK):
            raise ValueError(
                f"data.path: {self.file}, line {self.line}: its lines end in a carriage return alone; convert them: "
                "tr '\\r' '\\n' <OLD >NEW"
            )
        self.name, self.tokens, self.is_ended = (words or ["without a name"])[0], [], False

    def _add(self, lines: list[bytes]) -> None:
        """Add sequence lines to the record.

        Raises:
            ValueError: a letter is no nucleotide, or the record is too long for memory.
        """
        letters = b"".join([line.rstrip(BLANK) for line in lines])
        sequence = letters.rstrip(END)
        tokens = encode(sequence)
        if tokens and (self.is_ended or not self.header_line) or bytes([INVALID]) in tokens:
            self._refuse(lines)
        self.is_ended = self.is_ended or len(sequence) < len(letters)
        self.line += len(lines)
        self.tokens.append(tokens)
        if (length := sum(map(len, self.tokens))) * COPIES > machine_memory():
            raise ValueError(
                f"data.path: {self.file}, record '{self.name}' is longer than {length:,} nucleotides, more than this "
                f"machine's memory holds {COPIES} times; cut it into several records"
            )

    def _finish_record(self) -> tuple[str, bytes]:
        return self.name, b"".join(self.tokens)

    def _refuse(self, lines: list[bytes]) -> None:
        """Raise for the first faulty line."""
        for number, line in enumerate(lines, start=self.line + 1):
            if not self.header_line and line.strip():
                shown = line.strip()[:20].decode("utf-8", "replace")
                raise ValueError(
                    f"data.path: {self.file}, line {number} is '{shown}…' before any header; FASTA begins a record "
                    "with a line '>name'"
                )
            if (at := encode(line.rstrip(BLANK)).find(INVALID)) >= 0:
                character = repr(chr(line[at])) if line[at] < 128 else f"byte 0x{line[at]:02x}"
                raise ValueError(
                    f"data.path: {self.file}, record '{self.name}', line {number}, character {at + 1} is "
                    f"{character}, which is no nucleotide.\nAccepted are the codes of the IUPAC, {CODES[:-1]}, in "
                    "either case, and the gap, - or ."
                )
        raise ValueError(
            f"data.path: {self.file}, record '{self.name}', line {self.line + 1}: its sequence goes on after '*' or "
            "the end of file of DOS; take that out"
        )


def batches(lines: Iterator[bytes], reached: Callable[[], str]) -> Iterator[list[bytes]]:
    """Yield lists of lines, about a megabyte each.

    Lines before an error are yielded first, so ``reached()`` includes them.
    """
    found: list[bytes] = []
    num_bytes = 0
    try:
        for line in lines:
            found.append(line)
            num_bytes += len(line)
            if num_bytes >= BYTES_PER_READ:
                yield found
                found, num_bytes = [], 0
    except UNREADABLE as error:
        if found:
            yield found
        error.add_note(reached())
        raise
    if found:
        yield found
