"""The margin audit sees every kind of comparison, and what it prints follows from the ratios."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from tests.margins import Margins, Moving, install, moved, read
from tests.rounding import at_risk
from tests.within import assert_within, relative_error, rounding_floor

ONE, OFF = torch.ones(3), torch.tensor([1.0, 1.25, 1.0])
# each is off by 0.25 where 0.5 is allowed
COMPARISONS = {
    "a number": lambda: pytest.approx(1.0, abs=0.5) == 1.25,
    "a list": lambda: pytest.approx([1.0, 1.0], abs=0.5) == [1.0, 1.25],
    "a dict": lambda: pytest.approx({"a": 1}, abs=0.5) == {"a": 1.25},
    "an array": lambda: np.array([1.25, 1.0]) == pytest.approx(np.array([1.0, 1.0]), rel=0.5),
    "a tensor's number": lambda: OFF[1] == pytest.approx(1.0, abs=0.5),
    "assert_close": lambda: torch.testing.assert_close({"a": OFF}, {"a": ONE}, rtol=0.25, atol=0.25),
    "assert_close of numbers": lambda: torch.testing.assert_close(1.25, 1.0, rtol=0.5, atol=0),
    "torch.allclose": lambda: torch.allclose(OFF, ONE, rtol=0.25, atol=0.25),
    "numpy.allclose": lambda: np.allclose(OFF.numpy(), ONE.numpy(), 0.5, 0),
    "a column of a table": lambda: np.allclose(pd.Series([1.25], index=[7]), pd.Series([1.0], index=[7]), 0.5, 0),
    "numpy.testing": lambda: np.testing.assert_allclose(OFF.numpy(), ONE.numpy(), rtol=0.5),
    "an array read backwards": lambda: np.allclose(np.array([1.25, 1.0])[::-1], np.ones(2), 0, 0.5),
    "math.isclose": lambda: math.isclose(1.25, 1.0, rel_tol=0, abs_tol=0.5),
    "assert_within": lambda: assert_within(OFF - ONE, 0.5),
    "assert_within, a tolerance for each": lambda: assert_within([0.0, 0.25, 0.0], np.array([0.0, 0.5, 1.0])),
}
EXACT = {
    "integers": lambda: pytest.approx(4, abs=2) == 3,
    "words": lambda: pytest.approx({"a": "b"}) == {"a": "b"},
    "no error": lambda: torch.allclose(ONE, ONE),
    "no tolerance": lambda: torch.allclose(OFF, ONE, rtol=0, atol=0),
    "integer tensors": lambda: torch.testing.assert_close(torch.tensor([3]), torch.tensor([3])),
    "∞": lambda: torch.testing.assert_close(torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan]), equal_nan=True),
}  # fmt: skip


@pytest.fixture
def margins(monkeypatch):
    found = Margins()
    install(found, monkeypatch)
    return found


@pytest.mark.parametrize("compare", COMPARISONS.values(), ids=COMPARISONS)
def test_a_comparison_is_recorded_with_its_line(margins, compare):
    compare()
    (ratio,) = margins.ratios.values()
    assert ratio == 0.5
    assert list(margins.ratios) == [f"test_margins.py:{compare.__code__.co_firstlineno}"]


@pytest.mark.parametrize("compare", EXACT.values(), ids=EXACT)
def test_an_exact_comparison_has_no_margin(margins, compare):
    compare()
    assert not margins.ratios


def test_where_a_fault_is_expected_nothing_is_recorded(margins):
    with pytest.raises(AssertionError):
        assert_within(0.25, 0.5)
        assert_within(0.75, 0.5)
    assert not margins.ratios
    assert_within(0.25, 0.5)
    assert margins.ratios


def test_a_run_writes_the_ratio_of_every_test_that_compares(tmp_path):
    (tmp_path / "test_numbers.py").write_text(
        "import pytest\n"
        "from tests.within import assert_within\n"
        "def test_near():\n    assert_within(0.4, 0.5)\n    assert_within(0.1, 0.5)\n"
        "def test_differs():\n    assert 3.0 != pytest.approx(1.0, abs=1.0)\n"
        "def test_fails():\n    assert_within(1.0, 0.5)\n"
        "def test_compares_nothing():\n    pass\n"
    )
    words = ["-p", "tests.margins", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    assert pytest.main([*words, f"--margins={tmp_path / 'ratios'}", str(tmp_path)]) == pytest.ExitCode.TESTS_FAILED
    found = {test.rpartition("::")[2]: ratio for (test, _), ratio in read(tmp_path / "ratios").items()}
    assert found == {"test_near": 0.8, "test_fails": 2.0}


@pytest.mark.redraws
def test_draws_move_by_one_unit_and_equal_draws_stay_equal(monkeypatch):
    plain = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    Moving(monkeypatch)
    one, other = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(one, other)
    units = (one.view(torch.int32) - plain.view(torch.int32)).abs()
    assert (units == 1).all()
    assert 0.4 < (one.abs() > plain.abs()).float().mean() < 0.6


@pytest.mark.redraws
def test_a_test_that_draws_again_what_others_draw_is_left_alone(monkeypatch, request):
    def draw():
        return torch.randn(100, generator=torch.Generator().manual_seed(0))

    plain, moving = draw(), Moving(monkeypatch)
    assert not torch.equal(draw(), plain)
    moving.pytest_runtest_setup(request.node)
    assert torch.equal(draw(), plain)


def test_a_draw_in_float64_moves_in_float32_and_zero_stays():
    drawn = torch.tensor([0.0, 1.1, -2.3], dtype=torch.float64)
    found = moved(drawn.clone())
    assert (found.float() == drawn.float()).tolist() == [True, False, False]


def test_what_rounding_does_not_move_is_not_at_risk():
    """A ratio of 0.9 that moves by less than a tenth of its room is about sampling; one of 0.6 is below the limit."""
    ratios = {"still": (0.9, 0.905), "moves": (0.9, 0.92), "new": (0.0, 0.8), "below": (0.2, 0.6)}
    by_setting = {
        setting: {(name, ""): both[index] for name, both in ratios.items() if both[index]}
        for index, setting in enumerate(("native", "avx2"))
    }
    assert at_risk(by_setting) == {("moves", ""): 0.92, ("new", ""): 0.8}


def test_nan_and_any_entry_beyond_its_tolerance_fail():
    for error, tolerance in ((math.nan, 1.0), ([0.1, 0.3], 0.2), (0.1, [0.2, 0.05]), (0.1, 0.0)):
        with pytest.raises(AssertionError, match="tolerance"):
            assert_within(error, tolerance)
    assert_within(0.0, 0.0)


def test_a_truth_that_vanishes_does_not_make_rounding_large():
    eps = torch.finfo(torch.float32).eps
    truth, summand = torch.zeros(2), torch.tensor([3.0, 4.0])
    floor = rounding_floor(1e-5, torch.float32, truth, summand)
    assert_within(relative_error(truth + 3 * eps, truth, floor), 1e-5)
    assert relative_error(truth + 50 * eps, truth, floor) > 1e-5
    assert relative_error(2 * summand, summand, floor) == 1.0
