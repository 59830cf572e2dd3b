"""The verdict on low-pass filtering, from made-up spectra whose 2ηλ_max is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.claims.judging import claims_table, judge
from analysis.numbers.spread import p_of_bounds
from analysis.study.load import load
from stability.runs import results
from tests.analysis.synthetic import write_study, write_table

LRS = (1e-3, 8e-3, 3e-2)
FACTORS = (1.0, 1.1, 1.2)  # by seed
MIDDLE = 1.32 ** (1 / 3)  # their geometric mean


def spectra(run, overshoot):
    """Heads of a consensus layer with 2ηλ_max = ``overshoot``·`FACTORS`, twice and once a hundred times that; and a
    softmax layer."""
    row = dict.fromkeys(results.PROBE_COLUMNS["spectra"]) | {
        "run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": 0, "mixer": "sc", "sequence": 0, "step_size": 0.1, "gain": 3.0,
        "variance_before": 2.0, "variance_after": 5.0,
    }  # fmt: skip
    factors = [overshoot * FACTORS[int(run.seed)]] * 2 + [100 * overshoot]
    heads = [row | {"head": head, "step_limit": 0.1 / factor} for head, factor in enumerate(factors)]
    return [*heads, row | {"layer": 1, "mixer": "sa", "head": 0, "step_size": None}]


def probed(tmp_path, overshoot, *, seeds=3):
    """A study of sa and sc whose spectra were probed at every rate; those beside the best rate are far off."""
    folder = write_study(tmp_path, mechanisms=["sa", "sc"], lrs=LRS, seeds=seeds)
    runs = [run for run in pd.read_parquet(folder / "results" / "runs.parquet").itertuples() if run.mechanism == "sc"]
    rows = [row for run in runs for row in spectra(run, overshoot if run.lr == 8e-3 else 1e6)]
    write_table(folder / "results" / "spectra.parquet", "spectra", rows)
    return load(folder)


@pytest.mark.parametrize(("overshoot", "verdict"), [(5.0, "contradicted"), (0.1, "holds"), (0.92, "undecided")])
def test_the_verdict_is_by_seed_at_the_best_rate(tmp_path, overshoot, verdict):
    study = probed(tmp_path, overshoot)
    (claim,) = [claim for claim in judge(study) if claim.subject == "low-pass sc"]
    assert (claim.verdict, claim.n) == (verdict, 3)
    assert "the trained graph step of sc has 2ηλ_max = " in claim.text
    assert claim.effect == f"2ηλ_max = {MIDDLE * overshoot:.2g}" and claim.effect in claim.text
    assert "Median over layers and heads, geometric mean over 3 seeds, at 8e-3; largest factor" in claim.text
    assert "largest factor of a frequency 3; the layer leaves 250 % of the variance" in claim.text
    # the interval of log(2ηλ_max) and its p-value agree, so that Holm's correction counts this claim, too
    logs = np.log(overshoot * np.array(FACTORS)).tolist()
    assert claim.p == pytest.approx(p_of_bounds(logs, logs)) and (claim.p < 0.05) == (verdict != "undecided")
    table = claims_table(study)
    assert table is not None and any("1/(2λ_max)" in row[0].text for row in table.rows)


def test_two_seeds_make_no_claim_and_no_probe_none_at_all(tmp_path):
    (claim,) = [claim for claim in judge(probed(tmp_path, 2.0, seeds=2)) if claim.subject == "low-pass sc"]
    assert claim.verdict == "no claim"
    bare = load(write_study(tmp_path, name="bare", mechanisms=["sa", "sc"], lrs=LRS, seeds=3))
    assert not any(claim.subject.startswith("low-pass") for claim in judge(bare))
