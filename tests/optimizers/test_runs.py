"""A whole small run with every optimizer: it trains, it resumes bit for bit, and α_max is measured of it."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from stability.config.curvature import CurvatureSpec
from stability.probes.curvature.alpha_max import measure
from stability.registry import Registry
from stability.training import checkpoint

NAMES = Registry("optimizers").names()
SMALL = {"name": "small", "layers": 1, "width": 8, "heads": 2, "positions": 8}
SHORT = CurvatureSpec(warmup_batches=2, warmup_steps=1, recorded_steps=2)


def small(lab, name):
    """A run of four steps at the optimizer's own rate."""
    return lab.spec(
        model=SMALL,
        steps=4,
        batch=2,
        evaluation={"every_steps": 2, "sequences": 2},
        optimizer={"name": name},
        lr_peak=Registry("optimizers").load(name).lr_reference,
    )


def weights(directory):
    return checkpoint.load(directory.checkpoints()[-1])[1].state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumes_bit_for_bit_and_its_alpha_max_is_measured(lab, name):
    spec = small(lab, name)
    straight = lab.train(spec)
    whole, reached = straight.metrics_file.read_bytes(), weights(straight)
    assert whole.count(b"\n") == 5
    straight.path.rename(lab.pool / "aside")

    resumed = lab.train(spec, steps=2)
    assert resumed.status()["state"] == "interrupted"
    lab.train(spec)
    assert resumed.metrics_file.read_bytes() == whole
    assert all(map(torch.equal, reached.values(), weights(resumed).values()))

    for _ in measure(resumed, SHORT, cache_dir=lab.cache, device="cpu"):
        pass
    rows = pd.read_parquet(resumed.curvature_file("terminal")).query("state == 'checkpoint'")
    assert len(rows) == SHORT.recorded_steps
    assert set(rows.method) <= {"taylor", "double_backward"}, rows.note.tolist()
    assert rows.slope.notna().all() and rows.curvature.notna().all() and (rows.slope != 0).all()
