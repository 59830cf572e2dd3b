"""Intervals against scipy, and how numbers are written."""

import math

import numpy as np
import pytest

from analysis.spread import Spread, count_range, duration, listed, lr_text, mean_interval, plural, power, short_count, t_975


@pytest.mark.parametrize("degrees", [1, 2, 5, 17, 30, 31, 60, 1000])
def test_t_quantile_equals_scipys(degrees):
    stats = pytest.importorskip("scipy.stats")
    assert t_975(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=2e-4)


def test_no_degree_of_freedom_has_no_finite_quantile():
    assert math.isinf(t_975(0))


def test_mean_interval_by_hand():
    # 1, 2, 3: mean 2, standard error 1/√3, t(2) = 4.3027.
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), rel=1e-6)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf, 2.0]])
def test_mean_interval_without_enough_finite_values_is_everything(values):
    assert mean_interval(values) == (-math.inf, math.inf)


def test_spread_is_range_for_two_and_t_interval_for_three():
    assert Spread.of([2.0, 1.0]) == Spread(1.5, 1.0, 2.0, 2)
    three = Spread.of([1.0, 2.0, 3.0, math.inf, math.nan])
    assert three.n == 3 and (three.low, three.high) == pytest.approx(mean_interval([1.0, 2.0, 3.0]))


def test_spread_of_one_and_of_none():
    assert Spread.of([1.0]).detail() == "n=1"
    assert Spread.of([]).n == 0 and math.isnan(Spread.of([math.inf]).median)
    assert Spread.of([1.0, 2.0]).detail() == "1.000–2.000, n=2"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0022, "2.2e-3"), (7e-3, "7.0e-3"), (0.0, "0"), (math.inf, "∞"), (-math.inf, "-∞"), (math.nan, "--"), (12.0, "1.2e1")]
)
def test_power(value, text):
    assert power(value) == text


@pytest.mark.parametrize(("lr", "text"), [(3e-4, "3e-4"), (7.5e-4, "7.5e-4"), (0.1, "1e-1"), (1.0, "1e0"), (0.0, "0"), (2.15443e-3, "2.154e-3")])
def test_lr_text(lr, text):
    assert lr_text(lr) == text


def test_counts_and_durations():
    assert [short_count(n) for n in (12, 102400, 2345678, 3.8e9, math.nan)] == ["12", "102 k", "2.35 M", "3.8 G", "not recorded"]
    assert count_range([1000, 1000]) == "1 k" and count_range([1000, 2000.0, np.nan]) == "1 k to 2 k" and count_range([]) == "not recorded"
    assert [duration(s) for s in (47, 363, 7500, math.nan)] == ["47 s", "6 min 03 s", "2 h 05 min", "not recorded"]
    assert duration(59.7) == "1 min 00 s"


def test_words():
    assert (plural(1, "seed"), plural(2, "seed")) == ("1 seed", "2 seeds")
    assert [listed(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
