"""Every sink gets what the run's own files hold, read back record by record, and can do the run no harm."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

from stability.config.base import validate
from stability.config.curvature import CurvatureSpec
from stability.config.identity import shorten_places
from stability.config.run import RunSpec
from stability.runs.directory import RunDirectory, read_jsonl
from stability.runs.log import SINKS, RunLog, Sinks, load_sink
from stability.runs.sink import Told, failure_file
from stability.runs.tensorboard_sink import TensorboardSink
from tests.runs.reading_sinks import READERS, mlflow_run

MEASURED = {"step": 4, "alpha_max/terminal/checkpoint": 0.5, "stable_percent/terminal/checkpoint": 75.0}


def row(step):
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.5, "lr": 0.01, "val_nll": 2.5 if step == 4 else None}


def settings(name, folder):
    if name == "wandb":
        return {"mode": "offline"}
    if name == "mlflow":
        pytest.importorskip("mlflow", reason="mlflow-skinny, of the extra mlflow, is not installed")
        given, _ = load_sink(name).prepare(str(folder), "my-study")
        assert given is not None
        return given
    pytest.importorskip("tensorboard", reason="tensorboard, of the extra tensorboard, is not installed")
    return {}


def sinks_of(directory, to):
    told = {"group": "my-study", "config": {"lr_peak": 0.01, "model": {"width": 16}}, "name": "sa lr=0.01"}
    return Sinks(directory, {"to": to, **told})


def write_run(directory, to, asked_first=True):
    """A run that is interrupted after step 3, goes on from step 2, ends, and is measured. ``asked_first``: its first
    part has the sinks, too."""
    for steps, resume_after in (([1, 2, 3], -1), ([3, 4, 5], 2)):
        sinks = sinks_of(directory, to if asked_first or resume_after == 2 else {})
        log = RunLog(directory, resume_after=resume_after, sinks=sinks)
        for step in steps:
            log.write_metrics(row(step))
            log.write_signals("gradients", [{"step": step, "block": "blocks.0.mixer", "grad_norm": 0.25 * step}])
        log.close()
        if steps[-1] == 5:
            directory.set_status("spiked", step=5, reason="planted", result={"val_nll": 2.5})
            sinks.write_measured(MEASURED)
        sinks.close()


def expected(directory):
    """What the run's own files hold, as (name, step) → value."""
    found = {
        (k, r["step"]): v
        for r in read_jsonl(directory.metrics_file)
        for k, v in r.items()
        if k != "step" and v is not None
    }
    for r in read_jsonl(directory.gradients_file):
        found[(f"grad_norm/{r['block']}", r["step"])] = r["grad_norm"]
    return found | {(name, 4): value for name, value in MEASURED.items() if name != "step"}


@pytest.mark.parametrize(
    ("name", "asked_first"),
    [
        *((name, True) for name in SINKS),
        # a service of W&B's starts for each run
        *(pytest.param(name, False, marks=[pytest.mark.slow] * (name == "wandb")) for name in SINKS),
    ],
)
def test_a_sink_holds_every_record_of_the_run_s_own_files_once_and_its_verdict(tmp_path, name, asked_first):
    """Also of a run that was begun without it."""
    directory = RunDirectory(tmp_path, "0123456789ab")
    write_run(directory, {name: settings(name, tmp_path)}, asked_first)
    assert not failure_file(directory, name).exists(), failure_file(directory, name).read_text()
    rows, verdict = READERS[name](directory)
    wanted = {
        (tag.replace("/", ".") if name == "mlflow" else tag, step): v for (tag, step), v in expected(directory).items()
    }
    assert {(tag, step): value for tag, step, value in rows} == pytest.approx(wanted, rel=1e-6)
    assert len(rows) == len(expected(directory))
    assert verdict == "spiked"


def test_mlflow_has_the_spec_as_parameters(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow-skinny, of the extra mlflow, is not installed")
    directory = RunDirectory(tmp_path, "0123456789ab")
    write_run(directory, {"mlflow": settings("mlflow", tmp_path)})
    run = mlflow_run(tracking.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri()))
    assert run.data.params == {"lr_peak": "0.01", "model.width": "16"}


@pytest.mark.parametrize("fails_at", ["open", "write", "close"])
def test_whatever_a_sink_raises_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys, fails_at):
    def fail(*_):
        raise OSError("planted at http://me:secret@example.org\nand more")

    for each in ("open", "write", "write_measured", "close"):
        monkeypatch.setattr(TensorboardSink, each, fail if each == fails_at else lambda *_: None)
    directory = RunDirectory(tmp_path, "0123456789ab")
    sinks = sinks_of(directory, {"tensorboard": {}})
    log = RunLog(directory, resume_after=-1, sinks=sinks)
    for step in (1, 2):
        log.write_metrics(row(step))
    log.close()
    sinks.close()
    assert len(directory.metrics_file.read_text().splitlines()) == 2
    told = "OSError: planted at http://example.org"
    assert capsys.readouterr().out == f"0123456789ab: TensorBoard failed, the run goes on ({told})\n"
    assert failure_file(directory, "tensorboard").read_text() == f"{told}\n"


def test_a_measured_checkpoint_gives_its_median_and_the_share_of_stable_steps(lab):
    from stability.probes.curvature.alpha_max import measure
    from stability.probes.curvature.medians import medians

    directory = lab.train(lab.spec())
    curvature = validate(CurvatureSpec, {"warmup_batches": 1, "warmup_steps": 0, "recorded_steps": 3})
    list(measure(directory, curvature, cache_dir=lab.cache, device="cpu"))
    table = pd.read_parquet(directory.curvature_file("terminal"))
    (found,) = medians(directory, curvature)
    assert found.pop("step") == 12
    for state, rows in table.groupby("state"):
        assert found.pop(f"alpha_max/terminal/{state}") == rows["alpha_max"][np.isfinite(rows["alpha_max"])].median()
        assert found.pop(f"stable_percent/terminal/{state}") == 100 * (rows["alpha_max"] > rows["lr"]).mean()
    assert found == {}


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_without_its_package_the_error_says_what_to_do(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        RuntimeError, match=f"^logger={name} needs .*: pip install {name}[a-z-]*, or choose logger=files$"
    ):
        load_sink(name).require()


def test_what_is_sent_of_a_run_names_its_files_and_not_where_they_lie(lab):
    spec = lab.spec().model_dump(mode="json")
    spec["weights"] = {"source": f"ckpt:{lab.pool}/0123456789ab", "sha256": "0" * 64}
    spec["data"]["split"] = {"path": "/stays/where/it/is"}  # nothing of this name is declared to be a path
    told = Told(lab.directory(lab.spec()), "study", "name", spec).config
    assert (told["data"]["path"], told["weights"]["source"]) == ("page.txt", "ckpt:0123456789ab")
    assert str(lab.pool.parent) not in json.dumps(told)
    assert told | {"data": spec["data"], "weights": spec["weights"]} == spec


@pytest.mark.parametrize(
    ("typed", "sent"),
    [("/home/me/x.txt", "x.txt"), ("../x", "x"), ("x", "x"), ("folder/", "folder/"), ("a/b/", "b/"), ("~/p q", "p q")],
)
def test_the_last_part_of_a_path_is_sent(typed, sent):
    assert shorten_places({"data": {"name": "text", "path": typed}}, RunSpec) == {
        "data": {"name": "text", "path": sent}
    }


def test_a_dataset_of_the_hub_keeps_its_whole_name():
    data = {"name": "hf", "dataset": "roneneldan/TinyStories"}
    assert shorten_places({"data": data}, RunSpec) == {"data": data}
    folder = shorten_places({"data": data | {"dataset": "/home/me/stories"}}, RunSpec)
    assert folder == {"data": data | {"dataset": "stories"}}
