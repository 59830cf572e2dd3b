"""Areas and rank correlations against scipy, against hands and against loops that draw row by row."""

import math
import tracemalloc

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, rankdata, spearmanr

from analysis.numbers.ranking import Draws, Estimate, auc, roc, shares_below, spearman


def made_up(seed=0, number=40, values=6):
    """Scores with many ties, an event that they foretell a little, and eight units."""
    draws = np.random.default_rng(seed)
    scores = draws.integers(0, values, number).astype(float)
    return scores, draws.random(number) < 0.2 + 0.08 * scores, draws.integers(0, 8, number)


def test_the_area_of_five_runs_is_what_a_hand_counts():
    """Of the six pairs of a run that breaks (3, 1) and one that does not (2, 1, 0): 3 wins three, 1 wins one and ties
    one."""
    found = auc([3, 1, 2, 1, 0], [True, True, False, False, False], Draws([0] * 5))
    assert found.value == pytest.approx((3 + 1 + 0.5) / 6)


@pytest.mark.parametrize("seed", range(4))
def test_the_area_is_mann_and_whitneys_u_over_the_pairs(seed):
    scores, events, units = made_up(seed)
    u = mannwhitneyu(scores[events], scores[~events]).statistic
    assert auc(scores, events, Draws(units)).value == pytest.approx(u / (events.sum() * (~events).sum()))


def test_within_strata_only_pairs_of_one_stratum_count():
    """At rate 1 the one that breaks is above both others, at rate 2 below the one other: 2 of 3 pairs."""
    scores, events, rates = [5, 1, 2, 0, 9], [True, False, False, True, False], [1, 1, 1, 2, 2]
    assert auc(scores, events, Draws(rates), rates).value == pytest.approx(2 / 3)


def test_infinite_scores_are_the_highest_and_tie_with_each_other():
    found = auc([math.inf, math.inf, 1e300], [True, False, False], Draws([0] * 3))
    assert found.value == pytest.approx((0.5 + 1) / 2)


def test_a_score_that_is_not_a_number_is_refused():
    with pytest.raises(AssertionError, match="leaves a run out"):
        auc([math.nan, 1], [True, False], Draws([0, 1]))


@pytest.mark.parametrize("stratified", [False, True])
def test_the_draws_of_an_area_are_those_of_a_loop_that_copies_rows(stratified):
    scores, events, units = made_up(1)
    strata = np.arange(len(scores)) % 3 if stratified else np.zeros(len(scores), int)
    draws = Draws(units, num=25)
    expected = []
    for drawn in draws.drawn:
        rows = [row for unit in drawn for row in np.flatnonzero(draws.codes == unit)]
        pairs = [(scores[i], scores[j]) for i in rows for j in rows
                 if events[i] and not events[j] and strata[i] == strata[j]]  # fmt: skip
        expected.append(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))
    found = auc(scores, events, draws, list(strata) if stratified else ())
    assert found.draws == pytest.approx(np.array(expected))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(expected, (0.025, 0.975))))


def test_an_interval_over_units_is_wider_than_one_over_their_rows_where_rows_of_a_unit_are_alike():
    """Six units of twenty equal runs are six runs, not a hundred and twenty."""
    scores = np.repeat([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 20)
    events = np.repeat([False, True, False, False, True, True], 20)
    units = auc(scores, events, Draws(np.repeat(range(6), 20)))
    rows = auc(scores, events, Draws(range(120)))
    assert units.high - units.low > 2 * (rows.high - rows.low)


def test_one_outcome_alone_has_no_area_and_two_units_have_no_interval():
    assert math.isnan(auc([1.0, 2.0, 3.0], [True] * 3, Draws([0, 1, 2])).value)
    found = auc([1.0, 2.0], [False, True], Draws([0, 1]))
    assert found.value == 1.0 and not found.has_interval


def test_where_a_tenth_of_the_draws_has_no_pair_there_is_no_interval():
    """One of three units holds all events: more than a quarter of the draws miss it."""
    found = auc([1.0, 2.0, 3.0], [False, False, True], Draws([0, 1, 2]))
    assert found.value == 1.0 and not found.has_interval


@pytest.mark.parametrize("seed", range(3))
def test_the_area_below_the_roc_curve_is_the_area(seed):
    scores, events, units = made_up(seed)
    false, true = roc(scores, events)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(true, false) == pytest.approx(auc(scores, events, Draws(units)).value)


@pytest.mark.parametrize("seed", range(3))
def test_the_area_below_the_mean_of_the_strata_s_curves_is_the_area_within_them(seed):
    """The third stratum holds runs of one kind only."""
    scores, events, units = made_up(seed)
    strata = np.arange(len(scores)) % 3
    events[strata == 2] = True
    false, true = roc(scores, events, strata)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1) and (np.diff(true) >= 0).all()
    assert np.trapezoid(true, false) == pytest.approx(auc(scores, events, Draws(units), strata).value)
    assert np.trapezoid(true, false) != pytest.approx(auc(scores, events, Draws(units)).value)


def test_without_runs_of_both_kinds_there_is_no_curve():
    assert [len(each) for each in roc([1.0, 2.0], [True, True])] == [0, 0]


def within(first, second, strata):
    """The correlation of ranks within strata, by scipy's ranks and numpy's sums; strata of one outcome are left out."""
    x, y = [], []
    for stratum in set(strata):
        own = np.flatnonzero(np.array(strata) == stratum)
        if len(set(second[own])) > 1:
            for values, found in ((first, x), (second, y)):
                ranked = rankdata(values[own]) / len(own)
                found.extend(ranked - ranked.mean())
    x, y = np.array(x), np.array(y)
    return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())


@pytest.mark.parametrize("seed", range(4))
def test_ranks_within_strata_are_correlated_as_a_loop_does_also_in_every_draw(seed):
    draws = np.random.default_rng(seed)
    strata = np.arange(24) % 3
    first = draws.integers(0, 5, 24).astype(float)
    second = first + draws.integers(0, 6, 24) + 100.0 * strata  # what differs between strata must not enter
    second[strata == 2] = 7.0
    units = Draws(draws.integers(0, 7, 24), num=5)
    found = spearman(first, second, units, strata)
    assert found.value == pytest.approx(within(first, second, strata))
    assert found.value != pytest.approx(spearmanr(first, second).statistic, abs=0.05)
    for drawn, value in zip(units.drawn, found.draws, strict=True):
        rows = np.array([row for unit in drawn for row in np.flatnonzero(units.codes == unit)])
        assert value == pytest.approx(within(first[rows], second[rows], strata[rows]))


@pytest.mark.parametrize("seed", range(4))
def test_the_rank_correlation_is_scipys_also_in_every_draw(seed):
    draws = np.random.default_rng(seed)
    first = draws.integers(0, 5, 20).astype(float)
    second = first + draws.integers(0, 6, 20)
    units = Draws(draws.integers(0, 7, 20), num=5)
    found = spearman(first, second, units)
    assert found.value == pytest.approx(spearmanr(first, second).statistic)
    for drawn, value in zip(units.drawn, found.draws, strict=True):
        rows = [row for unit in drawn for row in np.flatnonzero(units.codes == unit)]
        assert value == pytest.approx(spearmanr(first[rows], second[rows]).statistic)


def test_four_curves_are_ranked_by_hand():
    """Ranks 1 2 3 4 against 2 1 4 3: 1 − 6·4/(4·15)."""
    found = spearman([1, 2, 3, 4], [20, 10, 40, 30], Draws(range(4)))
    assert found.value == pytest.approx(1 - 24 / 60)
    assert shares_below([5.0, 1.0, 5.0]) == pytest.approx([2 / 3, 1 / 6, 2 / 3])
    assert shares_below([5.0, 7.0, 1.0, math.inf], ["a", "b", "a", "b"]).tolist() == [0.75, 0.25, 0.25, 0.75]


def test_a_constant_has_no_rank_correlation():
    assert math.isnan(spearman([1, 1, 1, 1], [1, 2, 3, 4], Draws(range(4))).value)


def test_a_difference_is_taken_draw_by_draw():
    """Two estimates that always move together differ by the same in every draw."""
    first = Estimate.of(0.7, np.array([0.6, 0.7, 0.8]))
    second = Estimate.of(0.6, np.array([0.5, 0.6, 0.7]))
    found = first.less(second)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert not first.less(Estimate.of(0.6, np.empty(0))).has_interval


@pytest.mark.parametrize("rank", [auc, spearman])
def test_twice_as_many_runs_take_no_more_than_twice_the_memory(rank):
    """A matrix of all pairs of runs would take four times as much: of 20,000 runs, gigabytes."""
    peaks = []
    for number in (2000, 4000):
        scores, events, units = np.arange(number) * 1.0, np.arange(number) % 3 == 0, np.arange(number) % 8
        draws = Draws(units, num=4)
        tracemalloc.start()
        rank(scores, events, draws)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 3 * peaks[0]
