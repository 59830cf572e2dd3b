"""Define what a report is made of, piece by piece: headings, paragraphs, tables, pictures. A section says which pieces
it has; who writes a PDF, a page for the browser or single files goes through them.

The functions give a tuple of one piece, or of none, so that a section's pieces are a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.drawing.typeset import Table, literal, prose


@dataclass(frozen=True)
class Heading:
    """The title of a section."""

    text: str

    def typst(self) -> str:
        return f"#heading(level: 1)[{prose(self.text)}]\n"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of running text."""

    text: str

    def typst(self) -> str:
        return f"{prose(self.text)}\n\n"


@dataclass(frozen=True)
class Picture:
    """A figure of a section, drawn into the file ``path``, which lies beside the document, over its caption. It stays
    whole on one page. ``name``: as in `analysis.sections.section.Section`."""

    name: str
    path: Path
    caption: str

    def typst(self) -> str:
        return f"#figure(caption: [{prose(self.caption)}], image({literal(self.path.name)}))\n"


@dataclass(frozen=True)
class Boxed:
    """Paragraphs on a tinted ground, what a hurried reader should read."""

    paragraphs: tuple[str, ...]

    def typst(self) -> str:
        return (
            '#block(width: 100%, fill: rgb("#f3f5f7"), inset: 8pt, radius: 2pt)[#set text(size: 9.4pt)\n'
            + "\n\n".join(prose(text) for text in self.paragraphs)
            + "]\n"
        )


@dataclass(frozen=True)
class Facts:
    """A list of what was run: a name and what it was, line by line."""

    pairs: tuple[tuple[str, str], ...]

    def typst(self) -> str:
        rows = "".join(f"text(fill: muted, {literal(name)}), {literal(value)},\n" for name, value in self.pairs)
        return f"#grid(columns: (3.2cm, 1fr), row-gutter: 0.55em, column-gutter: 0.6em,\n{rows})\n"


Piece = Heading | Paragraph | Picture | Boxed | Facts | Table
Pieces = tuple[Piece, ...]


def heading(text: str) -> Pieces:
    """Return a section's heading."""
    return (Heading(text),)


def paragraph(text: str) -> Pieces:
    return (Paragraph(text),)


def boxed(paragraphs: Sequence[str]) -> Pieces:
    """Return paragraphs on a tinted ground; nothing where there are none."""
    return (Boxed(tuple(paragraphs)),) if paragraphs else ()


def facts(pairs: Iterable[tuple[str, str]]) -> Pieces:
    return (Facts(tuple(pairs)),)


def shown(tables: Iterable[Table | None]) -> Pieces:
    """Return tables one after another, without those that have nothing to show."""
    return tuple(table for table in tables if table is not None)


def typst(pieces: Iterable[Piece]) -> str:
    """Return pieces one after another as the source of typst."""
    return "".join(piece.typst() for piece in pieces)
