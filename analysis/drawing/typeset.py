"""Render a table as plain text and as typst, and write a typst document.

Text never enters typst as markup: every string becomes a typst string literal, with backslash and quote escaped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from stability.printable import visible

LINES_KEPT_TOGETHER = 14  # of a table that stays on one page
SIZES = ((60, 19.0), (150, 15.0), (1_000_000, 12.5))  # a title's characters at most, and its size in points
LONG_NAME = 11  # a table's word with more characters may break
BREAKS = re.compile(r"[=,_]|(?<=[a-z])\.(?=[a-z])")  # break after one of these
TERMS = {"α_max": "α#sub[max]", "λ_max": "λ#sub[max]", "λ_1": "λ#sub[1]", "log10": "log#sub[10]"}
HYPHEN = re.compile(r"(?<![\w.)=\[\]/-])-(?=\d)")  # a minus sign before a number, not the hyphen of 1e-3 or of a date
NO_BREAK = re.compile(r"(?<=\d) (?=%)|(?<=[≥≤<>=±]) (?=[\d−-])")


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
        text: the value.
        detail: small lines below it (interval, n).
        bold: whether it stands out.
        whole: the cell before its lines were broken for a narrow column.
        pale: whether it is grey, in plain text in parentheses: a value that says little.
    """

    text: str
    detail: str = ""
    bold: bool = False
    whole: Cell | None = None
    pale: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header.

    Attributes:
        groups: headings over several columns (text, span), covering all columns.
        align: typst's alignment, one per column.
        widths: typst's width, one per column.
        brief: replaces the caption without details.
    """

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()
    align: tuple[str, ...] = ()
    widths: tuple[str, ...] = ()
    brief: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), "a row of another length than the header"
        assert not self.groups or sum(span for _, span in self.groups) == len(self.header), (
            "groups do not cover the columns"
        )

    def text(self, details: bool = True, wrap: int = 110) -> str:
        """Return aligned plain text; `*` marks bold. ``details=False`` omits the lines below the values."""
        rows = [_lines(row, details) for row in self.rows]
        names, groups = tuple(map(visible, self.header)), tuple((visible(text), span) for text, span in self.groups)
        columns = zip(names, *(line for row in rows for line in row), strict=True)
        widths = _widen([max(map(len, column)) for column in columns], groups)
        aligned = self.align or ("left",) + ("right",) * (len(self.header) - 1)
        body = [_pad(line, widths, aligned) for row in rows for line in row]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        head = [_group_line(groups, widths)] if groups else []
        lines = [visible(self.title), rule, *head, _pad(names, widths, aligned), rule, *body, rule]
        caption = (self.caption if details or not self.brief else self.brief).rstrip()
        caption += " * stands for bold." if any(cell.bold for row in self.rows for cell in row) else ""
        return "\n".join(line.rstrip() for line in [*lines, *textwrap.wrap(visible(caption, keep="\n"), wrap)])

    def typst(self) -> str:
        """Return a `figure` of kind table with rules at top, bottom and header.

        It may break over pages and repeats its header.
        """
        columns = ", ".join(self.widths) if self.widths else "auto, " * len(self.header)
        aligned = self.align or ("left",) + ("center",) * (len(self.header) - 1)
        head = "".join(f"table.cell(colspan: {span}, align: center, {_label(text)})," for text, span in self.groups)
        head += _span_rules(self.groups)
        head += "".join(f"{_label(name)}," for name in self.header)
        body = "".join("".join(_cell(cell) for cell in row) + "\n" for row in self.rows)
        # A short table stays on one page with its caption; a long one may break anywhere, or half a page stays empty.
        breakable = str(sum(len(_lines(row, details=True)) for row in self.rows) > LINES_KEPT_TOGETHER).lower()
        return (
            f"#[#show figure: set block(breakable: {breakable})\n#figure(caption: "
            f"[#strong[{prose(self.title + '.')}] {prose(self.caption)}], kind: table, table(\ncolumns: ({columns}), "
            f"align: ({', '.join(f'{side} + top' for side in aligned)}), stroke: none,\ntable.hline(stroke: 0.8pt), "
            f"table.header({head}), table.hline(stroke: 0.5pt),\n{body}table.hline(stroke: 0.8pt)))]\n"
        )


def _lines(row: tuple[Cell, ...], details: bool) -> list[list[str]]:
    """Return a row as one line, and further lines for its longest detail."""
    below = [list(map(visible, cell.detail.split("\n"))) if details and cell.detail else [] for cell in row]
    depth = max(len(part) for part in below)
    lines = [[_plain_text(cell) for cell in row]]
    return lines + [[part[index] if index < len(part) else "" for part in below] for index in range(depth)]


def _plain_text(cell: Cell) -> str:
    text = visible(cell.text) + ("*" if cell.bold else "")
    return f"({text})" if cell.pale else text


def _widen(widths: list[int], groups: tuple[tuple[str, int], ...]) -> list[int]:
    """Return column widths large enough for every group's heading."""
    start = 0
    for text, span in groups:
        lack = len(text) - (sum(widths[start : start + span]) + 2 * (span - 1))
        widths[start + span - 1] += max(0, lack)
        start += span
    return widths


def _pad(line, widths: list[int], aligned: tuple[str, ...]) -> str:
    return "  ".join(
        text.ljust(width) if side == "left" else text.rjust(width)
        for text, width, side in zip(line, widths, aligned, strict=True)
    )


def _group_line(groups: tuple[tuple[str, int], ...], widths: list[int]) -> str:
    parts, start = [], 0
    for text, span in groups:
        parts.append(text.center(sum(widths[start : start + span]) + 2 * (span - 1)))
        start += span
    return "  ".join(parts)


def _span_rules(groups: tuple[tuple[str, int], ...]) -> str:
    rules, start = "", 0
    for text, span in groups:
        # A hair of air on the right keeps two neighbouring headings' rules apart.
        rules += f"table.hline(start: {start}, end: {start + span}, stroke: 0.3pt)," if text else ""
        start += span
    return rules


def _label(text: str) -> str:
    """Return a column heading."""
    return f"strong[{_wrapped(text)}]" if text else "[]"


def longest_part(name: str) -> int:
    """Return the number of characters of a name's longest part that a table cannot break."""
    parts = (part for word in name.split() for part in BREAKS.sub("\\g<0> ", word).split())
    return max(map(len, parts), default=0)


def _wrapped(text: str) -> str:
    """Return `prose` of which a long word may break after "=", a comma, an underscore or a name's full stop."""
    source = prose(text)
    for word in {word for word in text.split(" ") if len(word) > LONG_NAME}:
        source = source.replace(word, BREAKS.sub("\\g<0>\u200b", word))
    return source


def _cell(cell: Cell) -> str:
    text = f"#strong[{_wrapped(cell.text)}]" if cell.bold else _wrapped(cell.text)
    text = f"#text(fill: muted)[{text}]" if cell.pale else text
    below = "".join(f" #linebreak() #detail[{_wrapped(line)}]" for line in cell.detail.split("\n") if line)
    return f"[{text}{below}],"


def literal(text: object) -> str:
    """Return a typst string literal of any text; lines become one, and long words may break anywhere.

    A number has a minus sign, and stays on the line of its % or ≥.
    """
    plain = NO_BREAK.sub("\u00a0", HYPHEN.sub("−", visible(re.sub(r"\s", " ", str(text)))))
    words = [_breakable(word) for word in plain.split(" ")]
    return '"' + " ".join(words).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _breakable(word: str) -> str:
    """Insert zero-width spaces after every separator of a word too long for a line."""
    if len(word) <= 48:
        return word
    return "".join(
        f"{character}\u200b" if character in "/,._-=&?" or index % 24 == 23 else character
        for index, character in enumerate(word)
    )


def prose(text: str) -> str:
    """Return plain text as typst content: string literals, a few terms as mathematics, curly apostrophes."""
    parts = re.split("|".join(map(re.escape, TERMS)), text.replace("'", "’"))
    terms = re.findall("|".join(map(re.escape, TERMS)), text)
    return "".join(f"#{literal(part)}{TERMS.get(term, '')}" for part, term in zip(parts, [*terms, ""], strict=True))


PREAMBLE = """
#let muted = rgb("#5b6470")
#let shrink = 1
#let detail(body) = text(size: 6.4pt, fill: muted, body)
#set document(title: TITLE)
#set page(paper: "a4", margin: (x: 2.2cm, top: 1.9cm, bottom: 2cm),
  footer: context [#set text(size: 7.5pt, fill: muted); #TITLE #h(1fr) #counter(page).display("1 of 1", both: true)])
#set text(font: "Libertinus Serif", size: 10pt, lang: "en")
#set par(justify: true, leading: 0.58em, spacing: 0.9em)
#set table(inset: (x: 5pt, y: 3.6pt))
#show table: set text(size: 8.4pt)
#show table: set par(justify: false, leading: 0.42em)
#show grid: set par(justify: false)
#show figure.caption: set text(size: 8.6pt)
#show figure.caption: it => block(width: 100%, align(left, it))
#show figure.where(kind: table): set figure.caption(position: top)
#show figure.where(kind: table): set block(breakable: true)
#show figure: set block(above: 1.3em, below: 1.5em)
#show heading.where(level: 1): set text(size: 12.5pt)
#show heading.where(level: 1): set block(above: 1.4em, below: 0.75em)
"""


def parts(titled: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of contents, then each body on a page of its own.

    ``titled``: (title, subtitle, body) of each.
    """
    head = "#outline(title: none, depth: 1)\n#show heading.where(level: 1): set text(size: 16pt)\n"
    return head + "".join(
        f"#pagebreak()\n#heading(level: 1, {literal(title)})\n#text(size: 10pt, fill: muted, "
        f"{literal(subtitle)})\n\n#[#set heading(offset: 1)\n#show heading.where(level: 2): set text(size: "
        f"12.5pt)\n{body}]\n"
        for title, subtitle, body in titled
    )


def document(title: str, subtitle: str, body: str, running: str = "") -> str:
    """Return a whole typst document.

    Args:
        title: its title.
        subtitle: the line below it; "" for none.
        body: typst source.
        running: title in the file's properties and in each page's foot; by default the title.
    """
    size = next(points for most, points in SIZES if len(title) <= most)
    large = f'#[#set par(justify: false)\n#text(size: {size}pt, weight: "bold", hyphenate: false)[{prose(title)}]]'
    below = f"#text(size: 10pt, fill: muted, {literal(subtitle)})\n\n" if subtitle else ""
    return PREAMBLE.replace("TITLE", literal(running or title)) + f"{large}\n\n{below}" + body
