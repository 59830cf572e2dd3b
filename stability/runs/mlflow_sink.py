"""MLflow sink: file store in ``<runs_dir>/mlflow``, or the server of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from stability.runs.sink import CREDENTIALS, AbstractSink, Told, pool_mark

# tags to identify a run among all pools on a server: MLflow assigns its own run ids
RUN_ID, POOL = "stability.run_id", "stability.pool"
LONGEST_PARAMETER, LARGEST_BATCH = 6000, 100  # characters, parameters per call: MLflow's limits
SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow 3 refuses file stores without it, though they still work
    "MLFLOW_DISABLE_TELEMETRY": "true",  # no usage data leave the machine
    # a dead server gets two requests within half a minute, not minutes of retries at every step
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MlflowSink(AbstractSink):
    """One MLflow run per trial, named by its id, in the study's experiment.

    ``uri`` is the store without credentials. A worker's MLFLOW_TRACKING_URI overrides it and may contain credentials.
    """

    title: ClassVar[str] = "MLflow"

    def __init__(self, uri: str):
        self._uri = uri

    @classmethod
    def require(cls) -> None:
        _set_environment()
        try:
            importlib.import_module("mlflow")
        except ImportError:
            raise RuntimeError(
                "logger=mlflow needs MLflow: pip install mlflow-skinny, or choose logger=files"
            ) from None

    @classmethod
    def prepare(cls, runs_dir: str, study: str) -> tuple[dict[str, Any] | None, str]:
        """Create the study's experiment once: concurrent workers would create it twice.

        A store without write access is skipped.

        Args:
            runs_dir: the pool.
            study: name of the study.
        """
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path(runs_dir).resolve() / "mlflow").as_uri()
        shown = CREDENTIALS.sub("", uri)
        pool_mark(Path(runs_dir).resolve())  # created before concurrent workers need it
        try:
            _experiment(_client(uri), study)
        # errors of MLflow, requests and databases
        except Exception as error:  # noqa: BLE001
            first = CREDENTIALS.sub("", (str(error).splitlines() or [""])[0])
            return None, f"MLflow: left out, {shown} cannot be written to ({type(error).__name__}: {first[:200]})"
        return {"uri": shown}, f"MLflow: {shown}"

    def open(self, run: Told) -> bool:
        """Begin or resume an MLflow run; return whether it is new.

        A new run has the id as name and tag, and the spec as parameters. A run with the tags of this id and this pool
        is resumed. One without a pool's tag is older. It counts as this run's in the pool's own store, or if this run
        began earlier.
        """
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
        """Send a row, except values already sent: a resumed run repeats some steps."""
        now_ms, step = int(time.time() * 1000), row["step"]
        # no slashes: in a file store grad_norm would be a file and also the folder of grad_norm/blocks.0.ffn
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


def _set_environment() -> None:
    """Set MLflow's environment variables, unless the user did."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def _client(uri: str) -> Any:
    _set_environment()
    return importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)


def _experiment(client: Any, name: str) -> str:
    """Return the id of the experiment of this name, created if missing."""
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def _parameters(config: dict[str, Any]) -> list[Any]:
    """Return a run's spec as MLflow's flat parameters, e.g. ``model.width``."""
    param = importlib.import_module("mlflow.entities").Param
    return [param(name, str(value)[:LONGEST_PARAMETER]) for name, value in _flatten(config).items()]


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
