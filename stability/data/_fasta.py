"""FASTA, read a megabyte at a time: each record's nucleotides as tokens, one byte each."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from stability.data._files import opened
from stability.data._nucleotides import CODES, INVALID, encode

SUFFIXES = tuple(kind + packed for kind in (".fa", ".fasta", ".fna") for packed in ("", ".gz", ".zst"))
BYTES_PER_READ = 1 << 20
BLANK = b" \t\r\n"


def records(file: Path) -> Iterator[tuple[str, bytes]]:
    """(name, tokens) of each record; the name is the header's first word. Errors: ``ValueError`` naming file, record, line and character."""
    with opened(file) as stream:
        yield from _Reader(file).records(stream)


class _Reader:
    def __init__(self, file: Path):
        self.file, self.name = file, ""
        self.line = self.header_line = 0
        self.tokens: list[bytes] = []

    def records(self, stream: BufferedIOBase) -> Iterator[tuple[str, bytes]]:
        while lines := stream.readlines(BYTES_PER_READ):
            first = 0
            for index, line in enumerate(lines):
                if line[:1] != b">":
                    continue
                self._add(lines[first:index])
                if self.header_line:
                    yield self._finished()
                self._start(line)
                first = index + 1
            self._add(lines[first:])
        if not self.header_line:
            raise ValueError(f"data.path: {self.file} is empty (no record in it); remove it or fill it")
        yield self._finished()

    def _start(self, header: bytes) -> None:
        self.line += 1
        self.header_line = self.line
        try:
            words = header[1:].decode("utf-8").split(maxsplit=1)
        except UnicodeDecodeError as error:
            raise ValueError(f"data.path: {self.file}, line {self.line}: the header is not UTF-8 (0x{header[1 + error.start]:02x}); convert it") from None
        self.name, self.tokens = (words or ["without a name"])[0], []

    def _add(self, lines: list[bytes]) -> None:
        tokens = encode_lines(lines)
        if tokens and not self.header_line or bytes([INVALID]) in tokens:
            self._refuse(lines)
        self.line += len(lines)
        self.tokens.append(tokens)

    def _finished(self) -> tuple[str, bytes]:
        tokens = b"".join(self.tokens)
        if not tokens:
            raise ValueError(f"data.path: {self.file}, line {self.header_line}: record '{self.name}' has a header and no sequence; remove it or fill it")
        return self.name, tokens

    def _refuse(self, lines: list[bytes]) -> None:
        """Raise for the first line that is at fault."""
        for number, line in enumerate(lines, start=self.line + 1):
            if not self.header_line and line.strip():
                shown = line.strip()[:20].decode("utf-8", "replace")
                raise ValueError(f"data.path: {self.file}, line {number} is '{shown}…' before any header; FASTA begins a record with a line '>name'")
            if (at := encode(line.rstrip(BLANK)).find(INVALID)) >= 0:
                character = repr(chr(line[at])) if line[at] < 128 else f"byte 0x{line[at]:02x}"
                raise ValueError(
                    f"data.path: {self.file}, record '{self.name}', line {number}, character {at + 1} is {character}, which is no nucleotide.\n"
                    f"Accepted are the codes of the IUPAC, {CODES[:-1]}, in either case, and the gap, - or ."
                )


def encode_lines(lines: list[bytes]) -> bytes:
    """Tokens of sequence lines; blanks at their ends are left out."""
    return encode(b"".join([line.rstrip(BLANK) for line in lines]))
