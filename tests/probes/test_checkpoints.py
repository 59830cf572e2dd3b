"""A checkpoint is read once for all that is measured of it, and no measurement sees what another did to it."""

from __future__ import annotations

import shutil
from collections import Counter

import pandas as pd

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.alpha_max import measure
from stability.runs.directory import RunDirectory
from stability.training import checkpoint

EVERYTHING = CurvatureSpec(
    phase="all", warmup_batches=2, warmup_steps=1, recorded_steps=2, measure=("alpha_max", "profile", "blocks")
)


def run(directory, lab, curvature):
    for _ in measure(directory, curvature, cache_dir=lab.cache, device="cpu"):
        pass


def test_each_file_of_a_checkpoint_is_hashed_once_for_two_states_and_their_tables(lab, monkeypatch):
    directory, hashed, own = lab.train(lab.spec(checkpoint={"every_steps": 5})), Counter(), checkpoint.sha256_of
    monkeypatch.setattr(checkpoint, "sha256_of", lambda path: (hashed.update([path]), own(path))[1])
    run(directory, lab, EVERYTHING)
    measured = [directory.checkpoints()[0], directory.checkpoints()[-1]]
    assert measured[0] != measured[1]
    assert hashed == {folder / name: 1 for folder in measured for name in (checkpoint.MODEL, checkpoint.TRAINER)}


def test_a_state_gives_the_same_bits_after_others_as_alone(lab, tmp_path):
    """Steps move parameters and the optimizer's averages: each measurement starts from the checkpoint's own."""
    directory = lab.train(lab.spec(lr_peak=3e-3))
    alone = RunDirectory(tmp_path / "alone", directory.run_id)
    shutil.copytree(directory.path, alone.path)
    run(directory, lab, EVERYTHING.model_copy(update={"state": ("checkpoint", "paper"), "phase": "terminal"}))
    for name, what in (("terminal", "alpha_max"), ("terminal_blocks", "blocks")):
        for state in ("checkpoint", "paper"):
            shutil.rmtree(alone.path / "curvature", ignore_errors=True)
            changes = {"state": (state,), "phase": "terminal", "measure": (what,)}
            run(alone, lab, EVERYTHING.model_copy(update=changes))
            together = pd.read_parquet(directory.curvature_file(name)).query("state == @state").reset_index(drop=True)
            pd.testing.assert_frame_equal(together, pd.read_parquet(alone.curvature_file(name)), check_exact=True)
