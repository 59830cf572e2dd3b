"""Send a run's numbers to MLflow: its file store in ``<runs_dir>/mlflow``, or the server that MLFLOW_TRACKING_URI
names."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from stability.runs.mark import pool_mark
from stability.runs.sink import CREDENTIALS, AbstractSink, Told

# the tags by which a run is found again, among those of all pools on a server: MLflow gives its runs ids of its own
RUN_ID, POOL = "stability.run_id", "stability.pool"
LONGEST_PARAMETER, LARGEST_BATCH = 6000, 100  # characters, parameters at a time: MLflow's own bounds
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 refuses it without, though it still writes and reads it
    "MLFLOW_DISABLE_TELEMETRY": "true",  # what is trained here is nobody else's business
    # a server that is gone is asked twice within half a minute, not for minutes at every step
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MlflowSink(AbstractSink):
    """One MLflow run per trial, named by its id, in the study's experiment.

    ``uri``: the store, without credentials; a worker that has MLFLOW_TRACKING_URI takes that, which may have them.
    """

    title: ClassVar[str] = "MLflow"

    def __init__(self, uri: str):
        self._uri = uri

    @classmethod
    def require(cls) -> None:
        _set_up()
        try:
            importlib.import_module("mlflow")
        except ImportError:
            raise RuntimeError(
                "logger=mlflow needs MLflow: pip install mlflow-skinny, or choose logger=files"
            ) from None

    @classmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        """Make the study's experiment, which workers side by side would make twice; a store in which that cannot be
        done is left out."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path(runs_dir).resolve() / "mlflow").as_uri()
        shown = CREDENTIALS.sub("", uri)
        pool_mark(Path(runs_dir).resolve())  # now, before workers meet there
        try:
            _experiment(_client(uri), study)
        # MLflow raises its own errors, those of requests and of its databases
        except Exception as error:  # noqa: BLE001
            first = CREDENTIALS.sub("", (str(error).splitlines() or [""])[0])
            return None, f"MLflow: left out, {shown} cannot be written to ({type(error).__name__}: {first[:200]})"
        return {"uri": shown}, f"MLflow: {shown}"

    def open(self, run: Told) -> bool:
        """Begin a run with its id as name and tag and its spec as parameters, or go on with the one that has the tag
        and the pool's. One without the tag of a pool is older: it is this run's in the pool's own store, and for a
        run that was begun before."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or self._uri
        self._client = _client(uri)
        experiment = _experiment(self._client, run.group)
        pool = run.directory.path.parent
        mark = pool_mark(pool)
        mine = (mark, None) if run.resume_after != -1 or uri == (pool / "mlflow").as_uri() else (mark,)
        found = [
            each
            for each in self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'")
            if each.data.tags.get(POOL) in mine
        ]
        found.sort(key=lambda each: POOL not in each.data.tags)
        self._sent: dict[str, set[tuple[int, float]]] = {}
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._client.set_tag(self._id, POOL, mark)
            for name in found[0].data.metrics:
                history = self._client.get_metric_history(self._id, name)
                self._sent[name] = {(each.step, each.value) for each in history}
        else:
            tags = {RUN_ID: run.run_id, POOL: mark, "label": run.name}
            self._id = self._client.create_run(experiment, run_name=run.run_id, tags=tags).info.run_id
            self._log("params", _parameters(run.config))
        return not found

    def write(self, row: dict[str, Any]) -> None:
        """Send a row, but for what is there already: a resumed run logs some steps again."""
        now_ms, step = int(time.time() * 1000), row["step"]
        # in its file store grad_norm would be a file, and the folder of grad_norm/blocks.0.ffn
        values = {name.replace("/", "."): value for name, value in row.items() if name != "step"}
        fresh = {name: value for name, value in values.items() if (step, value) not in self._sent.get(name, ())}
        metric = importlib.import_module("mlflow.entities").Metric
        self._log("metrics", [metric(name, value, now_ms, step) for name, value in fresh.items()])

    def close(self, summary: dict[str, Any]) -> None:
        for name in ("verdict", "reason"):
            if summary.get(name):
                self._client.set_tag(self._id, name, summary[name])
        self._client.set_terminated(self._id, "FINISHED" if summary else "KILLED")

    def _log(self, kind: str, entities: list[Any]) -> None:
        for start in range(0, len(entities), LARGEST_BATCH):
            self._client.log_batch(self._id, **{kind: entities[start : start + LARGEST_BATCH]})


def _set_up() -> None:
    """Set what MLflow reads from the environment, where the user has not."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def _client(uri: str) -> Any:
    _set_up()
    return importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)


def _experiment(client: Any, name: str) -> str:
    """Return the id of the experiment of this name, made where there is none."""
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _parameters(config: dict[str, Any]) -> list[Any]:
    """Return a run's spec as MLflow's flat parameters, ``model.width``."""
    param = importlib.import_module("mlflow.entities").Param
    return [param(name, str(value)[:LONGEST_PARAMETER]) for name, value in _flat(config).items()]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
