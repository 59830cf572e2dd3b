"""Write a study's tables and figures as single files, for papers, talks or other programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from analysis import assembly
from analysis.drawing import formats
from analysis.drawing.files import replace_file
from analysis.drawing.pieces import Picture, Pieces
from analysis.drawing.tables import source
from analysis.drawing.typeset import Table
from analysis.paper import contents
from analysis.study.load import Study, load

FIGURES = ("pdf", "svg", "png")


def export(study_dir: Path | str | Study, folder: Path | str, *, has_long_captions: bool = False) -> list[Path]:
    """Write a study's tables and figures as files, and return their paths.

    Tables: ``tables/<name>.csv``, ``.md``, ``.tex`` and ``.parquet``, named after the title. Figures:
    ``figures/<name>.pdf``, ``.svg`` and ``.png``.

    Args:
        study_dir: the study, or its folder.
        folder: target folder.
        has_long_captions: whether LaTeX has each table's notes in its caption.

    Raises:
        ValueError: as `load`.
    """
    study = load(study_dir)
    return _write(assembly.pieces(study), Path(folder), has_long_captions, source(study))


def export_together(
    study_dirs: Sequence[Path | str | Study], folder: Path | str, *, has_long_captions: bool = False
) -> list[Path]:
    """Write the tables and figures about several studies together, ``together-<name>``, as `export` does for one.

    Args:
        study_dirs: the studies, or their folders.
        folder: target folder.
        has_long_captions: as in `export`.
    """
    studies = [load(study_dir) for study_dir in study_dirs]
    parts = [assembly.comparison(studies), assembly.together(studies)]
    data = " ".join(dict.fromkeys(map(source, studies)))
    return _write(parts, Path(folder), has_long_captions, data, before=assembly.BEFORE)


def export_paper(
    study_dirs: Sequence[Path | str | Study], folder: Path | str, *, has_long_captions: bool = False
) -> list[Path]:
    """Write the tables and figures of `analysis.report.build_paper`, as `export` does for one study.

    Args:
        study_dirs: the studies, or their folders.
        folder: target folder.
        has_long_captions: as in `export`.
    """
    return _write(contents.pieces([load(study_dir) for study_dir in study_dirs]), Path(folder), has_long_captions)


def _write(
    parts: Iterable[Pieces], folder: Path, has_long_captions: bool, data: str = "", before: str = ""
) -> list[Path]:
    """Write figures and tables.

    Args:
        parts: the pieces.
        folder: target folder.
        has_long_captions: as in `export`.
        data: end of the captions, data and objective of the studies.
        before: start of the file names.
    """
    written, taken = [], set()
    for pieces in parts:
        written += _write_figures(pieces, folder / "figures", FIGURES, before)
        for name, table in _name_tables(pieces, taken):
            table = replace(table, caption=f"{table.caption} {data}".strip())
            written += _write_table(table, folder / "tables", f"{before}{name}", has_long_captions)
    return written


def _write_figures(pieces: Pieces, folder: Path, suffixes: Sequence[str], before: str = "") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"{before}{piece.name}": piece.figure for piece in pieces if isinstance(piece, Picture)}
    return [assembly.save(each, folder / f"{name}.{suffix}") for name, each in figures.items() for suffix in suffixes]


def _name_tables(pieces: Pieces, taken: set[str]) -> Iterator[tuple[str, Table]]:
    """Yield tables with unique names; equal titles are numbered."""
    for piece in pieces:
        if isinstance(piece, Table):
            plain = re.sub(r"[^a-z0-9]+", "-", piece.title.lower().replace("α", "alpha")).strip("-")
            name, number = plain, 1
            while name in taken:
                number += 1
                name = f"{plain}-{number}"
            taken.add(name)
            yield name, piece


def _write_table(table: Table, folder: Path, name: str, has_long_caption: bool) -> list[Path]:
    written = {
        "csv": formats.csv(table).encode("utf-8"),
        "md": formats.markdown(table).encode("utf-8"),
        "tex": formats.latex(table, name, has_long_caption=has_long_caption).encode("utf-8"),
        "parquet": formats.add_numbers(table).to_parquet(index=False),
    }
    return [replace_file(folder / f"{name}.{suffix}", content) for suffix, content in written.items()]
