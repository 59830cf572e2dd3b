"""Send a study to W&B as one run, with its tables, figures and PDF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.printable import print_text
from stability.runs.study import StudyFolder

if TYPE_CHECKING:
    from stability.dashboards.study_run import Content

SENT = ("run_id", "series", "residual", "norm", "optimizer", "lr", "seed", "status", "reason", "val_nll", "gen_nll")
EXPORTS = "exports"  # subfolder of the study


def send_study(study: StudyFolder, pdf: Path | None, mode: str, place: Mapping[str, Any]) -> tuple[Content, str]:
    """Send the W&B run of a study with collected results; return its content and location.

    Args:
        study: the study.
        pdf: its report, if there is one.
        mode: online or offline.
        place: project and entity, as in `stability.dashboards.study_run.send`.
    """
    from stability.dashboards.study_run import send

    content = _content(study, pdf)
    return content, send(content, study.path, mode, place)


def send_after_sweep(study: StudyFolder, pdf: Path | None, place: Mapping[str, Any]) -> None:
    """Send the W&B run of a study after its sweep, and print its location.

    An error of W&B is printed in one line: the study is complete without it.

    Args:
        study: the study.
        pdf: its report, if there is one.
        place: project and entity.
    """
    from stability.runs.wandb_sink import probe_wandb

    try:
        _, where = send_study(study, pdf, probe_wandb()[0], place)
    # W&B raises classes of its own private modules
    except Exception as error:  # noqa: BLE001
        first = (str(error).splitlines() or [""])[0][:200]
        print_text(f"W&B: the run about the study was not sent ({type(error).__name__}: {first})")
    else:
        print_text(f"W&B: the run about the study: {where}")


def _content(study: StudyFolder, pdf: Path | None) -> Content:
    """Write a study's tables and figures into its folder, and return the W&B content."""
    import pandas as pd

    from analysis.export import export
    from analysis.study.load import load
    from stability.dashboards.study_run import Content

    folder = study.path / EXPORTS
    written = export(study.path, folder)
    runs: Any = load(study.path).runs.reindex(columns=SENT)
    return Content(
        name=study.path.name,
        runs=[{str(name): value for name, value in row.items()} for row in runs.to_dict("records")],
        tables={path.stem: pd.read_parquet(path) for path in written if path.suffix == ".parquet"},
        figures={path.stem: path for path in written if path.suffix == ".png"},
        files=(folder, *(each for each in (pdf,) if each is not None and each.exists())),
    )
