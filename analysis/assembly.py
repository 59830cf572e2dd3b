"""Assemble a study's sections in the report's order: pieces for a document, figures as files."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import matplotlib
from matplotlib.figure import Figure

from analysis.drawing.files import lay_out, replaced
from analysis.drawing.pieces import Picture, Pieces
from analysis.drawing.style import RC
from analysis.sections import contents, prediction
from analysis.sections.section import Figures, Section
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.words import listed, lr_text, plural


def title(name: str) -> str:
    return f"Learning-rate stability: {name}"


def subtitle(study: Study) -> str:
    """Return a study's series, rates and seeds in one line."""
    lrs = sorted(set(study.runs["lr"]))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    span += " times each optimizer's own" if study.is_in_multiples else ""
    counts = f"{plural(study.runs['seed'].nunique(), 'seed')} · {plural(len(study.runs), 'run')}"
    return f"{listed(study.series)} · {plural(len(lrs), 'learning rate')}, {span} · {counts}"


def sections(study: Study) -> list[Section]:
    """Return the sections with content for the study."""
    return [section for section in contents.SECTIONS if section.applies(study)]


def pieces(study: Study, prefix: str = "") -> Iterator[Pieces]:
    """Yield each section's pieces, with pictures named ``<prefix><name>.pdf``; nothing is written.

    Figures must be saved under `RC`, as they were drawn.
    """
    for section in sections(study):
        yield section.body(study, {each.name: (each,) for each in pictures(section, study, prefix)})


def pictures(section: Section, study: Study, prefix: str = "") -> list[Picture]:
    """Draw a section's figures, or return those drawn for another document.

    Args:
        section: section to draw.
        study: its data.
        prefix: start of the file names.
    """
    return [
        Picture(name, each.figure, each.caption, f"{prefix}{name}.pdf") for name, each in _drawn(study, section).items()
    ]


@once_per_study
def _drawn(study: Study, section: Section) -> Figures:
    with matplotlib.rc_context(RC):
        return section.figures(study)


TOGETHER = "All studies together"


def together(studies: Sequence[Study]) -> Pieces:
    """Return the pieces about several studies as one; () for a single study or without content."""
    return prediction.together(studies, "together-") if len(studies) > 1 else ()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, atomically."""
    return replaced(path, rendered(figure, path.suffix[1:]))


PDFS: WeakKeyDictionary[Figure, bytes] = WeakKeyDictionary()  # shared by the report and the figure's own file


def rendered(figure: Figure, kind: str) -> bytes:
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
