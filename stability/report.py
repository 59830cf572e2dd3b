"""``python -m stability.report name=…``: tables, figures and PDF of a study that has run."""

from __future__ import annotations

from pathlib import Path

from stability.command_line import publish, read_spec, run_entry

HELP = """
python -m stability.report name=NAME_OR_FOLDER [runs_dir=runs] [reports_dir=reports]

Read the runs of a study, print its tables and write reports_dir/<name>.pdf. Works while the sweep is still running.
"""


def main(argv: list[str]) -> int:
    spec = read_spec("report", argv)
    from stability.runs.study import StudyFolder

    given = Path(spec.name)
    publish(StudyFolder(given) if (given / "study.json").exists() else StudyFolder.of(spec.runs_dir, spec.name), spec.reports_dir)
    return 0


if __name__ == "__main__":
    run_entry(main, HELP)
