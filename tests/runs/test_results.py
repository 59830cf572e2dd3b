"""The fast reading of many run directories against a plain slow one, on a real pool with everything in it that a pool
may hold."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.alpha_max import measure
from stability.runs import parquet as tables
from stability.runs import run_files
from stability.runs.directory import read_json, read_jsonl
from stability.runs.parquet import TABLES_AT_ONCE, join_tables, read_curves, read_metadata
from stability.runs.results import collect, write
from stability.runs.schema import COLLECTED_CURVATURE_COLUMNS, CURVES_COLUMNS, GENERATION_COLUMNS, RUNS_COLUMNS
from stability.runs.study import StudyFolder

EQUAL = {"check_exact": True}
CURVATURE = CurvatureSpec(warmup_batches=2, warmup_steps=1, recorded_steps=3)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Five runs: measured under two protocols, one as an older version left it, one diverged, one cut off in the middle
    of a line, one of which nothing is there."""
    from tests.conftest import Lab

    lab = Lab(tmp_path_factory.mktemp("pool"))
    specs = [lab.spec(seed=seed) for seed in range(4)] + [lab.spec(lr_peak=1e12)]
    for spec, steps in zip(specs, (None, None, None, 7, None), strict=True):
        lab.train(spec, steps)
    directories = [lab.directory(spec) for spec in specs]
    for directory, curvature in zip(
        directories,
        (CURVATURE, CURVATURE.model_copy(update={"parity_steps": 0, "phase": "all"}), CURVATURE),
        strict=False,
    ):
        list(measure(directory, curvature, cache_dir=lab.cache, device="cpu"))
    old = directories[2].curvature_file("terminal")
    tables.write_parquet(
        pd.read_parquet(old).drop(columns=["critical_lr", "parity_curvature", "note", "checkpoint_step"]), old, {}
    )
    list(measure(directories[4], CURVATURE, cache_dir=lab.cache, device="cpu"))
    with open(directories[3].metrics_file, "a") as file:
        file.write('{"step": 8, "lo')
    scores = {
        "run_id": directories[0].run_id,
        "phase": "terminal",
        "sample": [0, 1, 2],
        "nll": [2.0, None, 3.5],
        "num_tokens": 7,
        "oracle": "hf:x",
    }
    tables.write_parquet(
        pd.DataFrame(scores).reindex(columns=GENERATION_COLUMNS), directories[0].generation_file("terminal"), {}
    )
    folder = StudyFolder.of(lab.pool, "mine")
    folder.write(
        [*(directory.run_id for directory in directories), "0" * 12], variants={directories[1].run_id: "window=4"}
    )
    return folder


def slow_curvature(directory):
    """Each file by pandas, the protocol beside it from the file's metadata and the run's spec."""
    for path in sorted((directory.path / "curvature").glob("*.parquet")):
        frame, protocol = pd.read_parquet(path), read_metadata(path).get("protocol")
        if protocol is not None:
            values, spec = json.loads(protocol), read_json(directory.spec_file)
            protocol = json.dumps(
                values | {key: spec[key] for key in ("batch", "clip_norm") if values.get(key) is None}, sort_keys=True
            )
        if "checkpoint_step" not in frame:
            frame = frame.assign(checkpoint_step=12)
        if len(frame):
            yield frame.assign(protocol=protocol)


def slow_run(study, directory):
    status = directory.status()
    row = {
        "study": study.path.name,
        "run_id": directory.run_id,
        "status": status["state"],
        "reason": status.get("reason", ""),
    }
    steps = sorted(int(path.name[5:]) for path in (directory.path / "checkpoints").glob("step_*"))
    row |= {"last_checkpoint_step": steps[-1] if steps else None}
    row |= {"num_steps": status["step"], "variant": study.read()["variants"].get(directory.run_id, "")}
    if directory.spec_file.exists():
        spec = read_json(directory.spec_file)
        row |= {key: spec[key]["name"] for key in ("mechanism", "residual", "optimizer", "objective", "data", "model")}
        row |= {
            "norm": spec["norm"]["name"],
            "cross": "",
            "planned_steps": 12,
            "lr": spec["lr_peak"],
            "seed": spec["seed"],
            "data_fingerprint": spec["data_fingerprint"],
        }
    row |= {key: value for key, value in status.get("result", {}).items() if key in RUNS_COLUMNS}
    if directory.generation_file("terminal").exists():
        scores = pd.read_parquet(directory.generation_file("terminal"))
        row |= {"gen_nll": float(np.nanmean(scores["nll"])), "gen_oracle": scores["oracle"][0]}
    return row


def test_runs_curves_and_curvature_are_those_of_a_plain_slow_reading(study):
    found, directories = collect(study.path), study.runs()[:-1]
    assert found.left_out == (
        f"run {'0' * 12}: no spec.json in {study.pool / ('0' * 12)}; is this a folder that a sweep wrote?",
    )
    rows = [
        {"run_id": directory.run_id, **row} for directory in directories for row in read_jsonl(directory.metrics_file)
    ]
    pd.testing.assert_frame_equal(found.curves, pd.DataFrame(rows, columns=CURVES_COLUMNS), **EQUAL)
    frames = [frame for directory in directories for frame in slow_curvature(directory)]
    slow = pd.concat(frames, ignore_index=True).reindex(columns=COLLECTED_CURVATURE_COLUMNS)
    # text missing in one file makes pandas say object
    pd.testing.assert_frame_equal(found.curvature, slow, check_dtype=False, **EQUAL)
    assert set(found.curvature["phase"]) == {"earliest", "terminal"} and found.curvature["protocol"].nunique() == 2
    pd.testing.assert_frame_equal(
        found.runs, pd.DataFrame([slow_run(study, each) for each in directories], columns=RUNS_COLUMNS), **EQUAL
    )
    assert set(found.runs["status"]) >= {"interrupted", "diverged"}
    of_proteins = found.probes["generation"].drop(columns=GENERATION_COLUMNS)
    pd.testing.assert_frame_equal(
        found.probes["generation"][GENERATION_COLUMNS],
        pd.read_parquet(directories[0].generation_file("terminal")),
        **EQUAL,
    )
    assert of_proteins.isna().all(axis=None) and list(of_proteins.columns) == [
        "nll_sequence",
        "nll_structure",
        "contexts",
        "oracle_draws",
    ]


def test_logs_are_the_same_in_groups_of_any_size(study, monkeypatch):
    whole = collect(study.path).curves
    for num_bytes in (1, 2000):
        monkeypatch.setattr(tables, "GROUP_BYTES", num_bytes)
        pd.testing.assert_frame_equal(collect(study.path).curves, whole, **EQUAL)


def test_a_file_of_recorded_steps_is_read_once(study, monkeypatch):
    seen = []
    monkeypatch.setattr(run_files, "read_table", lambda path: seen.append(path) or tables.read_table(path))
    collect(study.path)
    steps = [path for path in seen if path.parent.name == "curvature"]
    assert len(steps) == len(set(steps)) == 5


def test_what_is_written_reads_back_the_same(study, tmp_path):
    found = collect(study.path)
    write(found, tmp_path)
    for name in ("runs", "curvature", "curves"):
        pd.testing.assert_frame_equal(
            pd.read_parquet(tmp_path / f"{name}.parquet"), getattr(found, name), check_dtype=False, **EQUAL
        )


@pytest.mark.parametrize("line", ['{"step": 1, "lo', '{"step": 1, "loss": "x"}', "", '{"step": 1.5, "loss": 2.0}'])
def test_a_damaged_line_names_its_file(tmp_path, line):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"step": 1, "loss": 2.0}\n')
    bad.write_text(f'{{"step": 0, "loss": null}}\n{line}\n{{"step": 2, "loss": 2.0}}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl.* is damaged"):
        read_curves([("a", good), ("b", bad)], ["step", "loss"])


def test_a_number_that_only_python_reads_is_read(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 0, "loss": NaN, "other": [1]}\n{"step": 1, "loss": 3}\n')
    assert read_curves([("a", log), ("b", tmp_path / "none")], ["step", "loss"]).fillna(-1).values.tolist() == [
        ["a", 0, -1.0],
        ["a", 1, 3.0],
    ]


def test_a_damaged_table_is_left_out_and_named(study, tmp_path):
    pool = shutil.copytree(study.pool, tmp_path / "pool")
    copied = StudyFolder.of(pool, "mine")
    path = copied.runs()[0].curvature_file("terminal")
    path.write_bytes(path.read_bytes()[:100])
    found = collect(copied.path)
    assert f"{path} is damaged" in found.left_out[1]
    assert copied.runs()[0].run_id not in set(found.curvature["run_id"]) and len(found.runs) == 5


def small_tables(number: int, live: list[int]) -> Iterator[pa.Table]:
    """Tables of one row; the last has a column of its own. ``live`` receives Arrow's bytes before each."""
    for place in range(number):
        live.append(pa.total_allocated_bytes())
        own = {"rate_found": [0.5]} if place == number - 1 else {}
        yield pa.table({"step": pa.array([place]), "slope": pa.array([None if place < 300 else 1.5]), **own})


def test_small_tables_are_joined_as_they_come_whatever_their_columns_and_types():
    number, live = 4 * TABLES_AT_ONCE, []
    frame = join_tables(small_tables(number, live), ["step", "slope", "rate_found", "absent"])
    assert list(frame["step"]) == list(range(number)) and list(frame["absent"].isna()) == [True] * number
    assert list(frame["slope"].isna()) == [place < 300 for place in range(number)]
    assert list(frame["rate_found"].dropna()) == [0.5]
    # as single tables they would take at least 64 bytes a column
    assert max(live) - live[0] < number * 2 * 64 * 0.6
