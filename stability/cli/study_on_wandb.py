"""Put a study on W&B: the run about it, with its tables, figures and PDF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.printable import print_text
from stability.runs.study import StudyFolder

if TYPE_CHECKING:
    from stability.dashboards.study_run import Content

SENT = ("run_id", "series", "residual", "norm", "optimizer", "lr", "seed", "status", "reason", "val_nll", "gen_nll")
EXPORTS = "exports"  # of the study's folder


def sent(study: StudyFolder, pdf: Path | None, mode: str, place: Mapping[str, Any]) -> tuple[Content, str]:
    """Send the run about a study whose results are collected; return what was sent, and where it is. ``pdf``: its
    report; ``mode`` and ``place`` as `stability.dashboards.study_run.send` takes them."""
    from stability.dashboards.study_run import send

    content = _content(study, pdf)
    return content, send(content, study.path, mode, place)


def send_after_sweep(study: StudyFolder, pdf: Path | None, place: Mapping[str, Any]) -> None:
    """Send the run about a study at the end of its sweep, and say where it is. What W&B raises is said in a line: the
    study is complete without it."""
    from stability.runs.wandb_sink import probe_wandb

    try:
        _, where = sent(study, pdf, probe_wandb()[0], place)
    # W&B raises classes of its own private modules
    except Exception as error:  # noqa: BLE001
        first = (str(error).splitlines() or [""])[0][:200]
        print_text(f"W&B: the run about the study was not sent ({type(error).__name__}: {first})")
    else:
        print_text(f"W&B: the run about the study: {where}")


def _content(study: StudyFolder, pdf: Path | None) -> Content:
    """Return what is sent of a study, with its tables and figures written into its folder on the way."""
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
