"""LR sensitivity against sums written out, and what counts as evidence."""

import math

import pytest

from analysis.sections.nll import sensitivity, sensitivity_table
from analysis.study.load import load
from tests.analysis.synthetic import INIT, write_study

NLLS = {1e-4: 3.5, 1e-3: 3.0, 1e-2: 4.0, 1e-1: math.inf}


def study_of(tmp_path, nll=lambda m, lr, seed: NLLS[lr], **kwargs):
    options = {"mechanisms": ["sa"], "lrs": list(NLLS), "seeds": 1} | kwargs
    return load(write_study(tmp_path, nll=nll, **options))


def test_it_is_the_mean_excess_over_the_best_with_divergence_as_the_initial_nll(tmp_path):
    found = sensitivity(study_of(tmp_path), "sa")
    assert found.by_seed == {0: pytest.approx((0.5 + 0.0 + 1.0 + (INIT - 3.0)) / 4)}
    assert found.num_rates == 4
    assert found.spread.n == 1


def test_a_run_worse_than_its_initialisation_counts_as_it(tmp_path):
    found = sensitivity(study_of(tmp_path, nll=lambda m, lr, seed: 9.0 if lr == 1e-1 else 3.0), "sa")
    assert found.by_seed[0] == pytest.approx((INIT - 3.0) / 4)


def test_seeds_are_taken_one_by_one(tmp_path):
    found = sensitivity(study_of(tmp_path, nll=lambda m, lr, seed: 3.0 + seed * (lr > 5e-3), seeds=2), "sa")
    assert found.by_seed == {0: 0.0, 1: pytest.approx(0.5)}
    assert (found.spread.median, found.spread.low, found.spread.high) == (0.25, 0.0, 0.5)


def test_the_interval_holds_no_loss_beyond_what_is_possible(tmp_path):
    """Two seeds diverge at the top rate, where the third finishes: in no seed can the mean excess pass (INIT −
    best)·2/3."""
    tops = [math.inf, math.inf, 2.916]
    study = study_of(
        tmp_path, nll=lambda m, lr, seed: {1e-3: 2.85, 1e-2: 2.81}.get(lr, tops[seed]), lrs=[1e-3, 1e-2, 1e-1], seeds=3
    )
    spread, possible = sensitivity(study, "sa").spread, (INIT - 2.81) * 2 / 3
    assert (spread.low, spread.high) == (
        pytest.approx((0.04 + 0.106) / 3),
        pytest.approx((0.04 + INIT - 2.81) / 3),
    ) and spread.high < possible
    assert "the smallest and largest of them" in sensitivity_table(study).caption


def test_a_failed_run_is_no_evidence(tmp_path):
    found = sensitivity(study_of(tmp_path, statuses={("sa", 1e-1, 0): ("failed", "out of memory")}), "sa")
    assert found.by_seed[0] == pytest.approx(0.5)
    assert found.num_rates == 3


def test_the_difference_from_the_reference_is_paired_over_seeds(tmp_path):
    """sa's exceed sc's by 0.1, 0.2 and 0.3 nats over two rates: 0.2 on average, ± 4.303 · 0.1/√3."""
    study = study_of(
        tmp_path,
        nll=lambda m, lr, seed: 3.0 + (0.2 * (seed + 1) + seed if m == "sc" else seed) * (lr > 5e-3),
        mechanisms=["sa", "sc"],
        lrs=[1e-3, 1e-2],
        seeds=3,
    )
    cell = sensitivity_table(study).rows[1][2]
    assert (cell.text, cell.detail) == ("+0.200", "-0.048 to +0.448")


def test_the_table_marks_the_lowest_and_is_left_out_for_a_single_rate(tmp_path):
    study = study_of(tmp_path, nll=lambda m, lr, seed: NLLS[lr] if m == "sa" else 3.0, mechanisms=["sa", "sc"])
    table = sensitivity_table(study)
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["sa", "1.025", "", "4"],
        ["sc", "0.000", "-1.025", "4"],
    ]
    assert [row[1].bold for row in table.rows] == [False, True]
    assert sensitivity_table(study_of(tmp_path / "one", lrs=[1e-3])) is None
