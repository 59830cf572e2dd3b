"""The workspace of a study on W&B: its panels, and saving it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.dashboards.series import Series
from stability.dashboards.study_run import CHART, CHART_AXIS, CHART_TITLE
from stability.runs.directory import read_json, write_json
from stability.runs.wandb_sink import CHECKPOINT_STEP

FILE = "wandb_workspace.json"  # in a study's folder: the workspace's spec and, once saved, its address
LOGARITHMIC = ("loss", "grad_norm", "update_norm", "val_nll")  # series with a logarithmic axis: ratios matter
GROUPED_BY = ("mechanism.name", "residual.name", "optimizer.name", "lr_peak")  # lines are means over seeds
WIDE = {"w": 12, "h": 8}  # of a workspace's 24 columns


@dataclass(frozen=True)
class Shown:
    """The content of a study's workspace.

    Attributes:
        name: the study.
        run_ids: W&B ids of its runs; some may have been sent with another study.
        series: series of the runs.
        tables: keys of tables in the study's own run.
        figures: keys of figures in the study's own run.
    """

    name: str
    run_ids: tuple[str, ...]
    series: Series
    tables: tuple[str, ...]
    figures: tuple[str, ...]


def require_workspaces() -> None:
    """Raise a one-line ``RuntimeError`` if W&B's package for workspaces is not installed."""
    try:
        importlib.import_module("wandb_workspaces.workspaces")
    except ImportError:
        raise RuntimeError(
            "stability.dashboard needs W&B's workspaces: pip install 'stability-lab[dashboard]' (wandb-workspaces)"
        ) from None


def workspace(shown: Shown, project: str, entity: str) -> Any:
    """Return the workspace, unsaved.

    Its sections: NLL and α_max over the learning rate, training, gradients of blocks, figures and tables.

    Args:
        shown: the content.
        project: project on W&B.
        entity: account or team on W&B.
    """
    ws = importlib.import_module("wandb_workspaces.workspaces")
    sections = {
        "Stability": _laid_out([_chart(shown.name), *_stability(shown.series)]),
        "Training": _training(shown.series),
        "Gradients of blocks": _blocks(shown.series),
        "Figures": _figures(shown.figures),
        "Tables": _tables(shown.tables),
    }
    return ws.Workspace(
        entity=entity,
        project=project,
        name=shown.name,
        sections=[
            ws.Section(name=name, panels=panels, is_open=name in ("Stability", "Training"))
            for name, panels in sections.items()
            if panels
        ],
        settings=ws.WorkspaceSettings(x_axis="Step", max_runs=100, group_by_prefix="first"),
        runset_settings=ws.RunsetSettings(
            filters=ws.Or(ws.Metric("Group") == shown.name, ws.Metric("ID").isin(list(shown.run_ids))),
            groupby=[ws.Config(name) for name in GROUPED_BY],
        ),
    )


def saved_online(made: Any, study: Path) -> str:
    """Publish a workspace over the study's earlier one; return its address.

    It is read back and compared.

    Args:
        made: the workspace.
        study: the study's folder.

    Raises:
        RuntimeError: W&B's copy differs from the saved one. W&B's own errors if it is unreachable.
    """
    ws = importlib.import_module("wandb_workspaces.workspaces")
    earlier = read_json(study / FILE) if (study / FILE).exists() else {}
    if earlier.get("place") == [made.entity, made.project]:
        made._internal_name, made._internal_id = earlier["internal_name"], earlier["id"]
    made.save()
    there = ws.Workspace.from_url(made.url)
    if panels_of(spec_of(there)) != panels_of(spec_of(made)):
        raise RuntimeError(f"W&B's workspace {made.url} does not hold the panels that were saved")
    where = {"internal_name": made._internal_name, "id": made._internal_id, "place": [made.entity, made.project]}
    write_json(study / FILE, {"url": made.url, **where, "spec": spec_of(made)})
    return made.url


def saved_to_file(made: Any, study: Path) -> Path:
    """Write a workspace's spec into the study's folder, for use without a server.

    The address of an earlier one is retained.
    """
    earlier = read_json(study / FILE) if (study / FILE).exists() else {}
    write_json(study / FILE, {**earlier, "spec": spec_of(made)})
    return study / FILE


def spec_of(made: Any) -> dict[str, Any]:
    """Return the spec of a workspace in W&B's format."""
    return made._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def panels_of(spec: dict[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return a spec's sections with their panels' kinds and settings, without W&B's ids."""
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [
        (section["name"], [(panel["viewType"], panel.get("config")) for panel in section["panels"]])
        for section in sections
    ]


def _stability(series: Series) -> list[Any]:
    """Return panels of validation loss, α_max and share of stable steps.

    First over the learning rate (one point per run), then along the training (without the loss).
    """
    panels = _panels()
    against = {"x": panels.Config("lr_peak"), "log_x": True}
    found = [
        panels.ScatterPlot(
            title=f"{name} against the learning rate", y=panels.SummaryMetric(name), log_y=_is_log(name), **against
        )
        for name in (*(name for name in series.steps if name.startswith("val_")), *series.checkpoints)
    ]
    along = [
        panels.LinePlot(title=f"{name} along the training", x=CHECKPOINT_STEP, y=[name], log_y=_is_log(name))
        for name in series.checkpoints
    ]
    return [*found, *along]


def _chart(study: str) -> Any:
    """Return the chart of the study's own run (`study_run.CHART`), from its W&B table."""
    return _panels().CustomChart(
        query={"summaryTable": {"tableKey": f"{CHART}_table"}},
        chart_name="wandb/lineseries/v0",
        chart_fields={name: name for name in ("step", "lineKey", "lineVal")},
        chart_strings={"title": f"{study}: {CHART_TITLE}", "xname": CHART_AXIS},
    )


def _training(series: Series) -> list[Any]:
    panels = _panels()
    return _laid_out(
        [panels.LinePlot(title=name, x="Step", y=[name], log_y=name in LOGARITHMIC) for name in series.steps]
    )


def _blocks(series: Series) -> list[Any]:
    """Return one panel per quantity, with all blocks."""
    kinds: dict[str, list[str]] = {}
    for name in series.blocks:
        kinds.setdefault(name.split("/")[0], []).append(name)
    panels = _panels()
    return _laid_out([panels.LinePlot(title=kind, x="Step", y=names, log_y=True) for kind, names in kinds.items()])


def _figures(keys: Sequence[str]) -> list[Any]:
    panels = _panels()
    return _laid_out([panels.MediaBrowser(title=key, media_keys=[key], num_columns=1) for key in keys])


def _tables(keys: Sequence[str]) -> list[Any]:
    panels = _panels()
    return _laid_out([panels.WeavePanelSummaryTable(table_name=key) for key in keys])


def _is_log(name: str) -> bool:
    return name.startswith("alpha_max/") or name in LOGARITHMIC


def _laid_out(panels: list[Any]) -> list[Any]:
    """Place panels in two columns."""
    layout = _panels().Layout
    for index, panel in enumerate(panels):
        panel.layout = layout(x=WIDE["w"] * (index % 2), y=WIDE["h"] * (index // 2), **WIDE)
    return panels


def _panels() -> Any:
    return importlib.import_module("wandb_workspaces.reports.v2")
