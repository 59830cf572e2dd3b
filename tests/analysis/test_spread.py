"""Intervals against scipy, and how numbers are written."""

import math

import numpy as np
import pytest

from analysis.numbers.spread import EXTREME, POSITIVE, SHARE, Spread, interval, mean_interval, t_975
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


def test_spread_is_range_for_two_and_t_interval_for_three():
    assert Spread.of([2.0, 1.0]) == Spread(1.5, 1.0, 2.0, 2)
    three = Spread.of([1.0, 2.0, 3.0, math.inf, math.nan])
    assert three.n == 3 and (three.low, three.high) == pytest.approx(mean_interval([1.0, 2.0, 3.0]))


# Student intervals that reports printed of quantities which cannot reach them: a share of tokens, distances of column
# sums from 1, a spectral norm, the
# logarithm of a range, a ratio of norms. Each is that of three possible values, two alike and one far above.
IMPOSSIBLE = [
    (0.0653, 1.27, SHARE),
    *(
        (low, high, POSITIVE)
        for low, high in [(-0.12, 15.0), (-0.85, 1.7), (-158.7, 2293.0), (-1.903, 105.5), (-0.021, 1.824)]
    ),
]


def three_of(low, high):
    middle, deviation = (low + high) / 2, (high - low) / 2 * math.sqrt(3) / 4.302652729749462
    low = middle - deviation / math.sqrt(3)
    return [low, low, low + math.sqrt(3) * deviation]


@pytest.mark.parametrize(("low", "high", "scale"), IMPOSSIBLE)
def test_what_cannot_be_is_in_no_interval(low, high, scale):
    values = three_of(low, high)
    assert mean_interval(values) == pytest.approx((low, high), rel=1e-9), "as it was printed"
    assert min(values) > 0 and (scale != SHARE or max(values) < 1), "the values themselves can be"
    for each in (scale, EXTREME):
        found = Spread.of(values, each)
        assert 0 < found.low <= found.median < found.high and (scale != SHARE or found.high < 1)


def test_the_interval_of_positive_values_is_students_on_their_logarithms():
    stats = pytest.importorskip("scipy.stats")
    values = [0.3, 2.0, 2.5, 9.0]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(np.log(values)), scale=stats.sem(np.log(values)))
    assert interval(values, POSITIVE) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert interval([10 * value for value in values], POSITIVE) == pytest.approx(
        (10 * math.exp(low), 10 * math.exp(high)), rel=1e-9
    )


def test_the_interval_of_shares_is_the_mirrored_one_of_what_is_left():
    stats = pytest.importorskip("scipy.stats")
    values, odds = [0.9, 0.97, 0.995], np.log([9, 97 / 3, 199])
    low, high = (
        1 / (1 + math.exp(-end)) for end in stats.t.interval(0.95, 2, loc=np.mean(odds), scale=stats.sem(odds))
    )
    assert interval(values, SHARE) == pytest.approx((low, high), rel=1e-9)
    assert interval([1 - value for value in values], SHARE) == pytest.approx((1 - high, 1 - low), rel=1e-9)


def test_at_the_end_of_a_scale_and_for_extremes_it_is_the_range():
    assert interval([0.0, 1.0, 2.0], POSITIVE) == (0.0, 2.0) and interval([-1e-17, 1.0, 2.0], POSITIVE) == (-1e-17, 2.0)
    assert interval([0.5, 0.9, 1.0], SHARE) == (0.5, 1.0) == interval([0.5, 1.0, 0.9], EXTREME)


def test_an_interval_over_more_than_a_decade_is_printed_as_the_range_and_decides_as_it_is():
    """Half its logarithm is 4.303·s/√3: for 1, 2, 4 (s = ln 2) ×5.6 either side, for 1, 1.5, 2.25 ×2.7."""
    wide, narrow = Spread.of([1, 2, 4], POSITIVE), Spread.of([1, 1.5, 2.25], POSITIVE)
    assert wide.detail("{:.2f}".format) == "1.00–4.00, n=3" and wide.high / wide.low == pytest.approx(31.3, rel=1e-2)
    assert narrow.detail("{:.2f}".format) == "0.55–4.11, n=3" and narrow.printed == (narrow.low, narrow.high)
    assert Spread.of([-1, 1, 5]).printed == mean_interval([-1, 1, 5]), "of a difference it says something"


def test_spread_of_one_and_of_none():
    assert Spread.of([1.0]).detail() == "n=1"
    assert Spread.of([]).n == 0 and math.isnan(Spread.of([math.inf]).median)
    assert Spread.of([1.0, 2.0]).detail() == "1.000–2.000, n=2"


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
