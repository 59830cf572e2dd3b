"""Define the pieces of a report: headings, paragraphs, tables, pictures.

A section lists its pieces; the writers of PDF, browser page and single files iterate over them. The functions return a
tuple with one piece or none, so that a section's pieces are a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from analysis.drawing.style import WIDTH_INCHES
from analysis.drawing.typeset import Table, literal, prose


@dataclass(frozen=True)
class Heading:
    """A section's title."""

    text: str

    def typst(self) -> str:
        return f"#heading(depth: 1)[{prose(self.text)}]\n"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of running text."""

    text: str

    def typst(self) -> str:
        return f"{prose(self.text)}\n\n"


@dataclass(frozen=True)
class Picture:
    """A figure over its caption, whole on one page.

    ``name``: as in `analysis.sections.section.Section`; ``file``: its vector file beside the document.
    """

    name: str
    figure: Figure
    caption: str
    file: str

    def typst(self) -> str:
        width = min(1.0, self.figure.get_figwidth() / WIDTH_INCHES)
        image = f"image({literal(self.file)}, width: {100 * width:.1f}% * shrink)"
        return f"#figure(caption: [{prose(self.caption)}], {image})\n"


@dataclass(frozen=True)
class Boxed:
    """Paragraphs on a tinted ground, for a hurried reader."""

    paragraphs: tuple[str, ...]

    def typst(self) -> str:
        return (
            '#block(width: 100%, fill: rgb("#f3f5f7"), inset: 8pt, radius: 2pt)[#set text(size: 9.4pt)\n'
            + "\n\n".join(prose(text) for text in self.paragraphs)
            + "]\n"
        )


@dataclass(frozen=True)
class Small:
    """A line in small type: provenance, or what is left out."""

    text: str

    def typst(self) -> str:
        return f"#text(size: 7pt, fill: muted)[{prose(self.text)}]\n\n"


@dataclass(frozen=True)
class PageBreak:
    """The end of a page, if it is not empty; with ``only`` of that page alone, so that what runs over goes on."""

    only: int | None = None

    def typst(self) -> str:
        end = "pagebreak(weak: true)"
        return f"#{end}\n" if self.only is None else f"#context if here().page() == {self.only} {{ {end} }}\n"


@dataclass(frozen=True)
class Contents:
    """The headings after it with their pages, in two columns."""

    def typst(self) -> str:
        later = "heading.where(level: 1).after(here())"
        return (
            f"#block(breakable: false)[#context columns(2)[#set text(size: 8.6pt)\n#for each in query({later}) ["
            "#link(each.location())[#each.body #box(width: 1fr, repeat[.]) #each.location().page()] #linebreak()]]]\n"
        )


@dataclass(frozen=True)
class Compact:
    """Smaller type and figures from here on."""

    def typst(self) -> str:
        return (
            "#set text(size: 8.6pt)\n#let shrink = 0.8\n#set table(inset: (x: 4pt, y: 2.4pt))\n"
            "#show table: set text(size: 7.4pt)\n#show figure.caption: set text(size: 7.6pt)\n"
            "#show figure: set block(above: 1em, below: 1em)\n"
        )


@dataclass(frozen=True)
class Facts:
    """A list of names and values, line by line."""

    pairs: tuple[tuple[str, str], ...]

    def typst(self) -> str:
        rows = "".join(f"text(fill: muted, {literal(name)}), {literal(value)},\n" for name, value in self.pairs)
        return f"#grid(columns: (3.2cm, 1fr), row-gutter: 0.55em, column-gutter: 0.6em,\n{rows})\n"


Piece = Heading | Paragraph | Picture | Boxed | Small | PageBreak | Contents | Compact | Facts | Table
Pieces = tuple[Piece, ...]


def heading(text: str) -> Pieces:
    """Return a section's heading."""
    return (Heading(text),)


def paragraph(text: str) -> Pieces:
    return (Paragraph(text),)


def box(paragraphs: Sequence[str]) -> Pieces:
    """Return paragraphs on a tinted ground; nothing without paragraphs."""
    return (Boxed(tuple(paragraphs)),) if paragraphs else ()


def small(text: str) -> Pieces:
    """Return a line in small type; nothing without text."""
    return (Small(text),) if text else ()


def facts(pairs: Iterable[tuple[str, str]]) -> Pieces:
    return (Facts(tuple(pairs)),)


def shown(tables: Iterable[Table | None]) -> Pieces:
    """Return tables one after another, without None."""
    return tuple(table for table in tables if table is not None)


def typst(pieces: Iterable[Piece]) -> str:
    """Return pieces one after another as typst source."""
    return "".join(piece.typst() for piece in pieces)
