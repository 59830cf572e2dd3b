"""Check whether a study's tables and PDF are up to date with its runs. No torch.

A finished sweep need not draw them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from stability.runs.directory import RunDirectory, read_json, write_json
from stability.runs.records import PublishedFile
from stability.runs.samples import meta_file
from stability.runs.study import StudyFolder


class Published:
    """The record of a publication, ``<study>/published.json``.

    It has the last publication's inputs, outputs and printed tables. Run files are compared by size and modification
    time, ``code`` and ``study.json`` by content.

    Args:
        study: the study.
        pdf: its PDF, if one is written.
        phases: measured phases.
        code: source files that turn runs into tables and PDF.
    """

    def __init__(self, study: StudyFolder, pdf: Path | None, phases: Iterable[str], code: Iterable[Path]):
        self._study, self._pdf = study, pdf
        self._file = study.path / "published.json"
        asked = "\n".join((str(pdf and pdf.absolute()), *phases, _stamp(_read_files(study))))
        files = [study.file, *sorted(code)]
        self._inputs = hashlib.sha256(asked.encode() + b"".join(path.read_bytes() for path in files)).hexdigest()

    def summary(self) -> str | None:
        """Return the printed tables; None if an input or output has changed."""
        try:
            last = read_json(self._file, PublishedFile)
        except ValueError:  # missing or damaged: publish again
            return None
        return last["summary"] if (last["inputs"], last["outputs"]) == (self._inputs, self._outputs()) else None

    def record(self, summary: str) -> None:
        """Record that tables and PDF were written from the initial state of the inputs.

        The next command detects later changes.
        """
        write_json(self._file, {"inputs": self._inputs, "outputs": self._outputs(), "summary": summary})

    def _outputs(self) -> str:
        return _stamp([*sorted(self._study.results.glob("*.parquet")), *([self._pdf] if self._pdf else [])])


def _read_files(study: StudyFolder) -> Iterable[Path]:
    for directory in study.runs():
        yield from (directory.spec_file, directory.status_file, directory.metrics_file)
        yield from directory.signal_files.values()
        yield from _tables(directory)


def _tables(directory: RunDirectory) -> Iterable[Path]:
    folders = (
        directory.curvature_file("").parent,
        directory.probe_file("", "").parent,
        directory.generation_file("").parent,
        meta_file(directory, "").parent,
    )
    for folder in folders:
        if folder.is_dir():
            yield from sorted(folder.iterdir())


def _stamp(paths: Iterable[Path]) -> str:
    return "\n".join(f"{path} {_size_and_time(path)}" for path in paths)


def _size_and_time(path: Path) -> str:
    try:
        found = path.stat()
    except FileNotFoundError:
        return "none"
    return f"{found.st_size} {found.st_mtime_ns}"
