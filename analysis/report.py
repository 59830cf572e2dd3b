"""Make reports/<name>.pdf from a study's results, and what a sweep prints at its end. Reads parquet only, no torch."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import typst
from matplotlib.figure import Figure

from analysis.drawing import pieces, typeset
from analysis.drawing.pieces import Picture, Pieces
from analysis.drawing.style import RC
from analysis.sections import contents
from analysis.sections.section import Section
from analysis.study.load import Study, load
from analysis.words import listed, lr_text, plural


def build(study_dir: Path | str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` and return its path; a reader never sees a half-written one.

    Errors: ``ValueError`` where the study's files are missing or of another schema version (see `load`).
    """
    return build_together([study_dir], Path(study_dir).resolve().name, reports_dir)


def build_together(study_dirs: Sequence[Path | str], name: str, reports_dir: Path | str) -> Path:
    """Write ``<reports_dir>/<name>.pdf`` about several studies, one after another. Errors: as `build`."""
    studies = [load(Path(study_dir)) for study_dir in study_dirs]
    title = f"Learning-rate stability: {name}"
    with tempfile.TemporaryDirectory(prefix="stability-report-") as folder:
        parts = [
            (study.name, _subtitle(study), pieces.typst(_body(study, Path(folder), f"{index}-")))
            for index, study in enumerate(studies)
        ]
        if len(parts) == 1:
            text = typeset.document(title, *parts[0][1:])
        else:
            text = typeset.document(title, listed([part[0] for part in parts]), typeset.parts(parts))
        source = Path(folder) / "report.typ"
        source.write_text(text, encoding="utf-8")
        pdf = typst.compile(str(source), root=folder, ignore_system_fonts=True)
    return _replace(Path(reports_dir) / f"{name}.pdf", pdf)


def summary(study_dir: Path | str, phases: Sequence[str] = ("terminal",)) -> str:
    """Return the plain text that a sweep prints at its end: what each section has for it. ``phases``: see `Section`."""
    study = load(study_dir)
    first = [section for section in contents.SECTIONS if section not in contents.PRINTED_LAST]
    sections = [section for section in (*first, *contents.PRINTED_LAST) if section.applies(study)]
    printed = [_printed(part) for section in sections for part in section.tables(study, phases)]
    return "\n\n".join(printed) + "\n"


def write_figures(study_dir: Path | str, folder: Path | str, suffix: str = "svg") -> list[Path]:
    """Write the report's figures as single files (`nll.svg`, …), for a README or a talk, and return their paths."""
    study, folder = load(study_dir), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = [section for section in contents.SECTIONS if section.applies(study)]
    return [path for section in sections for path, _ in _draw(section, study, folder, suffix).values()]


def _subtitle(study: Study) -> str:
    lrs = sorted(set(study.runs["lr"]))
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    span += " times each optimizer's own" if study.is_in_multiples else ""
    counts = f"{plural(study.runs['seed'].nunique(), 'seed')} · {plural(len(study.runs), 'run')}"
    return f"{listed(study.series)} · {plural(len(lrs), 'learning rate')}, {span} · {counts}"


def _body(study: Study, folder: Path, prefix: str) -> Pieces:
    """Return the pieces of all sections of one study; their figures lie in ``folder``."""
    parts: Pieces = ()
    for section in contents.SECTIONS:
        if section.applies(study):
            files = _draw(section, study, folder, "pdf", prefix)
            parts += section.body(study, {name: (Picture(name, *file),) for name, file in files.items()})
    return parts


def _draw(section: Section, study: Study, folder: Path, suffix: str, prefix: str = "") -> dict[str, tuple[Path, str]]:
    """Draw a section's figures into files; return by name the file and the caption."""
    with matplotlib.rc_context(RC):
        return {
            name: (_save(each.figure, folder / f"{prefix}{name}.{suffix}"), each.caption)
            for name, each in section.figures(study).items()
        }  # fmt: skip


def _save(figure: Figure, path: Path) -> Path:
    # Without a date the same study gives the same file.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, metadata=dates.get(path.suffix), dpi=200)
    return path


def _printed(part: typeset.Table | str) -> str:
    """Return a table as it is, a paragraph in lines of 110."""
    if isinstance(part, typeset.Table):
        return part.text()
    return part if "\n" in part else "\n".join(textwrap.wrap(part, 110))


def _replace(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


__all__: Sequence[str] = ("build", "build_together", "summary", "write_figures")
