"""Open the report with what was run, on what, and where the numbers come from."""

from __future__ import annotations

from typing import Any

from analysis.drawing import pieces
from analysis.drawing.pieces import Pieces
from analysis.sections.section import Drawn, Section
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import duration, plural, without_folders


def body(study: Study, drawn: Drawn) -> Pieces:
    """Return the part "What was run": command, commit, hardware, versions, data, and what the runs have in common."""
    provenance = study.study.get("provenance")
    known: dict[str, Any] = provenance if isinstance(provenance, dict) else {}
    commit = _known(known.get("commit"))
    pairs = [
        ("Command", without_folders(_known(known.get("command") or study.study.get("command")))),
        ("Commit", f"{commit}, with uncommitted changes" if known.get("dirty") else commit),
        ("Hardware", _hardware(known.get("hardware"))),
        (
            "Versions",
            ", ".join(f"{name} {version}" for name, version in _mapping(known.get("versions")).items())
            or "not recorded",
        ),
        ("Data", f"{_known(known.get('data_description'))} (fingerprint {study.fingerprint})"),
        *wording.facts(study),
        (
            "Started",
            f"{_known(known.get('started_at')).replace('T', ' ')}, launcher: {_known(study.study.get('launcher'))}",
        ),
        (
            "Wall time",
            f"{_seconds(known.get('wall_s'))} (the runs’ own clocks sum to "
            f"{duration(float(study.runs['wall_s'].sum()))})",
        ),
        ("Runs", ", ".join(f"{count} {status}" for status, count in study.runs["status"].value_counts().items())),
        *_earlier(study),
    ]
    return pieces.heading("What was run") + pieces.facts(pairs)


def _earlier(study: Study) -> list[tuple[str, str]]:
    """Return a row with the number of runs of earlier commands; no row if all are the last command's."""
    earlier = [each for each in study.study.get("earlier", []) if each["reported"]]
    num = len({run_id for each in earlier for run_id in each["run_ids"]} & set(study.runs["run_id"]))
    return [("Of earlier commands", plural(num, "run"))] if num else []


def _known(value: Any) -> str:
    return "not recorded" if value is None or value == "" else str(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _seconds(value: Any) -> str:
    return duration(float(value)) if isinstance(value, int | float) else "not recorded"


def _hardware(value: Any) -> str:
    known = _mapping(value)
    memory = known.get("memory_gb")
    parts = [
        str(known["cpu"]) if known.get("cpu") else "",
        f"{known['cores']} cores" if known.get("cores") else "",
        f"{memory:.0f} GB memory" if isinstance(memory, int | float) else "",
        (str(known["gpu"]) if known["gpu"] else "no GPU") if "gpu" in known else "",
    ]
    return ", ".join(part for part in parts if part) or "not recorded"


SECTION = Section(body, applies=lambda study: True)
