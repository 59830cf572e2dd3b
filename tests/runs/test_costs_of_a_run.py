"""What a run records of its cost: the optimizer's state and the time of a step; and RMS(u) beside α_max, from a run to
the study's table."""

from __future__ import annotations

import json
import statistics

import pandas as pd
import pytest
from safetensors.torch import load_file

from stability.build import sequence_state_bytes
from stability.cli.publish import collect_and_load
from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.alpha_max import measure
from stability.runs.directory import read_jsonl
from stability.runs.results import collect
from stability.runs.study import StudyFolder


@pytest.mark.parametrize(("name", "bytes_each", "bytes_a_tensor"), [("adamw", 8, 4), ("sgd", 0, 0)])
def test_a_run_records_the_bytes_of_its_optimizer_s_state_and_the_median_time_of_its_steps(
    lab, name, bytes_each, bytes_a_tensor
):
    """AdamW: two float32 numbers an entry, and of each tensor its count of steps, a float32; plain SGD keeps nothing."""
    spec = lab.spec(optimizer={"name": name})
    run = lab.train(spec)
    result, tensors = run.status()["result"], load_file(run.checkpoints()[-1] / "model.safetensors")
    assert result["num_params"] == sum(tensor.numel() for tensor in tensors.values())
    assert result["optimizer_state_bytes"] == bytes_each * result["num_params"] + bytes_a_tensor * len(tensors)
    seconds = [spec.batch * spec.model.positions / row["tokens_per_s"] for row in read_jsonl(run.timing_file)]
    assert len(seconds) == spec.steps and result["step_s"] == pytest.approx(statistics.median(seconds))


def test_a_run_that_can_go_on_reading_records_the_bytes_that_it_keeps_of_a_sequence(lab):
    """Keys and values, two of the width for each position and layer, four bytes each; with earlier positions that see
    later ones there is nothing to go on with."""
    causal = lab.train(lab.spec(objective={"name": "ar"}))
    size = lab.spec().model
    expected = 4 * size.layers * 2 * size.positions * size.width
    assert causal.status()["result"]["state_bytes"] == expected
    both = lab.train(lab.spec())
    assert both.status()["result"]["state_bytes"] is None
    study = StudyFolder.of(lab.pool, "states")
    study.write([causal.run_id, both.run_id])
    found = collect(study.path).runs["state_bytes"]
    assert found[0] == expected and pd.isna(found[1])


def test_what_a_run_of_an_older_version_keeps_is_told_by_its_spec_and_of_a_plugin_that_is_gone_not(lab):
    runs = [lab.train(lab.spec(objective={"name": "ar"}, seed=seed)) for seed in (0, 1)]
    size = lab.spec().model
    for run in runs:  # as the version before the column left it
        status = run.status()
        status["result"].pop("state_bytes")
        run.status_file.write_text(json.dumps(status))
    spec = json.loads(runs[1].spec_file.read_text())
    runs[1].spec_file.write_text(json.dumps({**spec, "plugins": ["package_of_somebody_else.mechanism"]}))
    study = StudyFolder.of(lab.pool, "old")
    study.write([run.run_id for run in runs])
    assert collect(study.path).runs["state_bytes"].isna().all()
    found = collect_and_load(study).runs["state_bytes"]
    assert found[0] == 4 * size.layers * 2 * size.positions * size.width and pd.isna(found[1])


def test_every_turn_of_looped_layers_and_each_layer_of_a_pattern_keeps_its_own(lab):
    spec = lab.spec(objective={"name": "ar"}, mechanism={"name": "mix", "pattern": ["sw", "sa"], "sw": {"window": 3}})
    size = spec.model.model_copy(update={"layers": 2, "loops": 3})
    found = sequence_state_bytes(spec.model_copy(update={"model": size}), "causal")
    assert found == 4 * 3 * 2 * size.width * (3 + size.positions)


def test_rms_of_u_is_in_the_study_s_table_and_missing_where_a_file_is_older(lab):
    spec = lab.spec()
    run = lab.train(spec)
    asked = CurvatureSpec(state=("checkpoint",), warmup_steps=0, recorded_steps=2, parity_steps=0)
    for _ in measure(run, asked, cache_dir=lab.cache, device="cpu"):
        pass
    study = StudyFolder.of(lab.pool, "costs")
    study.write([run.run_id])
    found = collect(study.path)
    assert (found.curvature["rms_u"] > 0.01).all() and (found.curvature["rms_u"] < 3).all(), "Adam's u is about ±1"
    row = found.runs.iloc[0]
    assert row["step_s"] > 0 and row["optimizer_state_bytes"] > 8 * row["num_params"]
    file = run.curvature_file("terminal")
    older = pd.read_parquet(file).drop(columns="rms_u")
    from stability.runs.parquet import read_metadata, write_parquet

    told = {key: value for key, value in read_metadata(file).items() if key != "pandas"}
    write_parquet(older, file, told)
    again = collect(study.path).curvature
    assert again["rms_u"].isna().all()
    pd.testing.assert_frame_equal(again.drop(columns="rms_u"), found.curvature.drop(columns="rms_u"))
    assert not list(measure(run, asked, cache_dir=lab.cache, device="cpu")), "it is not measured again for the column"
