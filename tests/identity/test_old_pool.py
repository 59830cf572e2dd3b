"""A pool that the code of commit 2428c84 left is recognised whole.

``old/pool`` was made by that code with the command that its ``study.json`` holds, from ``old/page.txt`` beside it;
afterwards the prepared data and the record of what was printed were taken away, and the machine's names and sizes in
the JSON files replaced by made-up ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from stability import sweep
from stability.config.identity import run_id
from stability.config.parse import parse_run
from stability.runs.results import collect
from stability.training.checkpoint import load

OLD = Path(__file__).parent / "old"
STATES = {("sa", 1e-3): "plateaued", ("sa", 1e30): "diverged", ("sc", 1e-3): "plateaued", ("sc", 1e30): "diverged"}


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(OLD / "page.txt", tmp_path)
    return Path(shutil.copytree(OLD / "pool", tmp_path / "runs"))


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
