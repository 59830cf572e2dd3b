"""``python -m stability.report study=…``: tables, figures and PDF of a study that has run."""

from __future__ import annotations

from pathlib import Path

from stability.command_line import read_spec, run_entry

HELP = """
python -m stability.report study=NAME_OR_FOLDER [runs_dir=runs] [reports_dir=reports]

Read the runs of a study, print its tables and write reports_dir/<name>.pdf. Works while the sweep is still running.
"""


def main(argv: list[str]) -> int:
    spec = read_spec("report", argv)
    from stability.runs.study import StudyFolder
    from stability.sweep import publish

    given = Path(spec.study)
    publish(StudyFolder(given) if (given / "study.json").exists() else StudyFolder.of(spec.runs_dir, spec.study), spec.reports_dir)
    return 0


if __name__ == "__main__":
    run_entry(main, HELP)
