"""Make reports/<name>.html: one self-contained page with the PDF's tables and zoomable figures."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis import assembly
from analysis.drawing.files import replace_file
from analysis.drawing.interactive import Unknown, describe
from analysis.drawing.pieces import (
    Boxed,
    Compact,
    Contents,
    Facts,
    Heading,
    PageBreak,
    Paragraph,
    Picture,
    Piece,
    Pieces,
    Small,
)
from analysis.drawing.typeset import Cell, Table
from analysis.paper import contents
from analysis.sections.section import is_of_rates
from analysis.study.load import Study, load
from stability.printable import visible

# Plotly's own defaults let a click send a figure's data to its makers.
CONFIG = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
STYLE = """
:root { color: #1d232b; background: #fff; font: 16px/1.5 Georgia, 'Times New Roman', serif; }
body { max-width: 62rem; margin: 0 auto; padding: 0 1.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; }
h2 { font-size: 1.5rem; margin-top: 3rem; }
h3 { font-size: 1.15rem; margin-top: 2.2rem; }
.muted, .detail { color: #5b6470; } .detail { display: block; font-size: .72rem; line-height: 1.25; }
.small { font-size: .78rem; }
.boxed { background: #f3f5f7; padding: .7rem 1rem; border-radius: 4px; } .boxed p { margin: .4rem 0; }
figure { margin: 1.8rem 0; overflow-x: auto; } figcaption { font-size: .88rem; margin: .5rem 0; max-width: 56rem; }
table { border-collapse: collapse; font-size: .88rem; border-top: 2px solid; border-bottom: 2px solid; }
thead { border-bottom: 1px solid; } th, td { padding: .22rem .6rem; vertical-align: top; text-align: center; }
th[colspan] { border-bottom: 1px solid #5b6470; } .left { text-align: left; } .right { text-align: right; }
dl { display: grid; grid-template-columns: 10rem 1fr; gap: .3rem .8rem; }
dt { color: #5b6470; } dd { margin: 0; overflow-wrap: anywhere; }
sub { line-height: 0; } h3.part { font-size: 1.5rem; }
img { max-width: 100%; } .plotly-graph-div { border: 1px solid #e3e6ea; width: fit-content; }
nav { position: sticky; top: 0; z-index: 1001; background: #fff; font-size: .88rem; padding: .6rem 0;
  overflow: auto; white-space: nowrap; border-bottom: 1px solid #e3e6ea; }
nav a { margin-right: 1.1rem; } nav a.part { font-weight: bold; } html { scroll-padding-top: 3.2rem; }
summary { cursor: pointer; margin: 1.4rem 0 .6rem; } summary h3 { display: inline; }
th button { all: unset; cursor: pointer; text-decoration: underline dotted #5b6470; text-underline-offset: .2em; }
:focus-visible { outline: 2px solid #0072b2; outline-offset: 2px; }
[aria-sort=ascending] button::after { content: ' ↑'; } [aria-sort=descending] button::after { content: ' ↓'; }
@media (min-width: 76rem) {
  body { display: grid; grid-template-columns: 14rem minmax(0, 60rem); gap: 2rem; max-width: 76rem; }
  nav { align-self: start; box-sizing: border-box; max-height: 100vh; padding: 2.2rem 0; border: 0;
    white-space: normal; }
  nav a { display: block; margin: .3rem 0; } nav a.part { margin-top: 1rem; } html { scroll-padding-top: 1rem; }
}
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { nav, .modebar { display: none; } th button { text-decoration: none; } }
"""
# A figure of a closed section is drawn once that opens. A column sorts if its cells are all words, or all numbers of
# one unit; a table with an empty first cell does not, as its rows belong together.
SCRIPT = r"""
const pending = new Map(), NUMBER = /^[≥≤<>~ ]*([−+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(.*)$/;
function figure(id, draw) {
  const section = document.getElementById(id).closest("details");
  if (section && !section.open) pending.set(id, draw); else draw();
}
function drawIn(section) {
  for (const [id, draw] of pending) if (section.contains(document.getElementById(id))) { pending.delete(id); draw(); }
}
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const section = target && target.closest("details");
  if (section) { section.open = true; target.scrollIntoView(); }
}
function makeSortable(table) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows].pop().cells;
  const words = cell => [...cell.childNodes].filter(each => each.className !== "detail").map(each => each.textContent);
  const value = cell => words(cell).join("").trim().replace(/^[-–—]+$/, "");
  if (rows.length < 3 || rows.some(row => !value(row.cells[0]))) return;
  [...heads].forEach((head, column) => {
    const text = new Map(rows.map(row => [row, value(row.cells[column])])), known = rows.filter(row => text.get(row));
    const parts = new Map(known.map(row => [row, text.get(row).match(NUMBER)]));
    const units = new Set([...parts.values()].map(each => each && each[2])), areWords = units.has(null);
    if (units.size !== 1) return;
    const number = row => Number(parts.get(row)[1].replace("−", "-").replaceAll(",", ""));
    const byText = (a, b) => text.get(a).localeCompare(text.get(b), "en", { numeric: true });
    const compare = areWords ? byText : (a, b) => number(a) - number(b);
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "" }[head.ariaSort] ?? "ascending";
      [...heads].forEach(each => each.removeAttribute("aria-sort"));
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const sorted = next ? [...known].sort((a, b) => sign * compare(a, b)) : [];
      table.tBodies[0].append(...new Set([...sorted, ...rows]));
    });
  });
}
addEventListener("toggle", event => drawIn(event.target), true);
addEventListener("hashchange", reveal);
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach(each => { each.open = true; });
  drawIn(document);
});
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table").forEach(makeSortable);
  document.querySelector("nav").addEventListener("click", () => setTimeout(reveal));
  reveal();
});
"""


def build_page(study_dirs: Sequence[Path | str | Study], name: str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.html`` about one or several studies, and return its path.

    Equal results yield equal bytes.

    Args:
        study_dirs: studies, or their folders.
        name: file name, and title for several studies.
        reports_dir: target folder.

    Raises:
        ValueError: as `analysis.study.load.load`.
        RuntimeError: plotly is not installed.
    """
    studies = [load(study_dir) for study_dir in study_dirs]
    several = len(studies) > 1
    page = _Page()
    page.add([assembly.comparison(studies)] if several else [])
    for study in studies:
        if several:
            page.links.append(_link(study.name, study.name, is_part=True))
            page.parts.append(f"<h2 id={_quote(study.name)}>{text(study.name)}</h2>")
        below = assembly.question(study) if several else "" if is_of_rates(study) else assembly.subtitle(study)
        page.parts += [f'<p class="muted">{text(below)}</p>'] if below else []
        page.add(assembly.pieces(study), f"{study.name}: " if several else "")
    if joint := assembly.together(studies):
        page.links.append(_link(assembly.TOGETHER, assembly.TOGETHER, is_part=True))
        page.parts.append(f"<h2 id={_quote(assembly.TOGETHER)}>{text(assembly.TOGETHER)}</h2>")
        page.add([joint], f"{assembly.TOGETHER}: ")
    title, below = assembly.joint_question(studies, name) if several else (assembly.question(studies[0]), "")
    return page.write(title, below, name, reports_dir)


def build_paper_page(study_dirs: Sequence[Path | str | Study], name: str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.html`` with the tables and figures of `analysis.report.build_paper`.

    Args:
        study_dirs: studies, or their folders.
        name: file name and title.
        reports_dir: target folder.

    Raises:
        ValueError, RuntimeError: as `build_page`.
    """
    studies = [load(study_dir) for study_dir in study_dirs]
    page = _Page()
    page.add(contents.pieces(studies))
    return page.write(assembly.title(name), contents.subtitle(studies), name, reports_dir)


class _Page:
    """A page under construction: links to headings, and parts."""

    def __init__(self) -> None:
        self.links: list[str] = []
        self.parts: list[str] = []
        self.numbers = Numbers()

    def add(self, parts: Iterable[Pieces], before: str = "") -> None:
        """Append a report's parts; ``before`` prefixes the headings' anchors."""
        is_appendix, end = False, ""
        for piece in (piece for pieces in parts for piece in pieces):
            if not isinstance(piece, Heading):
                self.parts.append(to_html(piece, self.numbers))
                continue
            anchor, is_part = f"{before}{piece.text}", piece.text == assembly.APPENDIX
            self.links.append(_link(anchor, piece.text, is_part and not before))
            place, words = f"id={_quote(anchor)}", text(piece.text)
            if is_appendix:
                self.parts.append(f"{end}<details {place}><summary><h3>{words}</h3></summary>")
                end = "</details>"
            else:
                self.parts.append(f"<h3 {place}{_part(is_part)}>{words}</h3>")
            is_appendix |= is_part
        self.parts.append(end)

    def write(self, title: str, below: str, name: str, reports_dir: Path | str) -> Path:
        """Write the page and return its path."""
        head = f"<h1>{text(title)}</h1>" + (f"<p>{text(below)}</p>" if below else "")
        rest = (
            f'<title>{text(title)}</title>\n<meta name="viewport" content="width=device-width"><style>{STYLE}</style>\n'
            f"<script>{_plotly()}\n{SCRIPT}</script></head>\n"
            f'<body><nav aria-label="Contents"><a href="#top">First page</a> {" ".join(self.links)}</nav>\n'
            f'<main id="top">{head}' + "\n".join(self.parts) + "\n</main></body></html>\n"
        )
        page = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{policy(rest)}{rest}'
        return replace_file(Path(reports_dir) / f"{name}.html", page.encode("utf-8"))


def policy(page: str) -> str:
    """Return a Content-Security-Policy: no loading, and only the page's own scripts, by hash."""
    scripts = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    hashes = sorted({base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts})
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    rules = (
        "default-src 'none'",
        f"script-src {allowed}",
        # plotly writes styles while drawing, and saves figures through data: and blob: pictures
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'


class Numbers:
    """Counters for tables and figures."""

    def __init__(self) -> None:
        self.tables = self.figures = 0


def to_html(piece: Piece, numbers: Numbers) -> str:
    """Return a piece as HTML."""
    if isinstance(piece, Paragraph):
        return f"<p>{text(piece.text)}</p>"
    if isinstance(piece, Small):
        return f'<p class="muted small">{text(piece.text)}</p>'
    if isinstance(piece, PageBreak | Contents | Compact):  # of a sheet; the page has its own links
        return ""
    if isinstance(piece, Boxed):
        return f'<div class="boxed">{"".join(f"<p>{text(each)}</p>" for each in piece.paragraphs)}</div>'
    if isinstance(piece, Facts):
        return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in piece.pairs)}</dl>"
    if isinstance(piece, Table):
        numbers.tables += 1
        return _table(piece, numbers.tables)
    assert isinstance(piece, Picture), "headings are the page's own"
    numbers.figures += 1
    return _picture(piece, numbers.figures)


def text(words: str) -> str:
    """Return text escaped for HTML, with α_max's index as a subscript."""
    return html.escape(visible(words, keep="\n\t")).replace("α_max", "α<sub>max</sub>")


def _quote(anchor: str) -> str:
    return f'"{html.escape(visible(anchor), quote=True).replace(" ", "-")}"'


def _link(anchor: str, words: str, is_part: bool = False) -> str:
    return f'<a href="#{_quote(anchor)[1:-1]}"{_part(is_part)}>{text(words)}</a>'


def _part(is_part: bool) -> str:
    return ' class="part"' if is_part else ""


def _table(table: Table, number: int) -> str:
    """Return a table with caption, group headings and column headings."""
    sides = table.align or ("left",) + ("center",) * (len(table.header) - 1)
    groups = "".join(f'<th colspan="{span}">{text(words)}</th>' for words, span in table.groups)
    names = "".join(f'<th class="{side}">{text(name)}</th>' for name, side in zip(table.header, sides, strict=True))
    head = (f"<tr>{groups}</tr>" if groups else "") + f"<tr>{names}</tr>"
    rows = "".join(
        "<tr>" + "".join(_cell(cell, side) for cell, side in zip(row, sides, strict=True)) + "</tr>\n"
        for row in table.rows
    )
    caption = f"<b>Table {number}: {text(table.title)}.</b> {text(table.caption)}"
    body = f"<table><thead>{head}</thead><tbody>\n{rows}</tbody></table>"
    return f"<figure><figcaption>{caption}</figcaption>{body}</figure>"


def _cell(cell: Cell, side: str) -> str:
    cell = cell.whole or cell  # a page has more room than a sheet
    words = f"<b>{text(cell.text)}</b>" if cell.bold else text(cell.text)
    words = f'<span class="muted">{words}</span>' if cell.pale else words
    below = "".join(f'<span class="detail">{text(line)}</span>' for line in cell.detail.split("\n") if line)
    return f'<td class="{side}">{words}{below}</td>'


def _picture(picture: Picture, number: int) -> str:
    """Return a figure for plotly, or as a picture if plotly cannot express it (three dimensions)."""
    caption = f"<figcaption><b>Figure {number}:</b> {text(picture.caption)}</figcaption>"
    try:
        spec = describe(picture.figure)
    except Unknown:
        source = base64.b64encode(assembly.render(picture.figure, "svg")).decode()
        image = f'<img alt={_quote(picture.name)} src="data:image/svg+xml;base64,{source}">'
        return f"<figure>{image}{caption}</figure>"
    data = json.dumps(spec, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    place = f'<div id="figure-{number}" class="plotly-graph-div"></div>'
    drawn = f'const s = {data}; Plotly.newPlot("figure-{number}", s.data, s.layout, {json.dumps(CONFIG)});'
    script = f'figure("figure-{number}", () => {{ {drawn} }});'
    return f"<figure>{place}<script>{script}</script>{caption}</figure>"


def _plotly() -> str:
    """Return plotly's browser library; ``RuntimeError`` in one line if not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise RuntimeError("format=html needs plotly: pip install plotly") from error
    return get_plotlyjs()
