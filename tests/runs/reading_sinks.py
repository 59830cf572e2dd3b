"""What a run's sinks hold, read back by their own libraries: (rows of name, step, value; the verdict)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def from_tensorboard(directory):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(directory.path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows = [(name, each.step, each.value) for name in events.Tags()["scalars"] for each in events.Scalars(name)]
    (verdict,) = events.Tensors("verdict")
    return rows, verdict.tensor_proto.string_val[0].decode()


def mlflow_run(client):
    """The one run of the experiment ``my-study``."""
    experiment = client.get_experiment_by_name("my-study")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def from_mlflow(directory):
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=(directory.path.parent / "mlflow").as_uri())
    run = mlflow_run(client)
    assert (run.info.run_name, run.data.tags["stability.run_id"]) == (directory.run_id, directory.run_id)
    rows = [(n, m.step, m.value) for n in run.data.metrics for m in client.get_metric_history(run.info.run_id, n)]
    return rows, run.data.tags["verdict"]


def records_of(path):
    """The records of a ``.wandb`` file, as W&B's own command prints them."""
    command = Path(sys.executable).with_name("wandb")
    if not command.exists():
        command = Path(__file__).resolve().parents[2] / ".venv/bin/wandb"
    inspect = [str(command), "leet", "inspect", "--json", str(path)]
    printed = subprocess.run(inspect, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in printed.splitlines()]


def from_wandb(directory):
    """Both offline folders, the second's steps in the place of the first's from where it went on."""
    found, tags = {}, []
    for path in sorted((directory.path / "wandb").glob("offline-run-*/*.wandb")):
        for record in records_of(path):
            if record["type"] == "history":
                item, step = record["history"]["item"], record["history"]["step"]["num"]
                for name, value in item.items():
                    is_measured = name.startswith(("alpha_max/", "stable_percent/"))
                    if not name.startswith("_") and name != "checkpoint_step":
                        found[(name, item["checkpoint_step"] if is_measured else step)] = value
            if record["type"] == "run":
                tags += record["run"].get("tags", [])
    return [(*where, value) for where, value in found.items()], tags[-1]


READERS = {"wandb": from_wandb, "tensorboard": from_tensorboard, "mlflow": from_mlflow}
