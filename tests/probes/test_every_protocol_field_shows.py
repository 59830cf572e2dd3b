"""Every field of the protocol of α_max changes what a measurement leaves of one trained run; those of `SpectraSpec` are
shown in tests/probes/test_spectra_of_loss.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature import alpha_max
from stability.runs.directory import RunDirectory
from tests.conftest import Lab

SHORT: dict[str, Any] = {"warmup_batches": 1, "warmup_steps": 0, "recorded_steps": 1, "parity_steps": 0}
OTHERS: dict[str, Any] = {
    "phase": "earliest",
    "state": ("checkpoint",),
    "batch": 3,
    "microbatch": 1,
    "gradient": "clipped",
    "weight_decay": False,
    "clip_norm": 0.05,
    "warmup_batches": 2,
    "warmup_steps": 1,
    "recorded_steps": 2,
    "parity_steps": 1,
    "method": "finite_difference",
    "precision": "run",
    "seed": 1,
    "measure": ("alpha_max", "critical_lr"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Lab, Path]:
    """A run in bfloat16 with two checkpoints, whose gradients are clipped and whose weights decay."""
    lab = Lab(tmp_path_factory.mktemp("protocol"))
    decayed = {"name": "adamw", "weight_decay": 1.0}
    return lab, lab.train(lab.spec(precision="bf16", optimizer=decayed, clip_norm=0.5, steps=8)).path


def left(trained: tuple[Lab, Path], folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the tables that a measurement leaves of the run, by the file."""
    lab, run = trained
    shutil.copytree(run, folder / run.name)
    directory = RunDirectory(folder, run.name)
    for _ in alpha_max.measure(directory, CurvatureSpec(**SHORT | changes), cache_dir=lab.cache, device="cpu"):
        pass
    return {
        file.name: pd.read_parquet(file).astype(object).where(lambda table: table.notna(), None).to_dict("list")
        for file in sorted((directory.path / "curvature").glob("*.parquet"))
    }


@pytest.fixture(scope="module")
def usual(trained, tmp_path_factory) -> dict[str, Any]:
    return left(trained, tmp_path_factory.mktemp("usual"))


def test_all_fields_are_looked_at():
    assert set(OTHERS) == set(CurvatureSpec.model_fields) - {"spectra"}


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_of_the_protocol_changes_what_is_measured(trained, usual, tmp_path, field):
    found = left(trained, tmp_path, **{field: OTHERS[field]})
    assert found != usual
    assert all(len(table["run_id"]) > 0 for table in found.values())


def test_the_same_protocol_again_measures_the_same(trained, usual, tmp_path):
    """Or the test above could not fail."""
    assert left(trained, tmp_path) == usual
