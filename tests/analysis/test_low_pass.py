"""The verdict on low-pass filtering, from made-up spectra whose 2ηλ_max is known."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.claims.judging import claims_table, judge
from analysis.study.load import load
from stability.runs import results
from tests.analysis.synthetic import write_study, write_table

LRS = (1e-3, 8e-3, 3e-2)
MIDDLE = 6 ** (1 / 3)  # geometric mean of the seeds' factors 1, 2 and 3


def spectra(run, overshoot):
    """Heads of a consensus layer with 2ηλ_max = ``overshoot``·(seed + 1), twice and once a hundred times that; and a
    softmax layer."""
    row = dict.fromkeys(results.PROBE_COLUMNS["spectra"]) | {
        "run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": 0, "mixer": "sc", "sequence": 0, "step_size": 0.1, "gain": 3.0,
        "variance_before": 2.0, "variance_after": 5.0,
    }  # fmt: skip
    factors = [overshoot * (run.seed + 1)] * 2 + [100 * overshoot]
    heads = [row | {"head": head, "step_limit": 0.1 / factor} for head, factor in enumerate(factors)]
    return [*heads, row | {"layer": 1, "mixer": "sa", "head": 0, "step_size": None}]


def probed(tmp_path, overshoot, *, seeds=3):
    """A study of sa and sc whose spectra were probed at every rate; those beside the best rate are far off."""
    folder = write_study(tmp_path, mechanisms=["sa", "sc"], lrs=LRS, seeds=seeds)
    runs = [run for run in pd.read_parquet(folder / "results" / "runs.parquet").itertuples() if run.mechanism == "sc"]
    rows = [row for run in runs for row in spectra(run, overshoot if run.lr == 8e-3 else 1e6)]
    write_table(folder / "results" / "spectra.parquet", "spectra", rows)
    return load(folder)


@pytest.mark.parametrize(
    ("overshoot", "verdict", "said"),
    [
        (5.0, "contradicted", "The trained graph step of sc is no low-pass filter: its step overshoots"),
        (0.1, "holds", "The trained graph step of sc is a low-pass filter"),
        (0.3, "undecided", "The trained graph step of sc may or may not be a low-pass filter"),
    ],
)
def test_the_verdict_is_by_seed_at_the_best_rate(tmp_path, overshoot, verdict, said):
    study = probed(tmp_path, overshoot)
    (claim,) = [claim for claim in judge(study) if claim.subject == "low-pass sc"]
    assert (claim.verdict, claim.n) == (verdict, 3) and claim.text.startswith(said)
    assert (
        f"2ηλ_max = {MIDDLE * overshoot:.2g}, median over layers and heads, geometric mean over 3 seeds, at 8e-3"
        in claim.text
    )
    assert "largest factor of a frequency 3; the layer leaves 250 % of the variance" in claim.text
    table = claims_table(study)
    assert table is not None and any("1/(2λ_max)" in row[0].text for row in table.rows)


def test_two_seeds_make_no_claim_and_no_probe_none_at_all(tmp_path):
    (claim,) = [claim for claim in judge(probed(tmp_path, 2.0, seeds=2)) if claim.subject == "low-pass sc"]
    assert claim.verdict == "no claim"
    bare = load(write_study(tmp_path, name="bare", mechanisms=["sa", "sc"], lrs=LRS, seeds=3))
    assert not any(claim.subject.startswith("low-pass") for claim in judge(bare))
