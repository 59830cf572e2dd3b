"""The stable window against closed forms: curves that are straight lines in log10 LR, whose edges can be solved by
hand."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis.numbers.windows import median_line, outcomes, tabulate, window, windows
from analysis.study.load import load
from tests.analysis.synthetic import write_study

LRS = (1e-4, 1e-3, 1e-2, 1e-1)


def vee(lr, slope=0.1, best=2.0, at=1e-2):
    """``best`` at ``at``, rising by ``slope`` per decade on both sides."""
    return best + slope * abs(math.log10(lr / at))


def test_edges_of_a_straight_vee_are_where_it_crosses_five_percent():
    # 2.0 + 0.2·d = 2.1 at half a decade on either side.
    found = window(LRS, [vee(lr, slope=0.2) for lr in LRS])
    assert (found.low.lr, found.high.lr) == pytest.approx((10**-2.5, 10**-1.5))
    assert found.width == found.width_max == found.width_max_in_grid == pytest.approx(1.0)
    assert (found.low.kind, found.high.kind) == ("interpolated", "interpolated") and (
        found.best_lr,
        found.best_nll,
    ) == (1e-2, 2.0)
    assert not found.open_low and not found.open_high and not found.fills_grid


def test_tolerance_scales_the_width():
    assert window(LRS, [vee(lr, slope=0.2) for lr in LRS], tolerance=0.02).width == pytest.approx(0.4)


def test_interpolation_is_between_neighbours_of_the_edge_only():
    # Inside at 1e-3 (2.05), outside at 1e-4 (3.05): the crossing of 2.1 lies 0.05 of the way.
    found = window(LRS, [3.05, 2.05, 2.0, 2.2])
    assert math.log10(found.low.lr) == pytest.approx(-3.05) and math.log10(found.high.lr) == pytest.approx(-1.5)


def test_order_of_the_rates_does_not_matter():
    shuffled = [2, 0, 3, 1]
    assert window([LRS[i] for i in shuffled], [vee(LRS[i], 0.2) for i in shuffled]) == window(
        LRS, [vee(lr, 0.2) for lr in LRS]
    )


def test_a_window_that_reaches_the_grids_end_is_open_and_a_lower_bound():
    found = window(LRS, [2.3, 2.1, 2.0, 2.05])
    assert found.open_high and not found.open_low and found.high.lr == 1e-1 and found.high.kind == "open"
    assert math.isinf(found.width_max) and found.width_max_in_grid == pytest.approx(found.width) == pytest.approx(2.0)


def test_a_window_over_the_whole_grid_fills_it():
    assert window(LRS, [2.0] * 4).fills_grid


def test_next_to_a_divergence_the_edge_is_the_last_rate_inside_and_the_width_is_bounded():
    found = window(LRS, [2.3, 2.1, 2.0, math.inf])
    assert found.high.kind == "diverged" and (found.high.lr, found.high.furthest_lr) == (1e-2, 1e-1)
    assert (found.width, found.width_max, found.width_max_in_grid) == pytest.approx(
        (1.0, 2.0, 2.0)
    ) and not found.open_high


def test_next_to_a_missing_result_the_edge_is_open_but_not_the_grids_end():
    found = window(LRS, [2.3, 2.1, 2.0, math.nan])
    assert found.high.kind == "unmeasured" and found.open_high and not found.fills_grid and math.isinf(found.width_max)
    assert found.width_max_in_grid == pytest.approx(2.0)


def test_the_region_is_contiguous_around_the_best():
    # 1e-4 is within 5 % again, behind a rate that is not.
    found = window(LRS, [2.0, 2.5, 1.99, 2.5])
    assert found.low.lr > 1e-3


def test_a_rate_exactly_at_the_threshold_is_inside():
    assert window([1e-3, 1e-2], [2.1, 2.0]).low.kind == "open"


def test_a_lone_good_rate_between_divergences_has_width_zero_and_a_bound():
    found = window(LRS[:3], [math.inf, 2.0, math.inf])
    assert found.width == 0 and found.width_max == pytest.approx(2.0)


@pytest.mark.parametrize("nlls", [[math.inf] * 4, [math.nan] * 4, [-math.inf] * 4])
def test_no_finite_run_no_window(nlls):
    assert window(LRS, nlls) is None


def test_a_single_rate_is_open_on_both_sides():
    found = window([1e-3], [2.0])
    assert found.width == 0 and found.fills_grid


def test_a_negative_nll_has_a_window_above_it():
    found = window(LRS, [-1.0, -1.9, -2.0, -1.0])
    assert found.threshold_nll == pytest.approx(-1.9) and found.low.lr == pytest.approx(1e-3)


def test_outcomes_are_infinite_for_divergence_and_missing_for_crashes_and_pending_runs(tmp_path):
    statuses = {
        ("sa", 1e-4, 0): ("diverged", ""), ("sa", 1e-3, 0): ("failed", ""), ("sa", 1e-2, 0): ("queued", ""), ("sa", 1e-1, 0): ("running", ""),
        ("sa", 1e-4, 1): ("spiked", ""), ("sa", 1e-3, 1): ("plateaued", ""),
    }  # fmt: skip
    table = outcomes(
        load(write_study(tmp_path, mechanisms=["sa"], lrs=LRS, nll=lambda *_: 2.0, statuses=statuses)), "sa"
    )
    assert table[0].tolist()[0] == math.inf and np.isnan(table[0].tolist()[1:]).all() and table[1].tolist() == [2.0] * 4


def test_median_line_counts_a_divergence_as_infinite(tmp_path):
    def nll(_, lr, seed):
        return math.inf if lr == 1e-1 and seed == 0 or lr == 1e-2 and seed < 2 else 2.0 + seed

    line = median_line(outcomes(load(write_study(tmp_path, mechanisms=["sa"], lrs=LRS, seeds=3, nll=nll)), "sa"))
    assert line.tolist() == [3.0, 3.0, math.inf, 4.0]


def test_half_of_two_seeds_diverged_is_outside(tmp_path):
    study = load(
        write_study(
            tmp_path, mechanisms=["sa"], lrs=LRS, nll=lambda _, lr, seed: math.inf if lr == 1e-1 and seed == 0 else 2.0
        )
    )
    found = windows(study)["sa"]
    assert (
        found.median.high.kind == "diverged"
        and found.by_seed[1].open_high
        and found.seed_widths == pytest.approx((2.0, 3.0))
    )


def test_a_seed_that_only_diverged_keeps_its_none_and_one_without_results_is_left_out(tmp_path):
    statuses = {("sa", lr, 2): ("failed", "") for lr in LRS}
    nll = lambda _, lr, seed: math.inf if seed == 1 else 2.0  # noqa: E731
    found = windows(load(write_study(tmp_path, mechanisms=["sa"], lrs=LRS, seeds=3, nll=nll, statuses=statuses)))["sa"]
    assert set(found.by_seed) == {0, 1} and found.by_seed[1] is None


def test_a_window_ends_where_half_of_what_was_learned_is_lost_and_keeps_the_edges_beyond_to_be_drawn():
    # best 1.35, unigram 1.39: half of 0.04 is lost at 1.37, one decade away; 5 % reach to 1.4175, beyond the sweep
    nlls = [vee(lr, slope=0.02, best=1.35) for lr in LRS]
    found = window(LRS, nlls, unigram=1.39)
    assert found.is_capped and found.threshold_nll == pytest.approx(1.37)
    assert (found.low.lr, found.high.lr) == (1e-3, 1e-1) and found.low.kind == "interpolated"
    alone = window(LRS, nlls)
    assert not alone.is_capped and found.uncounted == (alone.low.lr, alone.high.lr) == (1e-4, 1e-1)


@pytest.mark.parametrize("unigram", [2.3, 2.0, 1.5, math.nan])
def test_no_window_of_a_model_far_below_the_token_frequency_nll_or_above_it_is_cut(unigram):
    nlls = [vee(lr, slope=0.2) for lr in LRS]
    found, alone = window(LRS, nlls, unigram=unigram), window(LRS, nlls)
    assert not found.is_capped and (found.low, found.high) == (alone.low, alone.high)


def test_windows_on_the_generative_nll_leave_out_what_was_not_scored_and_know_no_token_frequency_nll(tmp_path):
    study = load(
        write_study(
            tmp_path, mechanisms=("sa",), lrs=LRS, seeds=1, nll=lambda m, lr, seed: math.inf if lr == 1e-1 else 3.19
        )
    )
    study.runs["gen_nll"] = [math.nan, 5.0, 4.0, math.nan]
    assert outcomes(study, "sa", "gen_nll")[0].tolist()[:3] == pytest.approx([math.nan, 5.0, 4.0], nan_ok=True)
    found = windows(study, column="gen_nll")["sa"].median
    assert (found.best_nll, found.threshold_nll, found.high.kind, found.low.kind) == (
        4.0,
        pytest.approx(4.2),
        "diverged",
        "interpolated",
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 40])  # of 12 cells: none twice, or nearly all
@pytest.mark.parametrize("of_several", ["median", "first"])
def test_the_table_of_rates_and_seeds_is_that_of_pandas(rows, of_several):
    draws = np.random.default_rng(rows)
    cells = draws.permutation(12)[:rows] if rows <= 12 else draws.integers(12, size=rows)
    runs = pd.DataFrame(
        {"lr": np.array([0.1, 1e-3, 1e-2])[cells % 3], "seed": 7 - cells // 3}, index=np.arange(rows) + 5
    )
    values = pd.Series(draws.choice([math.nan, math.inf, 1.5, 2.5, 4.0], rows), index=runs.index)
    pivoted = runs.assign(value=values).pivot_table(
        index="lr", columns="seed", values="value", aggfunc=of_several, dropna=False
    )
    if rows:
        pd.testing.assert_frame_equal(tabulate(runs, values, of_several), pivoted.sort_index(), check_exact=True)
    else:
        assert tabulate(runs, values, of_several).empty
