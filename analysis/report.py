"""Make reports/<name>.pdf from a study's results, and the text printed after a sweep.

Reads result files only, without torch.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from analysis import assembly
from analysis.assembly import Pages
from analysis.drawing import typeset
from analysis.drawing.files import replace_file
from analysis.drawing.pieces import Pieces
from analysis.drawing.pieces import typst as as_typst
from analysis.paper import contents as contents_of_paper
from analysis.sections import contents
from analysis.sections.headline import MOST_LINES, answer
from analysis.sections.own_rates import name_in_table
from analysis.sections.section import is_of_rates
from analysis.study.load import Study, load
from analysis.words import join_words
from stability.printable import visible


def build(study_dir: Path | str, reports_dir: Path | str, pages: Pages = "all") -> Path:
    """Write ``<reports_dir>/<name>.pdf`` atomically, and return its path.

    Args:
        study_dir: folder of the study.
        reports_dir: target folder.
        pages: as in `analysis.assembly.pieces`.

    Raises:
        ValueError: study files are missing or have another schema version (see `load`).
        RuntimeError: typst is not installed.
    """
    return build_together([study_dir], Path(study_dir).resolve().name, reports_dir, pages)


def build_together(
    study_dirs: Sequence[Path | str | Study], name: str, reports_dir: Path | str, pages: Pages = "all"
) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` about several studies, one by one and then jointly.

    Args:
        study_dirs: studies, or their folders.
        name: file name and title.
        reports_dir: target folder.
        pages: as in `analysis.assembly.pieces`.

    Raises:
        ValueError, RuntimeError: as `build`.
    """
    studies = [load(study_dir) for study_dir in study_dirs]

    def text(folder: Path) -> str:
        if len(studies) == 1:
            body = _typst(assembly.pieces(studies[0], pages=pages), folder)
            below = "" if is_of_rates(studies[0]) else assembly.subtitle(studies[0])
            return typeset.document(assembly.question(studies[0]), below, body, assembly.title(name))
        parts = [
            (study.name, assembly.question(study), _typst(assembly.pieces(study, f"{index}-", pages), folder))
            for index, study in enumerate(studies)
        ]
        if joint := assembly.together(studies):
            parts.append((assembly.TOGETHER, join_words(study.name for study in studies), _typst([joint], folder)))
        first = _typst([assembly.comparison(studies)], folder)
        question, names = assembly.joint_question(studies, name)
        return typeset.document(question, names, first + typeset.parts(parts), assembly.title(name))

    return _compile(text, Path(reports_dir) / f"{name}.pdf")


def build_paper(study_dirs: Sequence[Path | str | Study], name: str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` in the consensus paper's layout.

    Studies form one grid by size and modality.

    Args:
        study_dirs: studies, or their folders.
        name: file name and title.
        reports_dir: target folder.

    Raises:
        ValueError, RuntimeError: as `build`.
    """
    studies = [load(study_dir) for study_dir in study_dirs]

    def text(folder: Path) -> str:
        body = _typst(contents_of_paper.pieces(studies), folder)
        return typeset.document(assembly.title(name), contents_of_paper.subtitle(studies), body)

    return _compile(text, Path(reports_dir) / f"{name}.pdf")


def _compile(text: Callable[[Path], str], path: Path) -> Path:
    """Write a document as a PDF; ``text`` maps the figures' folder to the source.

    ``RuntimeError`` without typst.
    """
    try:
        import typst  # imported late: tables are printed without it
    except ImportError:
        raise RuntimeError(f"{path.name} needs typst: pip install typst, or choose report=false") from None
    with tempfile.TemporaryDirectory(prefix="stability-report-") as folder:
        source = Path(folder) / "report.typ"
        source.write_text(text(Path(folder)), encoding="utf-8")
        pdf = typst.compile(str(source), root=folder, ignore_system_fonts=True)
    return replace_file(path, pdf)


def summary(study_dir: Path | str | Study, phases: Sequence[str] = ("terminal",)) -> str:
    """Return the text printed after a sweep: each section's tables; ``phases``: see `Section`."""
    study = load(study_dir)
    first = [section for section in contents.SECTIONS if section not in contents.PRINTED_LAST]
    sections = [section for section in (*first, *contents.PRINTED_LAST) if section.applies(study)]
    printed = [_to_text(name_in_table(study, part)) for section in sections for part in section.tables(study, phases)]
    return "\n\n".join(printed) + "\n"


def ending(study_dir: Path | str | Study, phases: Sequence[str] = ("terminal",)) -> str:
    """Return the short text printed after a sweep; of a search the first lines of `summary`."""
    study = load(study_dir)
    if is_of_rates(study):
        return answer(study)
    lines = summary(study, phases).splitlines()
    more = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"… {more} more lines: tables=all"] if more > 0 else [])])


def _typst(parts: Iterable[Pieces], folder: Path) -> str:
    """Return a report's parts as typst source, and write their figures into ``folder``."""
    source = ""
    for pieces in parts:
        assembly.save_pictures(pieces, folder)
        source += as_typst(pieces)
    return source


def _to_text(part: typeset.Table | str) -> str:
    """Return a table as text, or a paragraph in lines of 110 characters."""
    if isinstance(part, typeset.Table):
        return part.text()
    part = visible(part, keep="\n")
    return part if "\n" in part else "\n".join(textwrap.wrap(part, 110))


__all__: Sequence[str] = ("build", "build_paper", "build_together", "ending", "summary")
