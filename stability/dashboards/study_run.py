"""One W&B run about a whole study: NLL over the learning rate, runs, tables, figures, files."""

from __future__ import annotations

import hashlib
import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stability.runs.sink import wandb_id
from stability.runs.wandb_sink import init_run

CHART, RUNS = "nll_against_lr", "runs"
CHART_TITLE, CHART_AXIS = "validation NLL against log₁₀ of the learning rate, median of the seeds", "log10 lr"


@dataclass(frozen=True)
class Content:
    """The content of a study's own run.

    Attributes:
        name: the study.
        runs: one row per run of any verdict, with ``series``, ``lr`` and ``val_nll`` (NaN: none) among its columns.
        tables: tables by name.
        figures: PNG files by name.
        files: further files and folders of the artifact.
    """

    name: str
    runs: Sequence[Mapping[str, Any]]
    tables: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Path] = field(default_factory=dict)
    files: Sequence[Path] = ()

    @property
    def table_keys(self) -> tuple[str, ...]:
        return (RUNS, *(f"tables/{name}" for name in self.tables))

    @property
    def figure_keys(self) -> tuple[str, ...]:
        return tuple(f"figures/{name}" for name in self.figures)


def send(content: Content, folder: Path, mode: str, place: Mapping[str, Any]) -> str:
    """Send a study's run; return its address, or its folder if offline.

    Every upload of the same study uses the same W&B run.

    Args:
        content: the content of the run.
        folder: the study's folder.
        mode: online or offline.
        place: project and entity.
    """
    wandb = importlib.import_module("wandb")
    run_id = wandb_id(folder, run_id_of(content.name), folder.parent.parent)
    about = {"id": run_id, "name": content.name, "group": content.name, "job_type": "study"}
    run = init_run(mode, config={"study": content.name}, dir=str(folder), **place, **about)
    try:
        tables = {f"tables/{name}": wandb.Table(dataframe=table) for name, table in content.tables.items()}
        figures = {f"figures/{name}": wandb.Image(str(path)) for name, path in content.figures.items()}
        run.log({RUNS: _table_of(wandb, content.runs), CHART: _chart(wandb, content.runs), **tables, **figures})
        found: dict[str, int] = {"num_runs": len(content.runs)}
        for row in content.runs:
            found[f"num_{row['status']}"] = found.get(f"num_{row['status']}", 0) + 1
        run.summary.update(found)
        run.log_artifact(_artifact(wandb, content, run_id))
    finally:
        run.finish()
    return run.url or str(Path(run.dir).parent)


def run_id_of(study: str) -> str:
    """Return the id of a study's own run, without the pool's mark."""
    # Hashed: a name may contain characters that W&B refuses in an id.
    return f"study-{hashlib.sha256(study.encode()).hexdigest()[:12]}"


def medians_by_rate(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return by series the median validation NLL of each rate's seeds.

    In nats per token. A rate with a diverged run has no point: the median of its other runs would be too good.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in runs:
        found.setdefault(row["series"], {}).setdefault(float(row["lr"]), []).append(float(row["val_nll"]))
    return {
        series: [
            (rate, statistics.median(values))
            for rate, values in sorted(by_rate.items())
            if all(math.isfinite(value) for value in values)
        ]
        for series, by_rate in found.items()
    }


def _chart(wandb: Any, runs: Sequence[Mapping[str, Any]]) -> Any:
    """Return W&B's line chart over log₁₀ of the rate; its axis cannot be logarithmic."""
    lines = {series: points for series, points in medians_by_rate(runs).items() if points}
    return wandb.plot.line_series(
        xs=[[math.log10(rate) for rate, _ in points] for points in lines.values()],
        ys=[[nll for _, nll in points] for points in lines.values()],
        keys=list(lines),
        title=CHART_TITLE,
        xname=CHART_AXIS,
    )


def _table_of(wandb: Any, runs: Sequence[Mapping[str, Any]]) -> Any:
    columns = list(dict.fromkeys(name for row in runs for name in row))
    return wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in runs])


def _artifact(wandb: Any, content: Content, run_id: str) -> Any:
    artifact = wandb.Artifact(f"report-{run_id}", type="report", metadata={"study": content.name})
    for path in content.files:
        artifact.add_dir(str(path), name=path.name) if path.is_dir() else artifact.add_file(str(path))
    return artifact
