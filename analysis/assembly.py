"""Assemble a study's sections in the report's order: pieces for a document, figures as files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import matplotlib
from matplotlib.figure import Figure

from analysis.drawing.files import lay_out, replace_file
from analysis.drawing.pieces import (
    Boxed,
    Compact,
    Contents,
    Heading,
    PageBreak,
    Paragraph,
    Picture,
    Piece,
    Pieces,
    heading,
    small,
)
from analysis.drawing.style import RC
from analysis.drawing.typeset import Table
from analysis.sections import (
    ablation,
    alpha,
    contents,
    front,
    headline,
    nll_figures,
    overview,
    prediction,
    training_edge,
)
from analysis.sections import together as together_pages
from analysis.sections.own_rates import name_rates
from analysis.sections.section import Figures, Section, is_of_rates
from analysis.study.load import Study, load
from analysis.study.once import once_per_study
from analysis.words import join_words, lr_text, plural

Pages = Literal["short", "all"]
# not in a short report of several studies: each one's first two pages answer these; a report of one study has them
ONLY_ALONE = {
    nll_figures.SECTION: "validation NLLs and windows",
    alpha.SECTION: "α_max",
    training_edge.SECTION: "how near the edge a run trains",
    ablation.SECTION: "settings one at a time",
    overview.TROUBLES: "runs that broke",
}


def title(name: str) -> str:
    return f"Learning-rate stability: {name}"


def question(study: Study) -> str:
    """Return a study's title: a question with its answer, or its name if it compares no rates."""
    return headline.title(study) if is_of_rates(study) else title(study.name)


def joint_question(studies: Sequence[Study], name: str) -> tuple[str, str]:
    """Return the title of a report about several studies, their question with its answers, and the line below.

    Without a common question the title is ``name``. The line has the studies' names, unless each stands in the title
    before its answer.
    """
    said, names = together_pages.title(studies), [study.name for study in studies]
    are_told = all(f"? {name}: " in said or f"; {name}: " in said for name in names)
    return said or title(name), "" if are_told else join_words(names)


def subtitle(study: Study) -> str:
    """Return a study's series, rates and seeds in one line."""
    lrs = sorted(set(study.runs["lr"]))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    span += " times each optimizer's own" if study.is_in_multiples else ""
    counts = f"{plural(study.runs['seed'].nunique(), 'seed')} · {plural(len(study.runs), 'run')}"
    return f"{join_words(study.series)} · {plural(len(lrs), 'learning rate')}, {span} · {counts}"


@once_per_study
def sections(study: Study) -> list[Section]:
    """Return the sections with content for the study."""
    return [section for section in contents.SECTIONS if section.applies(study)]


def pieces(study: Study, prefix: str = "", pages: Pages = "all") -> Iterator[Pieces]:
    """Yield the first two pages, then each section's pieces, with pictures named ``<prefix><name>.pdf``.

    Nothing is written. No figure appears twice. Figures must be saved under `RC`, as they were drawn.

    Args:
        study: the study.
        prefix: start of the figures' file names.
        pages: "short" has each section in brief; "all" has everything.
    """
    seen: set[str] = set()
    if is_of_rates(study):

        def find(names: tuple[str, ...]) -> Picture | None:
            return _first_picture(study, prefix, names)

        pages_in_front = front.first_page(study, find, prefix) + front.second_page(study, find, prefix)
        if prefix:  # one of several studies: its pages are no first and second ones
            pages_in_front = tuple(each for each in pages_in_front if not isinstance(each, PageBreak))
        seen |= {each.name for each in pages_in_front if isinstance(each, Picture)}
        yield name_rates(study, pages_in_front)
        compact: Pieces = (Compact(),) if pages == "short" else ()
        yield heading(APPENDIX) + (() if prefix else (Contents(),)) + compact
    left = [section for section in sections(study) if prefix and pages == "short" and _is_only_alone(section, study)]
    for section in sections(study):
        if section in left:
            continue
        drawn: dict[str, Pieces] = {each.name: (each,) for each in pictures(section, study, prefix)}
        body = tuple(each for each in section.body(study, drawn) if not _is_seen(each, seen))
        shown = _abridge(section, study, drawn, body, seen) if pages == "short" else body
        yield name_rates(study, shown)
    if left:
        yield small(f"{ELSEWHERE}: {join_words(ONLY_ALONE[section] for section in left)}.")


def _is_only_alone(section: Section, study: Study) -> bool:
    """Return whether the first pages answer a section; settings at one rate have a table with every value there."""
    return section in ONLY_ALONE and not (section is ablation.SECTION and study.runs["lr"].nunique() == 1)


def _first_picture(study: Study, prefix: str, names: tuple[str, ...]) -> Picture | None:
    """Return the first figure with one of the names, in the names' order; None without any."""
    for name in names:
        for section in sections(study):
            if found := [each for each in pictures(section, study, prefix) if each.name == name]:
                return found[0]
    return None


def first_figure(study: Study | Path | str) -> str:
    """Return the file of the first page's figure, as `pieces` names it; "" if it has none."""
    study = load(study)
    found = _first_picture(study, "", front.list_first(study))
    return found.file if found else ""


def _is_seen(piece: Piece, seen: set[str]) -> bool:
    return isinstance(piece, Picture) and piece.name in seen


def _abridge(section: Section, study: Study, drawn: Mapping[str, Pieces], body: Pieces, seen: set[str]) -> Pieces:
    """Return a section for a short appendix: its own brief form, else its headings and first table or figure.

    Text beside it is left out: it repeats the numbers. A last line names the rest.
    """
    tables = [each for each in body if isinstance(each, Table)]
    figures = [each for each in body if isinstance(each, Picture)]
    if section.brief is not None:
        shown = section.brief(study, drawn)
    else:
        kept = [*tables, *figures][:1]
        left_out = (Picture, Table, *((Paragraph, Boxed) if kept else ()))
        shown = tuple(each for each in body if any(each is one for one in kept) or not isinstance(each, left_out))
    shown = tuple(each for each in shown if not _is_seen(each, seen))
    if all(isinstance(each, Heading) for each in shown):
        return ()
    titles = {each.title for each in shown if isinstance(each, Table)}
    headers = {(each.title, each.header) for each in shown if isinstance(each, Table)}
    left = [each for each in tables if (each.title, each.header) not in headers]
    # a table that continues has its title again, over other series
    names = [*dict.fromkeys(f"“{each.title}”{' of the other series' if each.title in titles else ''}" for each in left)]
    number = len(figures) - sum(isinstance(each, Picture) for each in shown)
    names += [plural(number, "figure")] if number else []
    return shown + (small(f"Not here (pages=all, or format=files): {join_words(names)}.") if names else ())


def pictures(section: Section, study: Study, prefix: str = "") -> list[Picture]:
    """Draw a section's figures, or return those drawn for another document.

    Args:
        section: section to draw.
        study: its data.
        prefix: start of the file names.
    """
    return [
        Picture(name, each.figure, each.caption, f"{prefix}{name}.pdf")
        for name, each in _draw_section(study, section).items()
    ]


@once_per_study
def _draw_section(study: Study, section: Section) -> Figures:
    with matplotlib.rc_context(RC):
        return section.figures(study)


TOGETHER = "All studies together"
APPENDIX = "Appendix"
ELSEWHERE = "Not here (pages=all, or a report of this study alone)"
BEFORE = "together-"  # start of the joint figures' file names


def comparison(studies: Sequence[Study]) -> Pieces:
    """Return the first page about several studies; () for a single study."""
    return together_pages.comparison(studies, BEFORE)


def joint_figure(studies: Sequence[Study | Path | str]) -> str:
    """Return the file of the first figure about several studies, as `comparison` names it; "" if it has none."""
    parts = comparison([load(study) for study in studies])
    return next((piece.file for piece in parts if isinstance(piece, Picture)), "")


def together(studies: Sequence[Study]) -> Pieces:
    """Return the last pieces about several studies as one; () for a single study or without content."""
    return prediction.together(studies, BEFORE) if len(studies) > 1 else ()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, atomically."""
    return replace_file(path, render(figure, path.suffix[1:]))


PDFS: WeakKeyDictionary[Figure, bytes] = WeakKeyDictionary()  # shared by the report and the figure's own file


def render(figure: Figure, kind: str) -> bytes:
    """Return a figure as ``kind`` (svg, pdf, png)."""
    if kind == "pdf" and figure in PDFS:
        return PDFS[figure]
    # without a date, equal studies yield equal bytes
    dates: Mapping[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    lay_out(figure)
    content = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(content, format=kind, metadata=dates.get(kind), dpi=200)
    if kind == "pdf":
        PDFS[figure] = content.getvalue()
    return content.getvalue()


def save_pictures(pieces: Pieces, folder: Path) -> None:
    """Write the figures among the pieces into ``folder``."""
    for piece in pieces:
        if isinstance(piece, Picture):
            save(piece.figure, folder / piece.file)
