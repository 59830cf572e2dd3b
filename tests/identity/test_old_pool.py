"""A pool that the code of commit 2428c84 left is upgraded once, and then recognised whole.

``old/pool`` was made by that code with the command that its ``study.json`` holds, from ``old/page.txt`` beside it;
afterwards the prepared data and the record of what was printed were taken away, and the machine's names and sizes in
the JSON files replaced by made-up ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from stability import status, sweep
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.runs import directory
from stability.runs.directory import write_json
from stability.runs.lock import RunLock
from stability.runs.results import collect
from stability.training.checkpoint import load

OLD = Path(__file__).parent / "old"
STATES = {("sa", 1e-3): "plateaued", ("sa", 1e30): "diverged", ("sc", 1e-3): "plateaued", ("sc", 1e30): "diverged"}


@pytest.fixture
def older(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(OLD / "page.txt", tmp_path)
    return Path(shutil.copytree(OLD / "pool", tmp_path / "runs"))


@pytest.fixture
def pool(older, capsys):
    assert status.main(["upgrade=true"]) == 0
    assert capsys.readouterr().out == f"upgraded 4 runs and 1 study in {older}\n"
    return older


def command(pool: Path) -> list[str]:
    """What made the pool, with the defaults of the time: masked models of a text, sc's reading, and the slope: state
    "paper" has the clipped gradient's since then."""
    return [
        *json.loads((pool / "studies" / "old" / "study.json").read_text())["command"].split()[3:],
        "objective=mlm",
        "mechanism.sc.rope=absolute",
        "curvature.gradient='true'",
    ]


def files_of_runs(pool: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(pool)): path.read_bytes()
        for path in sorted(pool.glob("????????????/**/*"))
        if path.is_file()
    }


def test_the_same_command_trains_nothing_and_collects_what_the_old_code_collected(pool, capsys):
    words, before = command(pool), files_of_runs(pool)
    stored = pd.read_parquet(pool / "studies" / "old" / "results" / "runs.parquet")
    assert sweep.main([*words, "dry_run=true"]) == 0
    assert "4 runs (4 of them finished)" in capsys.readouterr().out
    assert sweep.main(words) == 0
    assert "skips 4 finished runs, trains none" in capsys.readouterr().out
    assert files_of_runs(pool) == before
    results = collect(pool / "studies" / "old")
    assert (
        dict(zip(zip(results.runs.mechanism, results.runs.lr, strict=True), results.runs.status, strict=True)) == STATES
    )
    assert list(results.runs.run_id) == list(stored.run_id)
    assert list(results.runs.val_nll.dropna()) == list(stored.val_nll.dropna())
    measured = pd.read_parquet(OLD / "pool" / "studies" / "old" / "results" / "curvature.parquet")
    assert len(measured) == 8
    assert list(results.curvature.alpha_max.dropna()) == list(measured.alpha_max)


def test_todays_protocol_trains_nothing_either_and_measures_only_the_state_whose_slope_it_takes_from_another_gradient(
    pool, capsys
):
    trained = {name: content for name, content in files_of_runs(pool).items() if "curvature" not in name}
    measured = pd.read_parquet(OLD / "pool" / "studies" / "old" / "results" / "curvature.parquet")
    assert sweep.main(command(pool)[:-1]) == 0
    assert "trains" not in capsys.readouterr().out.splitlines()[0]
    assert {name: content for name, content in files_of_runs(pool).items() if "curvature" not in name} == trained
    now = collect(pool / "studies" / "old").curvature
    own, before = (frame[frame["state"] == "checkpoint"].sort_values(["run_id", "step"]) for frame in (now, measured))
    assert list(own["alpha_max"]) == list(before["alpha_max"]) and set(own["gradient"]) == {"true"}
    assert set(now.loc[now["state"] == "paper", "gradient"]) == {"clipped"}


def test_so_does_the_same_command_after_its_text_has_been_moved(pool, capsys):
    (pool.parent / "else where").mkdir()
    (pool.parent / "page.txt").rename(pool.parent / "else where" / "another, name (2).txt")
    words = [word for word in command(pool) if not word.startswith("data.path=")]
    assert sweep.main([*words, f"data.path={pool.parent}/else where/another, name (2).txt"]) == 0
    assert "skips 4 finished runs, trains none" in capsys.readouterr().out


def test_a_checkpoint_says_which_run_it_belongs_to(pool):
    folders = sorted(pool.glob("*/checkpoints/step_*"))
    assert len(folders) == 2
    for folder in folders:
        run = folder.parent.parent
        assert run_id(parse_run(json.loads((run / "spec.json").read_text()))) == run.name
        assert run_id(parse_run(json.loads((folder / "manifest.json").read_text())["spec"])) == run.name
        assert run_id(load(folder)[0]) == run.name


def all_files(pool: Path) -> dict[str, bytes]:
    return {str(path.relative_to(pool)): path.read_bytes() for path in sorted(pool.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("entry", "words", "file"),
    [
        ("sweep", None, "studies/old/study.json"),
        ("sweep", ["name=another"], "spec.json"),
        ("hessian", ["ckpt=runs/studies/old"], "studies/old/study.json"),
        ("hessian", ["ckpt=runs/a8ab22da681c"], "a8ab22da681c/spec.json"),
        ("probe", ["what=spectra", "ckpt=runs/studies/old"], "studies/old/study.json"),
        ("generate", ["num=1", "ckpt=runs/studies/old"], "studies/old/study.json"),
        ("report", ["name=old"], "studies/old/study.json"),
        ("status", ["old"], "studies/old/study.json"),
        ("status", [], "studies/old/study.json"),
    ],
)
def test_what_meets_an_older_file_says_how_to_upgrade_it_and_changes_nothing(older, entered, entry, words, file):
    before = {name: content for name, content in all_files(older).items() if not name.startswith("cache/")}
    if entry == "sweep":
        words = [word for word in command(older) if not word.startswith("name=")] + (words or ["name=old"])
    out = entered(f"stability.{entry}", *words)
    assert out.returncode == 2
    assert re.fullmatch(
        f"error: {older}/.*{file} was written by an older version; run python -m stability.status upgrade=true, with "
        "runs_dir=… if the runs are not in runs\n",
        out.stderr,
    )
    assert {name: content for name, content in all_files(older).items() if not name.startswith("cache/")} == before


def test_an_upgrade_changes_no_id_and_nothing_that_was_measured_and_finds_nothing_to_do_again(older, pool, capsys):
    new, old = all_files(pool), all_files(OLD / "pool")
    specs = {f"{folder}/spec.json" for folder in ("4720880e2260", "767f654ac807", "a8ab22da681c", "c8ed031a0ab1")}
    study = {f"studies/old/{name}" for name in ("study.json", "results/runs.parquet", "results/curvature.parquet")}
    assert {name for name in new if new[name] != old.get(name)} == specs | study and new.keys() == old.keys()
    for name in specs:
        assert run_id(parse_run(json.loads(new[name]))) == name.partition("/")[0]
    for name in ("runs", "curvature"):
        before, now = (
            pd.read_parquet(folder / "studies" / "old" / "results" / f"{name}.parquet")
            for folder in (OLD / "pool", pool)
        )
        pd.testing.assert_frame_equal(now[before.columns], before)
        assert now.drop(columns=before.columns).isna().all(axis=None)
    assert status.main(["upgrade=true"]) == 0
    assert capsys.readouterr().out == f"nothing to upgrade in {pool}\n"
    assert all_files(pool) == new


@pytest.mark.parametrize("step", range(11))
def test_an_upgrade_that_was_cut_off_is_finished_by_the_same_command(older, step, monkeypatch):
    """Killed before each of its renames: four claims and specs, two tables, the record."""
    written, own = [], os.replace

    def replace(*places):
        if len(written) == step:
            raise KeyboardInterrupt
        written.append(places)
        own(*places)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(directory.Path, "replace", lambda path, target: replace(path, target))
        status.main(["upgrade=true"])
    assert status.main(["upgrade=true"]) == 0
    cut = {name: content for name, content in all_files(older).items() if not name.endswith(".tmp")}
    shutil.rmtree(older)
    shutil.copytree(OLD / "pool", older)
    assert status.main(["upgrade=true"]) == 0
    assert cut == all_files(older)


def test_a_run_that_somebody_works_on_is_left_with_its_study(older, capsys):
    with_lock = RunLock(older / "a8ab22da681c")
    assert with_lock.acquire()
    try:
        assert status.main(["upgrade=true"]) == 0
        left = capsys.readouterr().out.splitlines()
    finally:
        with_lock.release()
    assert [line.partition(":")[0] for line in left] == [
        "left a8ab22da681c",
        "left study old",
        f"upgraded 3 runs and 0 studies in {older}",
    ]
    assert status.main(["upgrade=true"]) == 0
    assert capsys.readouterr().out == f"upgraded 1 run and 1 study in {older}\n"


def test_a_damaged_file_is_named_and_the_others_are_upgraded(older, capsys):
    (older / "a8ab22da681c" / "spec.json").write_text("{")
    assert status.main(["upgrade=true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"left {older}/a8ab22da681c/spec.json is damaged (") and "upgraded 3 runs and 1 study" in out


def test_an_older_record_that_is_damaged_is_called_so(older, capsys):
    file = older / "studies" / "old" / "study.json"
    write_json(file, json.loads(file.read_text()) | {"words": {"share": {"column": "x"}}})
    write_json(older / "a8ab22da681c" / "spec.json", {"norm": "layernorm"})
    assert status.main(["upgrade=true"]) == 0
    out = capsys.readouterr().out
    assert f"left {file} is damaged (words.share.name" in out
    assert (
        f"left {older}/a8ab22da681c/spec.json is damaged (mechanism" in out and "upgraded 3 runs and 0 studies" in out
    )


def test_the_rungs_of_an_older_halving_are_those_at_which_its_runs_were_stopped(older):
    file = older / "studies" / "old" / "study.json"
    record = json.loads(file.read_text())
    record["spec"] |= {"halving": {"reduction": 3, "first_step": None}, "steps": 500}
    record["spec"]["evaluation"]["every_steps"] = 100
    file.write_text(json.dumps(record))
    assert status.main(["upgrade=true"]) == 0
    found = json.loads(file.read_text())
    assert found["rungs"] == [100, 200]
    asked = {"name": "asha", "reduction": 3, "first_step": None, "synchronous": True}
    assert found["spec"]["search"] == asked and "halving" not in found["spec"]
