"""``python -m stability.report name=…``: make tables, figures and PDF of a study that has run."""

from __future__ import annotations

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.publish import publish
from stability.cli.words import Invocation
from stability.config.entries import ReportSpec

HELP = """
python -m stability.report name=NAME_OR_FOLDER [runs_dir=runs] [reports_dir=reports]
python -m stability.report name=[NAME,NAME,…] together=TITLE

Read the runs of a study, print its tables and write reports_dir/<name>.pdf. Works while the sweep is still running. Of several studies: one
PDF about all of them, reports_dir/TITLE.pdf.
"""


def main(argv: list[str]) -> int:
    """Publish each study that is named, or all of them in one PDF."""
    spec = read(ReportSpec, Invocation.of(argv))
    from stability.runs.study import StudyFolder

    studies = [StudyFolder.find(spec.runs_dir, name) for name in spec.name]
    for study in studies:
        publish(study, spec.reports_dir if spec.together is None else None)
    if spec.together is not None:
        from analysis.report import build_together

        print(f"report: {build_together([study.path for study in studies], spec.together, spec.reports_dir)}")
    return 0


if __name__ == "__main__":
    run_entry(main, HELP)
