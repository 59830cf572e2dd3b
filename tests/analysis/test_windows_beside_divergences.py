"""Windows beside divergences: seeds that diverged at every rate, edges next to a diverged rate, and intervals that
cannot be."""

import math

import pytest

from analysis.numbers.comparison import compare_windows, decide
from tests.analysis.test_claims import NARROW, WIDE, judged, vee, windows_of


def test_a_seed_that_diverged_at_every_rate_has_a_window_of_width_0_and_one_that_is_missing_none(tmp_path):
    nll = lambda m, lr, seed: math.inf if m == "sa" and seed == 2 else vee({"sa": NARROW, "sc": WIDE})(m, lr, 0)  # noqa: E731
    study = {"mechanisms": ("sa", "sc"), "seeds": 3, "nll": nll}
    claim = judged(tmp_path / "a", **study)["window"]
    # widths 2, 2, 2 against 1, 1, 0: differences 1, 1, 2, mean 4/3, ± 4.3027 · 0.577 / √3 = ± 1.434. At a level of
    # 5 % / 3 comparisons t_3 · 0.577 / √4 = 1.402 is more than 4/3, t_4 · 0.577 / √5 = 1.023 is less: 5 seeds
    assert (
        claim.verdict == "undecided" and "−0.10 to +2.77 decades" in claim.text and "needs about 5 seeds" in claim.text
    )
    assert "sa diverged at every rate in 1 of 3 seeds, a window of width 0" in claim.text
    claim = judged(tmp_path / "b", **study, statuses={("sa", 1e-4, 2): ("failed", "x")})["window"]
    assert claim.verdict == "undecided" and "In one seed or more a mechanism has no finished run" in claim.text


def test_an_edge_below_a_rate_that_only_the_second_diverged_at_is_strictly_lower(tmp_path):
    """sc's window holds the highest rate, sa diverged there in every seed; at 1e-2 only in the last, which alone makes
    the bounds spread. Signs decide then: of two seeds as an indication, of twelve with p = 2/2¹², of three not."""

    def worse(m, lr, seed):
        return math.inf if m == "sa" and (lr > 0.5 or (lr > 5e-2 and seed == 1)) else 2.0

    settings = {"mechanisms": ("sa", "sc"), "nll": worse}
    claim = judged(tmp_path, seeds=12, **settings)["window"]
    assert claim.verdict == "holds" and "wider than sa's within the swept range" in claim.text
    assert claim.p == pytest.approx(2 / 2**12)
    assert "sa diverged at a rate inside sc's window in 12 of 12 seeds" in claim.text
    assert judged(tmp_path / "2", seeds=2, **settings)["window"].text.startswith("Indicated (n = 2)")
    assert judged(tmp_path / "3", seeds=3, **settings)["window"].verdict == "undecided"
    other = {"sa": "sc", "sc": "sa"}
    mirror = judged(
        tmp_path / "m", mechanisms=("sa", "sc"), seeds=12, nll=lambda m, lr, seed: worse(other[m], lr, seed)
    )["window"]
    assert (
        mirror.verdict == "contradicted" and "sc diverged at a rate inside sa's window in 12 of 12 seeds" in mirror.text
    )
    once = lambda m, lr, seed: math.inf if m == "sa" and lr > 0.5 and seed else 2.0  # noqa: E731
    assert judged(tmp_path / "o", mechanisms=("sa", "sc"), seeds=12, nll=once)["window"].verdict == "undecided"


def test_no_interval_passes_what_the_sweep_or_a_share_allows():
    assert decide([100.0, 100.0, 0.0], [100.0, 100.0, 0.0], limit=100)[1][1] == 100
    lrs = (1e-3, 1e-2, 1e-1)
    wide, narrow, broken = [2.0, 2.0, 2.0], [3.0, 2.0, 3.0], [math.inf, 2.0, math.inf]
    result = compare_windows(windows_of(broken, wide, narrow, lrs=lrs), windows_of(narrow, broken, wide, lrs=lrs))
    assert result.direction == 0 and result.interval == (-2, 2), "two decades were swept"
