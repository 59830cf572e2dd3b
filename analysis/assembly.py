"""Put a study's sections together, in the report's order: their pieces for a document, their figures as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import matplotlib
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure

from analysis.drawing.pieces import Picture, Pieces
from analysis.drawing.style import RC
from analysis.sections import contents, prediction
from analysis.sections.section import Section
from analysis.study.load import Study
from analysis.words import listed, lr_text, plural

DPI, VECTOR_DPI = 200, 72  # of pictures; what matplotlib measures text by in PDF and SVG


def title(name: str) -> str:
    return f"Learning-rate stability: {name}"


def subtitle(study: Study) -> str:
    """Return in one line which series, rates and seeds a study has."""
    lrs = sorted(set(study.runs["lr"]))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    span += " times each optimizer's own" if study.is_in_multiples else ""
    counts = f"{plural(study.runs['seed'].nunique(), 'seed')} · {plural(len(study.runs), 'run')}"
    return f"{listed(study.series)} · {plural(len(lrs), 'learning rate')}, {span} · {counts}"


def sections(study: Study) -> list[Section]:
    """Return those sections that have something to say of the study."""
    return [section for section in contents.SECTIONS if section.applies(study)]


def pieces(study: Study, prefix: str = "") -> Iterator[Pieces]:
    """Yield the pieces of each section, whose pictures have files named ``<prefix><name>.pdf``; nothing is written.
    Whoever saves their figures does so under `RC`, as they were drawn."""
    for section in sections(study):
        yield section.body(study, {each.name: (each,) for each in pictures(section, study, prefix)})


def pictures(section: Section, study: Study, prefix: str = "") -> list[Picture]:
    """Draw a section's figures."""
    with matplotlib.rc_context(RC):
        return [
            Picture(name, each.figure, each.caption, f"{prefix}{name}.pdf")
            for name, each in section.figures(study).items()
        ]


TOGETHER = "All studies together"


def together(studies: Sequence[Study]) -> Pieces:
    """Return what is said of several studies as one, beyond each one's own sections; () where there is nothing."""
    return prediction.together(studies, "together-") if len(studies) > 1 else ()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure into a file, whose suffix says its format."""
    write(figure, path, path.suffix[1:])
    return path


def write(figure: Figure, where: Path | IO[bytes], kind: str) -> None:
    """Write a figure as ``kind`` (svg, pdf, png). Without a date the same study gives the same file."""
    dates: Mapping[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(RC), _laid_out(figure, kind):
        figure.savefig(where, format=kind, metadata=dates.get(kind), dpi=DPI)


@contextmanager
def _laid_out(figure: Figure, kind: str) -> Iterator[None]:
    """Lay a figure out for a format, which has text sizes of its own, and keep it so within the ``with`` block: to lay
    it out, `Figure.savefig` draws all of it once more than it needs to."""
    engine = figure.get_layout_engine()
    if engine is None:
        yield
        return
    get_registered_canvas_class(kind)(figure)
    dpi, figure.dpi = figure.dpi, DPI if kind == "png" else VECTOR_DPI
    engine.execute(figure)
    figure.dpi = dpi
    figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def save_pictures(pieces: Pieces, folder: Path) -> None:
    """Write the figures among the pieces into their files in ``folder``."""
    for piece in pieces:
        if isinstance(piece, Picture):
            save(piece.figure, folder / piece.file)
