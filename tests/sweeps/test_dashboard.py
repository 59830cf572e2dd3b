"""``python -m stability.dashboard``: what W&B gets of a study, read back from its offline files record by record; and
the workspace, read back as it was saved."""

from __future__ import annotations

import json
import math
import re
import types

import pytest

from analysis import export
from stability.dashboards import series
from stability.dashboards import workspace as workspaces
from stability.dashboards.series import Series
from stability.dashboards.study_run import RUNS, medians_by_rate, run_id_of
from stability.runs.directory import RunDirectory
from stability.runs.sink import BEGUN_ANEW, Told, failure_file, pool_mark
from stability.runs.study import StudyFolder
from tests.reading import replaced
from tests.runs.reading_sinks import records_of
from tests.runs.test_sinks import write_run
from tests.sweeps.test_logger import SMALL

pytest.importorskip("wandb_workspaces", reason="wandb-workspaces, of the extra dashboard, is not installed")


@pytest.fixture
def words(lab, monkeypatch):
    """Those of `stability.dashboard` for a study that was trained with logger=files."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(lab.pool))
    return ["name=my-study", f"runs_dir={lab.pool}", f"reports_dir={lab.pool.parent / 'reports'}"]


@pytest.fixture
def trained(entered, lab, words, monkeypatch):
    monkeypatch.setattr(export, "FIGURES", ("png",))  # W&B's pictures; the others are only for the artifact
    asked = [*SMALL.split(), "name=my-study", f"runs_dir={lab.pool}", f"data.path={lab.text}"]
    ended = entered("stability.sweep", *replaced(asked, "logger=files"))
    assert ended.returncode == 0, ended.stderr
    return StudyFolder.of(lab.pool, "my-study")


def sent(folder):
    """The names of all that the offline runs under a folder have logged, of pictures and tables without W&B's own
    fields; and the names of their artifacts."""
    names, artifacts = set(), set()
    for path in folder.rglob("*.wandb"):
        for record in records_of(path):
            if record["type"] == "history":
                item = record["history"]["item"]
                media = {name.removesuffix("._type") for name in item if name.endswith("._type")}
                names |= media | {name for name in item if not name.startswith(("_", *(f"{each}." for each in media)))}
            if record["type"] == "artifact":
                artifacts.add(record["artifact"]["name"])
    return names, artifacts


def test_every_series_of_every_panel_is_there_and_every_one_that_is_there_has_a_panel(entered, trained, words):
    ended = entered("stability.dashboard", *words)
    assert ended.returncode == 0, ended.stderr
    assert "sends 1 of 1 runs from their own files\n" in ended.stdout
    (run,) = trained.runs()
    (logged, _), (of_study, artifacts) = sent(run.path), sent(trained.path)
    panels = workspaces.panels_of(json.loads((trained.path / workspaces.FILE).read_text())["spec"])
    shown = {name for _, section in panels for kind, config in section for name in names_of(kind, config)}
    assert {"loss", "grad_norm", "lr", "val_nll", "alpha_max/terminal/checkpoint"} <= logged
    assert {RUNS, "figures/curves", "tables/validation-nll-against-learning-rate"} <= of_study
    assert shown == logged | of_study | {"lr_peak"}
    mark = pool_mark(trained.pool)
    assert f"report-{run_id_of('my-study')}-{mark}" in artifacts
    assert f"{run.run_id}-{mark}" in (trained.path / workspaces.FILE).read_text()


def names_of(kind, config):
    """What a panel shows, as W&B keeps it."""
    if kind == "Weave":
        return re.findall(r'"key": {[^}]*"val": "([^"]+)"', json.dumps(config))
    if kind == "Vega2":
        return re.findall(r'"tableKey", "value": "([^"]+)"', json.dumps(config))
    found = [*config.get("metrics", []), *config.get("mediaKeys", [])]
    found += [config[axis] for axis in ("xAxis", "yAxis") if axis in config]
    return [
        name.removeprefix("summary:").removeprefix("config:").removesuffix(".value")
        for name in found
        if name != "_step"
    ]


def test_what_broke_off_is_sent_again_and_what_is_there_is_not(tmp_path):
    directory = RunDirectory(tmp_path, "0123456789ab")
    write_run(directory, {})
    told = Told(directory, "my-study", "sa lr=0.01", {"lr_peak": 0.01})
    assert series.is_missing(told)
    for _ in range(2):
        list(series.send(told, "offline", {"project": "stability", "entity": None}, None))
        assert not series.is_missing(told)
        failure_file(directory, "wandb").write_text("CommError: planted\n")
        assert series.is_missing(told)
    failure_file(directory, "wandb").write_text(f"CommError: planted ({BEGUN_ANEW})\n")
    assert not series.is_missing(told)
    assert sent(directory.path)[0] == {"loss", "grad_norm", "lr", "val_nll", "grad_norm/blocks.0.mixer"}


def shown(name="my-study"):
    measured = ("alpha_max/terminal/checkpoint", "stable_percent/terminal/checkpoint")
    series = Series(("loss", "lr", "val_nll"), ("grad_norm/blocks.0.mixer",), measured)
    return workspaces.Shown(name, ("0" * 12,), series, (RUNS,), ("figures/nll",))


class Server:
    """W&B's, as far as views go. ``loses``: it keeps a view without its last section."""

    def __init__(self, monkeypatch, loses=False):
        from wandb_workspaces.workspaces import interface, internal

        self.views, self.loses = {}, loses
        monkeypatch.setattr(internal, "upsert_view2", self.upsert)
        monkeypatch.setattr(internal, "get_view_dict", self.get)
        monkeypatch.setattr(interface, "get_app_url", lambda api: "https://wandb.example")
        monkeypatch.setattr(interface.wandb, "Api", types.SimpleNamespace)
        monkeypatch.setattr(interface.wandb, "termlog", lambda *_: None)

    def upsert(self, view):
        spec = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
        if self.loses:
            spec["section"]["panelBankConfig"]["sections"].pop()
        name = view.name.replace("nw-", "").replace("-v", "")
        self.views[name] = {"id": f"id of {name}", "displayName": view.display_name, "spec": json.dumps(spec)}
        return {"upsertView": {"view": {"name": view.name, "id": self.views[name]["id"]}}}

    def get(self, entity, project, name):
        return self.views[name]


def test_a_workspace_is_saved_read_back_and_brought_up_to_date_in_its_place(tmp_path, monkeypatch):
    server = Server(monkeypatch)
    first = workspaces.saved_online(workspaces.workspace(shown(), "stability", "me"), tmp_path)
    second = workspaces.saved_online(workspaces.workspace(shown("renamed"), "stability", "me"), tmp_path)
    assert first == second and first.startswith("https://wandb.example/me/stability?nw=")
    ((_, view),) = server.views.items()
    assert view["displayName"] == "renamed"
    elsewhere = workspaces.saved_online(workspaces.workspace(shown(), "other", "me"), tmp_path)
    assert elsewhere != first and len(server.views) == 2


def test_a_workspace_that_is_not_what_was_saved_is_an_error(tmp_path, monkeypatch):
    Server(monkeypatch, loses=True)
    with pytest.raises(RuntimeError, match=r"workspace https://.* does not hold the panels that were saved"):
        workspaces.saved_online(workspaces.workspace(shown(), "stability", "me"), tmp_path)
    assert not (tmp_path / workspaces.FILE).exists()


def test_without_its_package_the_error_says_what_to_do(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(
        RuntimeError, match=r"^stability.dashboard needs W&B's workspaces: pip install 'stability-lab\["
    ):
        workspaces.require_workspaces()


def test_a_rate_at_which_a_run_diverged_has_no_point():
    rows = [
        {"series": "sa", "lr": rate, "val_nll": nll}
        for rate, nll in [(1e-3, 2.0), (1e-3, 3.0), (1e-3, 2.5), (1e-1, 2.0), (1e-1, math.nan), (1e-2, 1.5)]
    ]
    assert medians_by_rate(rows) == {"sa": [(1e-3, 2.5), (1e-2, 1.5)]}


def test_a_study_has_one_run_whatever_its_name_holds():
    assert run_id_of("a study/of mine") == run_id_of("a study/of mine") != run_id_of("another")
    assert set(run_id_of("a study/of mine")) <= set("study-0123456789abcdef")
