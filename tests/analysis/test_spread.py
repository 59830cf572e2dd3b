"""Intervals against scipy, and how numbers are written."""

import math

import numpy as np
import pytest

from analysis.numbers.spread import Mean, Spread, interval, mean_interval, median_interval, t_975
from analysis.words import count_range, duration, join_words, lr_text, plural, power, short_count


def test_t_quantiles_have_their_closed_forms_and_those_of_a_printed_table():
    """Closed forms for 1, 2 and 4 degrees of freedom (Shaw 2006, J. Comput. Finance 9(4)); Abramowitz and Stegun,
    Table 26.10, column 0.95."""
    product = 4 * 0.975 * 0.025
    ratio = math.cos(math.acos(math.sqrt(product)) / 3) / math.sqrt(product)
    closed = {1: math.tan(0.475 * math.pi), 2: 0.95 / math.sqrt(product / 2), 4: 2 * math.sqrt(ratio - 1)}
    for degrees, value in closed.items():
        assert t_975(degrees) == pytest.approx(value, rel=1e-12)
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 17: 2.110, 29: 2.045, 30: 2.042}
    table |= {40: 2.021, 60: 2.000, 120: 1.980}
    assert {degrees: round(t_975(degrees), 3) for degrees in table} == table


@pytest.mark.parametrize("degrees", [*range(1, 41), 99, 1000])
def test_between_the_t_quantiles_lie_95_per_cent(degrees):
    """By the finite trigonometric sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t_975(degrees) / math.sqrt(degrees))
    first = degrees % 2  # the lowest power of the cosine in the sum
    terms, term = [], math.cos(angle) if first else 1.0
    for power_of_cosine in range(first, degrees - 1, 2):
        terms.append(term)
        term *= (power_of_cosine + 1) / (power_of_cosine + 2) * math.cos(angle) ** 2
    between = math.sin(angle) * math.fsum(terms)
    assert (2 / math.pi * (angle + between) if first else between) == pytest.approx(0.95, abs=1e-13)


def test_no_degree_of_freedom_has_no_finite_quantile():
    assert math.isinf(t_975(0))


def test_mean_interval_by_hand():
    # 1, 2, 3: mean 2, standard error 1/√3, t(2) = 4.302653.
    low, high = mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), rel=1e-6)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf, 2.0]])
def test_mean_interval_without_enough_finite_values_is_everything(values):
    assert mean_interval(values) == (-math.inf, math.inf)


def test_a_spread_is_the_finite_values_median_and_range():
    assert Spread.of([2.0, 1.0]) == Spread(1.5, 1.0, 2.0, 2)
    assert Spread.of([7.0, 1.0, 2.0, math.inf, math.nan]) == Spread(2.0, 1.0, 7.0, 3)
    assert Spread.of([1.0]).detail() == "n=1"
    assert Spread.of([]).n == 0 and math.isnan(Spread.of([math.inf]).median)
    assert Spread.of([1.0, 2.0]).detail() == "1.000–2.000, n=2"


@pytest.mark.parametrize("number", [2, 5, 6, 8, 9, 12, 15, 16, 29, 100, 101])
def test_from_nine_values_on_order_statistics_hold_the_median(number):
    """As `scipy.stats.quantile_test` says, whose interval is infinite where the smallest and largest are too few."""
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(number).standard_cauchy(number).tolist()
    known = stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
    expected = (known.low, known.high) if number > 5 else (min(values), max(values))
    assert median_interval(values) == expected
    assert (expected == (min(values), max(values))) == (number < 9)


def test_a_mean_has_students_interval_or_the_range_of_two():
    three = Mean.of([1.0, 2.0, 6.0, math.inf, math.nan])
    assert (three.mean, three.n) == (3.0, 3) and (three.low, three.high) == mean_interval([1.0, 2.0, 6.0])
    assert Mean.of([2.0, 1.0]) == Mean(1.5, 1.0, 2.0, 2) and Mean.of([2.0, 1.0]).detail() == "+1.000 to +2.000, n=2"
    assert Mean.of([1.0]).detail() == "n=1" and Mean.of([]).n == 0 and math.isnan(Mean.of([math.nan]).mean)


def test_of_positive_values_mean_and_interval_are_those_of_their_logarithms():
    stats = pytest.importorskip("scipy.stats")
    values = [0.3, 2.0, 2.5, 9.0]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(np.log(values)), scale=stats.sem(np.log(values)))
    for unit in (1, 10):
        found = Mean.of([unit * value for value in values], is_positive=True)
        assert found.mean == pytest.approx(unit * stats.gmean(values), rel=1e-12)
        assert (found.low, found.high) == pytest.approx((unit * math.exp(low), unit * math.exp(high)), rel=1e-9)
    assert interval([0.0, 1.0, 2.0], is_positive=True) == (0.0, 2.0), "0 has no logarithm"
    assert Mean.of([0.0, 1.0, 2.0], is_positive=True) == Mean(1.0, 0.0, 2.0, 3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0022, "2.2e-3"),
        (7e-3, "7.0e-3"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (math.nan, "--"),
        (12.0, "1.2e1"),
    ],
)
def test_power(value, text):
    assert power(value) == text


@pytest.mark.parametrize(
    ("lr", "text"),
    [(3e-4, "3e-4"), (7.5e-4, "7.5e-4"), (0.1, "1e-1"), (1.0, "1e0"), (0.0, "0"), (2.15443e-3, "2.154e-3")],
)
def test_lr_text(lr, text):
    assert lr_text(lr) == text


def test_counts_and_durations():
    assert [short_count(n) for n in (12, 102400, 2345678, 3.8e9, math.nan)] == [
        "12",
        "102 k",
        "2.35 M",
        "3.8 G",
        "not recorded",
    ]
    assert (
        count_range([1000, 1000]) == "1 k"
        and count_range([1000, 2000.0, np.nan]) == "1 k to 2 k"
        and count_range([]) == "not recorded"
    )
    assert [duration(s) for s in (47, 363, 7500, math.nan)] == ["47 s", "6 min 03 s", "2 h 05 min", "not recorded"]
    assert duration(59.7) == "1 min 00 s"


def test_words():
    assert (plural(1, "seed"), plural(2, "seed")) == ("1 seed", "2 seeds")
    assert [join_words(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
