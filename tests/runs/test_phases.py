"""Which checkpoint has which name: of runs that came to their end and of runs that did not, as they are written and as
older code left them."""

from __future__ import annotations

import shutil
from typing import Any

import pandas as pd
import pytest

from stability import hessian
from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.alpha_max import is_measured, list_missing_phases, measure
from stability.runs.directory import RunDirectory, checkpoint_name, write_json
from stability.runs.parquet import write_parquet
from stability.runs.phases import phases
from stability.runs.results import collect, read_steps
from stability.runs.schema import CURVATURE_COLUMNS
from stability.runs.study import StudyFolder
from tests.reading import read_spec

ALL = CurvatureSpec(phase="all", state=("checkpoint",), warmup_batches=1, warmup_steps=1, recorded_steps=2)
SPEC: dict[str, Any] = {
    **{key: {"name": key} for key in ("mechanism", "residual", "optimizer", "objective", "data", "model")},
    "norm": {"name": "layernorm"}, "lr_peak": 1e-3, "seed": 0, "data_fingerprint": "f", "steps": 5000, "batch": 4, "clip_norm": 1.0,
}  # fmt: skip


def run_at(pool, state, steps, name="0" * 12):
    """A run's folder with bare checkpoints, of 5,000 planned steps."""
    directory = RunDirectory(pool, name)
    write_json(directory.spec_file, SPEC)
    for step in steps:
        (directory.path / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
    directory.set_status(state, step=max(steps, default=0) + 1, num_steps=5000)
    return directory


def named(directory, phase="all"):
    return {name: path.name for name, path in phases(directory, phase).items()}


@pytest.mark.parametrize(
    ("state", "steps", "expected"),
    [
        ("stable", (250, 5000), {"earliest": 250, "terminal": 5000}),
        ("plateaued", (5000,), {"terminal": 5000}),
        ("diverged", (250, 4900), {"earliest": 250, "last": 4900}),
        ("diverged", (250,), {"earliest": 250}),
        ("diverged", (), {}),
        ("stopped", (250, 4900), {"earliest": 250}),
        ("interrupted", (250, 4900), {"earliest": 250}),
    ],
)
def test_only_the_last_planned_step_is_terminal_and_one_checkpoint_has_one_name(tmp_path, state, steps, expected):
    directory = run_at(tmp_path, state, steps)
    assert named(directory) == {name: checkpoint_name(step) for name, step in expected.items()}
    for phase in ("terminal", "earliest", "last"):
        assert set(named(directory, phase)) == {phase} & expected.keys()


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ((250, 4900), "diverged at step 4901 of 5000: no terminal checkpoint"),
        ((), "diverged at step 1 of 5000: no checkpoint"),
    ],
)
def test_the_measurement_of_a_run_that_diverged_says_why_it_has_no_terminal_checkpoint(tmp_path, capsys, steps, line):
    directory = run_at(tmp_path, "diverged", steps)
    ((_, run),) = read_spec("sweep", ["mechanism=sa", "lr=1e-3", "seeds=1", "steps=5000"]).points("f")
    write_json(directory.spec_file, run.model_dump(mode="json"))
    assert hessian.main([f"ckpt={directory.path}", "phase=terminal"]) == 0
    assert capsys.readouterr().out.splitlines().count(line) == 1


@pytest.mark.parametrize(("state", "steps"), [("stable", (250, 5000)), ("diverged", (250, 5000)), ("stopped", (250,))])
def test_nothing_is_said_of_a_divergence_where_none_took_the_terminal_checkpoint(tmp_path, capsys, state, steps):
    hessian._tell_divergence(run_at(tmp_path, state, steps))
    assert capsys.readouterr().out == ""


def rows(directory, phase, loss=2.0):
    row = dict.fromkeys(CURVATURE_COLUMNS) | {
        "run_id": directory.run_id,
        "phase": phase,
        "state": "paper",
        "step": 0,
        "alpha_max": 0.1,
        "loss_before": loss,
    }
    del row["checkpoint_step"]  # as older code wrote it
    return pd.DataFrame([row])


def collected(tmp_path, *directories):
    study = StudyFolder.of(tmp_path, "mine")
    study.write([directory.run_id for directory in directories])
    return collect(study.path)


def test_what_older_code_called_terminal_of_a_run_that_diverged_is_read_as_its_last(tmp_path):
    """Died at step 4,900 of 5,000: two checkpoints, measured as earliest and terminal; no file is changed."""
    directory = run_at(tmp_path, "diverged", (250, 4900))
    for phase, loss in (("earliest", 3.0), ("terminal", 2.0)):
        write_parquet(rows(directory, phase, loss), directory.curvature_file(phase), {})
    write_parquet(rows(directory, "terminal").assign(block="mlp"), directory.curvature_file("terminal_blocks"), {})
    before = directory.curvature_file("terminal").read_bytes()
    found = collected(tmp_path, directory)
    assert found.curvature[["phase", "checkpoint_step", "loss_before"]].values.tolist() == [
        ["earliest", 250, 3.0],
        ["last", 4900, 2.0],
    ]
    assert found.spectra["blocks"].phase.tolist() == ["last"]
    assert found.runs[["planned_steps", "last_checkpoint_step", "num_steps"]].values.tolist() == [[5000, 4900, 4901]]
    assert directory.curvature_file("terminal").read_bytes() == before
    assert [table.phase.tolist() for table in read_steps(directory)[0]] == [["earliest"], ["last"]]


@pytest.mark.parametrize("left", [(250,), ()])
def test_one_checkpoint_that_older_code_measured_as_both_phases_is_read_once(tmp_path, left):
    """Also where the checkpoints were removed since: by its numbers."""
    directory = run_at(tmp_path, "diverged", left)
    for phase in ("earliest", "terminal"):
        write_parquet(rows(directory, phase), directory.curvature_file(phase), {})
    assert collected(tmp_path, directory).curvature.phase.tolist() == ["earliest"]
    whole = run_at(tmp_path, "stable", (5000,) if left else (), "1" * 12)
    for phase in ("earliest", "terminal"):
        write_parquet(rows(whole, phase), whole.curvature_file(phase), {})
    assert collected(tmp_path, whole).curvature.phase.tolist() == ["terminal"]


def test_two_checkpoints_stay_two_phases(tmp_path):
    directory = run_at(tmp_path, "stable", (250, 5000))
    for phase in ("earliest", "terminal"):
        write_parquet(rows(directory, phase), directory.curvature_file(phase), {})
    assert collected(tmp_path, directory).curvature[["phase", "checkpoint_step"]].values.tolist() == [
        ["earliest", 250],
        ["terminal", 5000],
    ]


def test_samples_of_a_run_that_diverged_make_no_generative_nll(tmp_path):
    directory = run_at(tmp_path, "diverged", (250, 4900))
    scores = pd.DataFrame(
        {"run_id": directory.run_id, "phase": "terminal", "sample": [0, 1], "nll": [2.0, 3.0], "oracle": "hf:x"}
    )
    write_parquet(scores, directory.generation_file("terminal"), {})
    found = collected(tmp_path, directory)
    assert found.runs.gen_nll.isna().all() and set(found.probes["generation"].phase) == {"last"}


def test_the_terminal_phase_of_a_run_that_diverged_has_nothing_to_measure(lab):
    spec = lab.spec(checkpoint={"every_steps": 2})
    directory = lab.train(spec)
    shutil.rmtree(directory.checkpoints()[-1])
    directory.set_status("diverged", step=11, num_steps=12, reason="planted")
    terminal = ALL.model_copy(update={"phase": "terminal"})
    assert list(measure(directory, terminal, cache_dir=lab.cache, device="cpu")) == []
    assert len(pd.read_parquet(directory.curvature_file("terminal"))) == 0 and is_measured(directory, terminal)
    assert list_missing_phases(directory, ALL) == ["earliest", "last"]
    list(measure(directory, ALL, cache_dir=lab.cache, device="cpu"))
    found = pd.concat(read_steps(directory)[0])
    assert found[["phase", "checkpoint_step"]].drop_duplicates().values.tolist() == [["earliest", 2], ["last", 10]]
    assert is_measured(directory, ALL)


def test_a_diverged_run_that_older_code_measured_whole_is_not_measured_again(lab):
    directory = lab.train(lab.spec(checkpoint={"every_steps": 2}))
    list(measure(directory, ALL, cache_dir=lab.cache, device="cpu"))
    shutil.rmtree(directory.checkpoints()[-1])
    # its terminal.parquet is now what older code would have made of step 10
    directory.set_status("diverged", step=11, num_steps=12, reason="planted")
    assert is_measured(directory, ALL)
    assert {phase for table in read_steps(directory)[0] for phase in table.phase} == {"earliest", "last"}
