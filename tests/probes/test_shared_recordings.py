"""α_max's recorded operations are shared by the states, checkpoints and seeds of one kind of run, and by no other kind."""

from __future__ import annotations

import jaxtyping
import pandas as pd
import pytest

from stability.config.curvature import CurvatureSpec
from stability.curvature import recorded
from stability.probes.curvature import checkpoint_descent
from stability.probes.curvature.alpha_max import measure

ONE_STATE = CurvatureSpec(warmup_batches=2, warmup_steps=1, recorded_steps=4, state=("checkpoint",))
EVALUATIONS = 3  # gradient, Taylor terms, loss alone


@pytest.fixture
def tapes(monkeypatch):
    """Recordings made in a test; the tests' checks of shapes draw random numbers, which no recording may."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    checkpoint_descent._recordings_of.cache_clear()
    made, tape = [], recorded.Tape
    monkeypatch.setattr(recorded, "Tape", lambda *args: made.append(tape(*args)) or made[-1])
    yield made
    checkpoint_descent._recordings_of.cache_clear()


def rows(directory, lab, curvature=ONE_STATE, **changes):
    curvature = curvature.model_copy(update=changes)
    for _ in measure(directory, curvature, cache_dir=lab.cache, device="cpu"):
        pass
    return pd.read_parquet(directory.curvature_file("terminal"))


def test_one_recording_serves_all_states_checkpoints_and_seeds_of_a_kind_with_the_same_bits(lab, tapes):
    first, other = (lab.train(lab.spec(lr_peak=lr, seed=seed)) for seed, lr in enumerate((3e-3, 1e-2)))
    rows(first, lab, state=("paper", "checkpoint"), phase="all")
    assert len(tapes) == EVALUATIONS
    shared = rows(other, lab)
    assert len(tapes) == EVALUATIONS
    checkpoint_descent._recordings_of.cache_clear()
    other.curvature_file("terminal").unlink()
    pd.testing.assert_frame_equal(shared, rows(other, lab), check_exact=True)
    assert len(tapes) == 2 * EVALUATIONS


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": {"name": "sa", "softcap": 5.0}},
        {"objective": {"name": "mlm", "z_loss": 1e-2}},
        {"norm": "rmsnorm"},
    ],
)
def test_a_run_of_another_kind_is_recorded_anew(lab, tapes, changes):
    rows(lab.train(lab.spec()), lab)
    rows(lab.train(lab.spec(**changes)), lab)
    assert len(tapes) == 2 * EVALUATIONS


def test_another_precision_is_recorded_anew(lab, tapes):
    run = lab.train(lab.spec(precision="bf16"))
    for precision in ("run", "float32"):
        run.curvature_file("terminal").unlink(missing_ok=True)
        rows(run, lab, precision=precision)
    assert len(tapes) == 2 * EVALUATIONS
