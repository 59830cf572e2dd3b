"""Two pools with the same recipe send two runs to a server; one pool goes on with its own, also one from before."""

from __future__ import annotations

import shutil
import types

import pytest

from stability.dashboards import study_run
from stability.runs import mlflow_sink, wandb_sink
from stability.runs.directory import RunDirectory
from stability.runs.mlflow_sink import POOL, RUN_ID, MlflowSink
from stability.runs.sink import MARK_FILE, Told, pool_mark
from stability.runs.wandb_sink import WandbSink

RUN = "0123456789ab"


def told(pool, resume_after=-1):
    return Told(RunDirectory(pool, RUN), "my-study", "sa", {}, resume_after)


@pytest.fixture
def sent(monkeypatch):
    """The ids of the W&B runs that were begun, whose folders W&B makes as it does."""
    ids = []

    def init(mode, **about):
        ids.append(about["id"])
        folder = RunDirectory(*about["dir"].rsplit("/", 1)).path / "wandb"
        (folder / f"offline-run-20260101_00000{len(ids)}-{about['id']}").mkdir(parents=True)
        return types.SimpleNamespace(resumed=False)

    monkeypatch.setattr(wandb_sink, "init_run", init)
    return ids


def test_two_pools_send_two_runs_and_a_pool_goes_on_with_its_own(tmp_path, sent):
    assert WandbSink("offline").open(told(tmp_path / "one"))
    assert WandbSink("offline").open(told(tmp_path / "two"))
    assert not WandbSink("offline").open(told(tmp_path / "one", 3))
    first, second, again = sent
    assert first == again != second and {first[:13], second[:13]} == {f"{RUN}-"}


def test_a_run_from_before_marks_keeps_its_id(tmp_path, sent):
    (tmp_path / RUN / "wandb" / f"run-20250101_000000-{RUN}").mkdir(parents=True)
    assert not WandbSink("online").open(told(tmp_path, 3))
    assert sent == [RUN]


def test_a_pool_that_is_copied_or_moved_keeps_its_mark_and_a_damaged_one_is_made_anew(tmp_path, sent):
    mark = pool_mark(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert pool_mark(tmp_path / "copy") == mark == pool_mark(tmp_path / "one") != pool_mark(tmp_path / "two")
    WandbSink("offline").open(told(tmp_path / "one"))
    for damage in (b"", b"\xff\xff", b"short"):
        (tmp_path / "one" / MARK_FILE).write_bytes(damage)
        assert pool_mark(tmp_path / "one") not in (mark, "")
    WandbSink("offline").open(told(tmp_path / "one", 3))
    assert sent == [f"{RUN}-{mark}"] * 2, "the run's own folder says which it is"


def test_a_studys_own_run_is_the_pools_own(tmp_path, monkeypatch):
    ids = []

    class Run(types.SimpleNamespace):
        def __getattr__(self, name):
            return lambda *_, **__: None

    def init(mode, **about):
        ids.append(about["id"])
        return Run(summary={}, url="https://wandb.example")

    monkeypatch.setattr(study_run, "init_run", init)
    monkeypatch.setattr(study_run, "_chart", lambda *_: None)
    monkeypatch.setattr(study_run, "_table_of", lambda *_: None)
    monkeypatch.setattr(study_run, "_artifact", lambda wandb, content, run_id: None)
    for pool in ("one", "two", "one", "old"):
        folder = tmp_path / pool / "studies" / "quickstart"
        folder.mkdir(parents=True, exist_ok=True)
        if pool == "old":
            (folder / "wandb" / f"run-20250101_000000-{study_run.run_id_of('quickstart')}").mkdir(parents=True)
        study_run.send(study_run.Content("quickstart", ()), folder, "offline", {})
    own = study_run.run_id_of("quickstart")
    assert ids[0] == ids[2] != ids[1] and ids[0].startswith(f"{own}-") and ids[3] == own


class Client:
    """A server of MLflow, as far as a sink asks it."""

    def __init__(self):
        self.runs = []

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name)

    def search_runs(self, experiments, condition):
        return [run for run in self.runs if condition == f"tags.`{RUN_ID}` = '{run.data.tags[RUN_ID]}'"]

    def create_run(self, experiment, run_name, tags):
        info = types.SimpleNamespace(run_id=str(len(self.runs)))
        self.runs.append(types.SimpleNamespace(info=info, data=types.SimpleNamespace(tags=tags, metrics={})))
        return self.runs[-1]

    def set_tag(self, run_id, key, value):
        self.runs[int(run_id)].data.tags[key] = value

    def update_run(self, run_id, status):
        pass


@pytest.fixture
def server(monkeypatch):
    client = Client()
    monkeypatch.setattr(mlflow_sink, "_client", lambda uri: client)
    monkeypatch.setattr(mlflow_sink, "_parameters", lambda config: [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    return client


def test_two_pools_have_two_runs_on_a_server_of_mlflow(tmp_path, server):
    begun = [MlflowSink("").open(told(tmp_path / pool, step)) for pool, step in (("one", -1), ("two", -1), ("one", 3))]
    assert begun == [True, True, False] and len(server.runs) == 2


def test_a_run_of_mlflow_from_before_marks_is_the_one_of_who_goes_on(tmp_path, server):
    server.create_run("my-study", RUN, {RUN_ID: RUN})
    assert MlflowSink("").open(told(tmp_path / "another"))
    assert not MlflowSink("").open(told(tmp_path / "mine", 3))
    assert server.runs[0].data.tags[POOL] == pool_mark(tmp_path / "mine")
    assert MlflowSink("").open(told(tmp_path / "third", 3))


def test_a_run_in_the_pools_own_store_is_its_own_whatever_its_tags(tmp_path, server, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    server.create_run("my-study", RUN, {RUN_ID: RUN})
    assert not MlflowSink((tmp_path / "mine" / "mlflow").as_uri()).open(told(tmp_path / "mine"))
