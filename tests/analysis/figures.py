"""Figures of a report as single files."""

from pathlib import Path

from analysis import assembly
from analysis.study.load import load


def write_figures(study_dir: Path | str, folder: Path) -> list[Path]:
    """Return the files of a report's figures by name (`nll.svg`, …); no two sections share a name."""
    study = load(study_dir)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = (tuple(assembly.pictures(section, study)) for section in assembly.sections(study))
    return [assembly.save(each.figure, folder / f"{each.name}.svg") for pictures in drawn for each in pictures]
