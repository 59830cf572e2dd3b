"""``python -m stability.dashboard name=…``: send a study to Weights & Biases, with a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.compose import read
from stability.cli.entry import run_entry
from stability.cli.words import Invocation
from stability.config.entries import DashboardSpec
from stability.printable import print_text

if TYPE_CHECKING:
    from stability.dashboards.series import Series
    from stability.dashboards.workspace import Shown
    from stability.runs.study import StudyFolder

HELP = """
python -m stability.dashboard name=NAME_OR_FOLDER [key=value …]

Put a study on Weights & Biases: each run that W&B has nothing or not all of, from the run's own files (so that a study
trained with logger=files gets there, too); one run about the study with its chart of NLL against the learning rate, all
runs, tables, figures and PDF; and a saved workspace whose panels show what the study has. The same command again brings
all of it up to date. Without a login or a server everything is kept offline, and `wandb sync` uploads it later; the
workspace's spec is then written into the study's folder.
"""


def main(argv: list[str]) -> int:
    """Send a study's missing runs, its study run, and its workspace."""
    spec = read(DashboardSpec, Invocation.of(argv, first="name"))
    from stability.cli.publish import publish
    from stability.cli.study_on_wandb import send_study
    from stability.dashboards.workspace import Shown, require_workspaces
    from stability.runs.sink import wandb_id
    from stability.runs.study import StudyFolder
    from stability.runs.wandb_sink import probe_wandb

    study = StudyFolder.find(spec.runs_dir, spec.name)
    require_workspaces()
    mode, message = probe_wandb()
    print_text(message.replace("RUNS_DIR", spec.runs_dir))
    if mode == "disabled":
        raise RuntimeError("WANDB_MODE=disabled sends nothing; leave it out, or set WANDB_MODE=offline")
    place = {"project": spec.project, "entity": spec.entity}
    publish(study, spec.reports_dir, unless_same=True)
    series = _send_runs(study, spec.send, mode, place)
    content, where = send_study(study, Path(spec.reports_dir) / f"{study.path.name}.pdf", mode, place)
    print_text(f"the run about the study: {where}")
    run_ids = tuple(wandb_id(run.path, run.run_id, study.pool) for run in study.runs())
    shown = Shown(study.path.name, run_ids, series, content.table_keys, content.figure_keys)
    print_text(_save(shown, spec, study.path, mode))
    return 0


def _send_runs(study: StudyFolder, which: str, mode: str, place: dict[str, str | None]) -> Series:
    """Send the requested runs, and return the series of the study's runs."""
    from stability.cli.subjects import follow
    from stability.config.base import validate
    from stability.config.curvature import CurvatureSpec
    from stability.dashboards.series import Series, is_missing, send
    from stability.runs.sink import Told
    from sweeps.view.study_view import StudyView

    trials = [row.trial for row in StudyView.of(study).progress.rows]
    asked = next((trial.curvature for trial in trials if trial.curvature is not None), None)
    curvature = None if asked is None else validate(CurvatureSpec, asked)
    told = [Told(trial.directory, study.path.name, trial.label, trial.spec) for trial in trials]
    chosen = [each for each in told if which == "all" or (which == "missing" and is_missing(each))]
    if chosen:
        print_text(f"sends {len(chosen)} of {len(told)} runs from their own files")
        tasks = (send(each, mode, place, curvature) for each in chosen)
        follow(tasks, [each.name for each in chosen], [1] * len(chosen))
    return Series.of([trial.directory for trial in trials], curvature)


def _entity(asked: str | None, mode: str) -> str:
    """Return the W&B entity; "" if offline and not configured."""
    if asked is not None or mode != "online":
        return asked or ""
    from stability.runs.wandb_sink import default_entity

    return default_entity()


def _save(shown: Shown, spec: DashboardSpec, study: Path, mode: str) -> str:
    """Write the workspace to W&B, or offline to the study's folder; return a line about it."""
    from stability.dashboards.workspace import saved_online, saved_to_file, workspace

    made = workspace(shown, spec.project, _entity(spec.entity, mode))
    if mode == "online":
        return f"workspace: {saved_online(made, study)}, as it was read back"
    return f"workspace: {saved_to_file(made, study)}; the same command saves it on W&B once there is a login"


if __name__ == "__main__":
    run_entry(main, "dashboard", HELP)
