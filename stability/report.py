"""``python -m stability.report name=…``: make a study's tables, figures and PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.compose import read
from stability.cli.entry import check_writable, run_entry
from stability.cli.publish import publish
from stability.cli.words import Invocation
from stability.config.entries import ReportSpec
from stability.printable import print_text
from stability.startup import seldom_collected

if TYPE_CHECKING:
    from analysis.study.load import Study

HELP = """
python -m stability.report name=NAME_OR_FOLDER [key=value …]
python -m stability.report name=[NAME,NAME,…] together=TITLE
python -m stability.report name=[NAME,NAME,…] layout=paper [together=TITLE]

Read the runs of a study, print its tables and write reports_dir/<name>.pdf. Works while the sweep is still running. Of
several studies: one PDF about all of them, reports_dir/TITLE.pdf.

The figure for a paper: figures/nll.pdf of format=files. Its LaTeX tables have labels, \\label{tab:FILE}.
"""


def main(argv: list[str]) -> int:
    """Publish each named study, or all of them in one PDF."""
    spec = read(ReportSpec, Invocation.of(argv))
    from stability.runs.study import StudyFolder

    studies = StudyFolder.find_all(spec.runs_dir, spec.name)
    check_writable("reports_dir", spec.reports_dir)  # now, not after all studies are drawn
    alone = spec.together is None and spec.layout == "study" and "pdf" in spec.format
    folder = spec.reports_dir if alone else None
    known = [
        (
            study.path.name,
            publish(study, folder, tables=spec.tables, reference=spec.reference, pages=spec.pages) or study.path,
        )
        for study in studies
    ]
    with seldom_collected():
        if spec.layout == "paper":
            _write_paper([study for _, study in known], spec)
        elif spec.together is not None:
            _write(known, spec.together, spec)
        else:
            for name, study in known:
                _write([(name, study)], name, spec)
    return 0


def _write(named: Sequence[tuple[str, Study | Path]], name: str, spec: ReportSpec) -> None:
    """Write the formats that `publish` does not write: pages, files, and one PDF of several studies."""
    studies = [study for _, study in named]  # `named` pairs each folder's name with its study
    if "pdf" in spec.format and spec.together is not None:
        from analysis.report import build_together

        print_text(f"report: {build_together(studies, name, spec.reports_dir, spec.pages)}")
    if "html" in spec.format:
        from analysis.page import build_page

        print_text(f"report: {build_page(studies, name, spec.reports_dir)}")
    if "files" in spec.format:
        from analysis.assembly import first_figure, joint_figure
        from analysis.export import export, export_together

        is_long = spec.caption == "long"
        is_named = spec.together is None and "pdf" in spec.format and spec.tables == "best"  # by `publish`
        for own, study in named:
            folder = Path(spec.reports_dir) / own
            written = export(study, folder, has_long_captions=is_long)
            _print_files(written, folder, "" if is_named else first_figure(study))
        if spec.together is not None and len(studies) > 1:
            folder = Path(spec.reports_dir) / spec.together
            written = export_together(studies, folder, has_long_captions=is_long)
            _print_files(written, folder, joint_figure(studies))


def _print_files(written: Sequence[Path], folder: Path, figure: str) -> None:
    """Print the number of files, their folder and the figure for a paper; "": no figure is named."""
    print_text(f"files: {len(written)} in {folder}")
    if figure:
        print_text(f"figure for a paper: {folder / 'figures' / figure}")


def _write_paper(studies: Sequence[Study | Path], spec: ReportSpec) -> None:
    """Write one report of all studies in the paper's layout, in each requested format."""
    from analysis.paper.contents import NAME

    name = spec.together or NAME
    if "pdf" in spec.format:
        from analysis.report import build_paper

        print_text(f"report: {build_paper(studies, name, spec.reports_dir)}")
    if "html" in spec.format:
        from analysis.page import build_paper_page

        print_text(f"report: {build_paper_page(studies, name, spec.reports_dir)}")
    if "files" in spec.format:
        from analysis.export import export_paper

        folder = Path(spec.reports_dir) / name
        written = export_paper(studies, folder, has_long_captions=spec.caption == "long")
        print_text(f"files: {len(written)} in {folder}")


if __name__ == "__main__":
    run_entry(main, "report", HELP)
