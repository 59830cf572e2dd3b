"""What of each run may predict, and what may be predicted: nothing of the outcome is in the first, nothing before the
horizon in the second."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis.numbers import early_measurements
from analysis.numbers.early_measurements import (
    BEFORE,
    DURING,
    JUDGED,
    NO_RESULT,
    TOO_SHORT,
    UNMEASURED,
    breaks,
    crossing,
    early_curves,
    early_runs,
    name_runs,
)
from stability.config.training import VerdictSpec
from stability.runs.schema import SEARCH_COLUMNS
from stability.runs.verdict import SpikeWatch
from tests.analysis.foretelling import LAST, K, run, study_of

PREDICTORS = ["alpha_max", "alpha_max_ratio", "critical_lr", "loss", "grad_norm", "loss_next", "grad_norm_next"]


@pytest.mark.parametrize(
    ("given", "fate"),
    [
        (run(1e-3, 1.0), JUDGED),
        (run(1e-3, 1.0, "plateaued"), JUDGED),
        (run(1e-1, None, "diverged", end=30), BEFORE),
        (run(1e-1, 1.0, "diverged", end=K), BEFORE),
        (run(1e-1, 1.0, "diverged", end=K + 11), DURING),
        (run(1e-1, 1.0, "diverged", end=K + 12), JUDGED),
        (run(1e-1, 1.0, "spiked", top=20), BEFORE),
        (run(1e-1, 1.0, "spiked", top=60), DURING),
        (run(1e-1, 1.0, "spiked", top=150), JUDGED),
        (run(1e-1, 1.0, "spiked"), BEFORE),  # nobody can tell when: it may have been before
        (run(1e-3, None), UNMEASURED),
        (run(1e-3, 1.0, end=K + 5), TOO_SHORT),
        (run(1e-3, None, "failed", end=100), NO_RESULT),
        (run(1e-3, None, "queued", end=0), NO_RESULT),
    ],
)
def test_what_became_of_a_run_by_the_horizon_says_whether_it_is_judged(given, fate):
    others = [run(1e-2, 1.0, seed=1)]  # says where k is
    assert early_runs(study_of([given, *others]))["fate"].iloc[0] == fate


def test_a_spike_that_began_before_the_horizon_is_not_judged_though_its_top_lies_after_it():
    calm = run(1e-2, 1.0, "spiked", top=150, loss=3.0)
    study = study_of([calm, {**calm, "seed": 1}])
    rising = (study.curves["run_id"] == "made_up1") & study.curves["step"].between(40, 150)
    study.curves.loc[rising, "loss"] = 5.0
    assert early_runs(study)["fate"].tolist() == [JUDGED, BEFORE]


@pytest.mark.parametrize(("from_step", "fate"), [(40, BEFORE), (55, DURING), (100, JUDGED)])
@pytest.mark.parametrize("status", ["plateaued", "diverged", "spiked"])
def test_a_loss_that_explodes_is_a_break_from_there_on_whatever_the_verdict(status, from_step, fate):
    """A run that exploded and stayed there is called plateaued; one that diverged had often exploded long before."""
    study = study_of([run(1e-2, 1.0, status, top=LAST), run(1e-2, 1.0, seed=1)])
    exploding = (study.curves["run_id"] == "made_up0") & (study.curves["step"] >= from_step)
    study.curves.loc[exploding, "loss"] = 1e9
    found = early_runs(study)
    assert (found["fate"].tolist(), found["broke"].tolist()) == ([fate, JUDGED], [True, False])


def test_a_run_that_ends_above_where_it_began_broke_though_its_losses_do_not_show_it_and_nobody_can_tell_when():
    found = early_runs(
        study_of([run(1e-2, 1.0, "plateaued", val_nll=nll, seed=seed) for seed, nll in ((0, 5.9), (1, 6.1))])
    )
    assert (found["broke"].tolist(), found["fate"].tolist()) == ([False, True], [JUDGED, BEFORE])


@pytest.mark.parametrize("scatter", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("height", [0.0, 0.3, 0.8, 1.2, 3.0, 9.0])
def test_a_plateaued_run_s_rise_is_a_spike_where_the_training_calls_it_one(scatter, height):
    """`SpikeWatch` shares no code: it follows a run step by step. A bump of 60 steps in a noisy loss."""
    steps = np.arange(1, LAST + 1)
    draws = np.random.default_rng(0).normal(0.0, scatter, LAST)
    losses = 3.0 + draws + height * ((steps > 100) & (steps <= 160))
    study = study_of([run(1e-2, 1.0, "plateaued", val_nll=3.3)])
    study.curves["loss"] = losses
    watch = SpikeWatch(VerdictSpec())
    for step, loss in zip(steps.tolist(), losses.tolist(), strict=True):
        watch.update(step, loss)
    assert breaks(study)["broke"].tolist() == [watch.spiked]


def test_nothing_that_happens_after_the_horizon_moves_a_predictor():
    calm = early_runs(study_of([run(1e-2, 0.5), run(1e-3, 2.0)]))
    wild = early_runs(study_of([run(1e-2, 0.5, "diverged", end=100, later=math.inf), run(1e-3, 2.0, "spiked", top=180,
                                                                                          later=9.0)]))  # fmt: skip
    assert wild[PREDICTORS].equals(calm[PREDICTORS])
    assert wild["broke"].tolist() == [True, True] and not calm["broke"].any()


def test_losses_are_medians_up_to_k_and_from_there_to_the_horizon():
    study = study_of([run(1e-2, 0.5)])
    steps = study.curves["step"]
    study.curves["loss"] = steps
    found = early_runs(study).iloc[0]
    assert (found["step"], found["horizon"]) == (K, K + 11)
    assert found["loss"] == 45.5  # of 41 … 50, as many steps as α_max was recorded at
    assert found["loss_next"] == 56.0  # of 51 … 61


@pytest.mark.parametrize(
    ("alphas", "median", "lost"),
    [
        ([1.0, 2.0, 3.0] + [math.inf] * 7, 2.0, 0),  # as α_max tables have it: of the finite ones
        ([math.inf] * 10, math.inf, 0),
        ([math.nan] * 10, 0.0, 10),
        ([math.inf] * 5 + [math.nan] * 5, math.inf, 5),
        ([4.0] + [math.nan] * 9, 4.0, 9),
    ],
)
def test_a_measurement_without_finite_values_ranks_and_is_counted(alphas, median, lost):
    found = early_runs(study_of([run(1e-2, alphas)])).iloc[0]
    assert (found["alpha_max"], found["alpha_max_ratio"], found["lost"]) == (median, median / 1e-2, lost)
    assert found["fate"] == JUDGED


def test_a_gradient_norm_that_is_not_finite_before_k_ranks_as_infinite_and_is_counted():
    """Guards can carry a run over such a step; it is dropped nowhere."""
    found = early_runs(study_of([run(1e-2, 1.0, grad_norm=math.inf), run(1e-2, 1.0, grad_norm=math.nan, seed=1)]))
    assert found["grad_norm"].tolist() == [math.inf, math.inf]
    assert found["nonfinite"].tolist() == [61, 61]
    assert found["fate"].tolist() == [JUDGED, JUDGED]


def test_every_run_has_exactly_one_fate():
    found = early_runs(study_of([run(1e-3, 1.0), run(1e-2, None, "diverged", end=9), run(1e-1, None, "queued", end=0)]))
    assert sum(early_measurements.fate_counts(found).values()) == 3


def test_a_run_that_two_studies_list_counts_once():
    shared = run(1e-3, 1.0, run_id="shared")
    found = early_measurements.join_early_runs([study_of([shared, run(1e-2, 1.0)], "one"), study_of([shared], "two")])
    assert found["run_id"].tolist() == ["shared", "one1"]


def test_runs_are_named_by_series_and_rate_with_their_number():
    found = early_runs(study_of([run(1e-3, 1.0, seed=seed) for seed in range(3)] + [run(1e-2, 1.0, mechanism="sc")]))
    assert name_runs(found) == "sa 1e-3 (3), sc 1e-2"
    assert name_runs(found, most=1) == "sa 1e-3 (3) and 1 more"


@pytest.mark.parametrize(
    ("limits", "rate", "is_bound"),
    [
        ([10.0, 0.1, 0.1], 1e-1, False),  # 10³ above at 1e-2, at the rate itself 1 at 1e-1
        ([1.0, 0.01, 0.01], 10 ** (-2 + 2 / 3), False),  # two decades above at 1e-2, one below at 1e-1
        ([math.inf, 0.01, 0.01], math.sqrt(1e-3), False),  # no limit at all, then below: the middle
        ([10.0, 10.0, 10.0], 1.0, True),  # never: the largest rate
        ([10.0, 10.0, math.nan], 1e-1, True),  # never, as far as it was measured
        ([1e-3, 10.0, 10.0], 1e-2, True),  # from the first one on: the smallest
        ([10.0, math.nan, 0.1], 10 ** (-2 + 2 * 3 / 4), False),
        ([math.nan] * 3, math.nan, False),
    ],
)
def test_where_the_limit_falls_below_the_rate_is_read_off_by_hand(limits, rate, is_bound):
    found = crossing([1e-2, 1e-1, 1.0], limits)
    assert found.lr == pytest.approx(rate, nan_ok=True) and found.is_bound == is_bound


def curve(nlls, alphas, seed=0, mechanism="sa"):
    lrs = [1e-3, 1e-2, 1e-1]
    return [
        run(lr, alpha, "stable" if math.isfinite(nll) else "diverged", val_nll=nll, seed=seed, mechanism=mechanism,
            end=LAST if math.isfinite(nll) else 120, loss=3.0 + abs(math.log10(lr / 1e-2)))
        for lr, nll, alpha in zip(lrs, nlls, alphas, strict=True)
    ]  # fmt: skip


def test_a_curve_has_its_best_rate_its_edge_and_what_was_known_at_step_k():
    found = early_curves(study_of(curve([2.55, 2.5, math.inf], [1.0, 0.1, 0.001]))).iloc[0]
    assert (found["best_lr"], found["edge_kind"]) == (1e-2, "diverged")
    assert found["edge"] == pytest.approx(math.sqrt(1e-2 * 1e-1))
    assert found["decade_below"] == pytest.approx(1e-2)
    assert (found["alpha_max"], found["loss_best"]) == (1.0, 1e-2)
    assert found["alpha_cross"] == pytest.approx(10 ** (-2 + 1 / 3))


@pytest.mark.parametrize(("ends", "rate"), [((200, 200, 61), 1e-2), ((200, 200, 62), 1e-1), ((30, 40, 50), 1e-3)])
def test_the_largest_rate_that_is_whole_at_the_horizon_is_known_without_any_measurement(ends, rate):
    runs = [
        run(lr, 1.0, "stable" if end == LAST else "diverged", end=end)
        for lr, end in zip((1e-3, 1e-2, 1e-1), ends, strict=True)
    ]
    assert early_curves(study_of(runs)).iloc[0]["unbroken"] == rate


def test_an_edge_beyond_the_grid_is_not_known():
    found = early_curves(study_of(curve([2.5, 2.5, 2.5], [1.0, 1.0, 1.0]))).iloc[0]
    assert math.isnan(found["edge"]) and found["edge_kind"] == "open" and math.isnan(found["decade_below"])


def test_a_curve_that_lacks_a_result_has_no_best_rate_and_one_at_its_end_is_a_bound():
    runs = curve([2.5, 2.55, 2.6], [1.0, 1.0, 1.0])
    assert early_curves(study_of(runs)).iloc[0][["best_lr", "is_bound"]].tolist() == [1e-3, True]
    runs[2] = run(1e-1, None, "failed", end=30)
    assert math.isnan(early_curves(study_of(runs)).iloc[0]["best_lr"])


def test_a_curve_all_of_whose_runs_diverged_has_neither():
    found = early_curves(study_of(curve([math.inf] * 3, [1.0] * 3))).iloc[0]
    assert math.isnan(found["best_lr"]) and math.isnan(found["edge"]) and found["edge_kind"] == "none"


def test_the_edge_that_a_search_found_stands_in_the_windows_place_and_its_own_rates_do_not_predict():
    """What `lr=edge` tries beside the common rates depends on how the others ended."""
    runs = curve([2.5, 2.5, math.inf], [1.0, 1.0, 1.0])
    others = curve([2.5, 2.5, 2.5], [1.0, 1.0, 1.0], mechanism="sc")
    tried = run(3e-2, 1e-9, val_nll=2.5)
    row = {"run_id": "made_up0", "verdict_lr": 3e-2, "verdict_next_lr": 5e-2, "nll_lr": 1e-2, "nll_next_lr": 2e-2}
    edges = pd.DataFrame([row], columns=SEARCH_COLUMNS["edges"])
    found = early_curves(study_of([*runs, tried, *others], searches={"edges": edges})).set_index("series")
    assert (
        found.loc["sa", "edge"] == pytest.approx(math.sqrt(3e-2 * 5e-2))
        and found.loc["sa", "edge_kind"] == "by verdict"
    )
    assert found.loc["sa", "alpha_cross"] == 1e-1, "at 3e-2 α_max lies far below the rate"
    assert found.loc["sc", "edge_kind"] == "open"
