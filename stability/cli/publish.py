"""End a measurement: a study's tables are collected, printed and drawn into its PDF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.printable import print_text
from stability.registry import Registry
from stability.runs.study import StudyFolder
from stability.startup import seldom_collected, uncollected

if TYPE_CHECKING:
    from analysis.drawing.typeset import Table
    from analysis.study.load import Study
    from stability.config.run import RunSpec


def publish(
    study: StudyFolder, reports_dir: str | None, phases: Sequence[str] = ("terminal",), *, unless_same: bool = False
) -> Study | None:
    """Collect the runs into parquet, write the PDF, print the tables (α_max of the phases' checkpoints among them), and
    return the study as it was read for them. With ``unless_same`` all that is only printed, and nothing returned, where
    no run, table or line of our code has changed since it was last done: drawing takes longer than recognising 200
    runs."""
    from stability.runs.up_to_date import Published

    pdf = None if reports_dir is None else Path(reports_dir) / f"{study.path.name}.pdf"
    published = Published(study, pdf, phases, _drawing_code())
    if unless_same and (text := published.summary()) is not None:
        print_text(text)
        if pdf is not None:
            print_text(f"report: {pdf}, nothing has changed since it was made")
        return None
    with uncollected():
        from analysis.report import build_together, summary

    with seldom_collected():
        left_out = _collect(study)
        known = _loaded(study)
        written = None if pdf is None else build_together([known], pdf.stem, pdf.parent)
        text = "\n".join([*left_out, summary(known, phases)])
    published.record(text)
    print_text(text)  # last, since a terminal that is gone or cannot show it takes nothing else along
    if written is not None:
        print_text(f"report: {written}")
    return known


def collected(study: StudyFolder) -> Study:
    """Collect a study's runs into parquet anew and return it as its tables and figures read it; a line is printed for
    each run and file that is left out."""
    for line in _collect(study):
        print_text(line)
    return _loaded(study)


def _loaded(study: StudyFolder) -> Study:
    from analysis.study.load import load

    return load(study.path)


def _collect(study: StudyFolder) -> list[str]:
    """Collect a study's runs into parquet; return a line for each run and file that was left out."""
    with uncollected():
        from stability.runs.results import collect, write

    found = collect(study.path, _parsed_columns)
    write(found, study.results)
    return [f"left out: {line}" for line in found.left_out]


def _parsed_columns(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of `RUNS_COLUMNS` that follow from a run's spec; {} if its plugin is not here."""
    from stability.build import sequence_state_bytes
    from stability.config.parse import parse_run

    try:
        run = parse_run(spec)
    except ValueError:
        return {}
    mechanism = Registry("mechanisms").load(run.mechanism.name)
    return {
        "state_bytes": sequence_state_bytes(run, Registry("objectives").load(run.objective.name).direction),
        "settings": _settings(run),
        "reading": _reading(run),
        # beside a cross mechanism the context may tell the direction
        "blind_to_order": int(run.cross is None and mechanism.blind_to_order(run.mechanism.settings)),
    }


def _settings(run: RunSpec) -> str:
    """Return the settings of a run's mechanism that are not the defaults, ``"rank=8 rope=absolute"``, and of its cross
    mechanism, ``"cc.rope=none"``."""
    from stability.config.ablation import value_text
    from stability.config.parts import unusual_settings

    found = unusual_settings(run.mechanism)
    if run.cross is not None:
        found |= {f"{run.cross.name}.{key}": value for key, value in unusual_settings(run.cross).items()}
    return " ".join(f"{key}={value_text(value)}" for key, value in found.items())


def _reading(run: RunSpec) -> str:
    """Return the readings of their papers' formulas that a run's mechanism and its cross mechanism compute."""
    registry = Registry("mechanisms")
    readings = [registry.load(run.mechanism.name).reading(run.mechanism.settings)]
    if run.cross is not None and (beside := registry.load(run.cross.name).reading(run.cross.settings)):
        readings.append(f"{run.cross.name} {beside}")
    return "; ".join(filter(None, readings))


def print_tables(study: StudyFolder, tables: Sequence[Table], nothing: str) -> None:
    """Print tables of a study, or ``nothing`` where there are none, and what draws them."""
    print_text("\n\n".join(table.text() for table in tables) or nothing)
    tell_what_draws(study)


def tell_what_draws(study: StudyFolder) -> None:
    """Print the command that comes next: it puts what was just measured into the study's PDF."""
    runs_dir = study.path.parents[1]
    elsewhere = "" if runs_dir.resolve() == Path("runs").resolve() else f" runs_dir={runs_dir}"
    print_text(f"next, to draw this into the study's PDF: python -m stability.report name={study.path.name}{elsewhere}")


def _drawing_code() -> list[Path]:
    """Return the source of `analysis`, not imported, and of the package that collects."""
    package = Path(__file__).resolve().parents[1]
    return [*(package.parent / "analysis").rglob("*.py"), *(package / "runs").rglob("*.py")]
