"""`sweeps.search.edge` against curves whose best rate and edges are known."""

import math
import random

import pytest

from stability.config.rates import EdgeSettings, LearningRates
from sweeps.search.edge import Curve, Outcome, most_rates

SETTINGS = EdgeSettings()
GRID = LearningRates(low=3e-4, high=1e-1, num=9).rates()
DIGITS = 0.0022  # decades that rounding to three digits can move a rate


class Valley:
    """NLL 2.5 + (x - best)² · (steep below, steep above), spiked above ``spike`` and diverged above ``death`` (log10
    LR)."""

    def __init__(self, best, below=0.3, above=0.5, spike=0.0, death=1.0, seeds=1):
        self.best, self.below, self.above, self.spike, self.death, self.seeds = best, below, above, spike, death, seeds

    def outcomes(self, lr):
        x = math.log10(lr)
        nll = 2.5 + (self.below if x < self.best else self.above) * (x - self.best) ** 2
        end = Outcome("diverged", None) if x > self.death else Outcome("spiked" if x > self.spike else "stable", nll)
        return [end] * self.seeds

    @property
    def nll_edge(self):
        return min(self.best + math.sqrt(SETTINGS.nll_tolerance * 2.5 / self.above), self.death)


def search(outcomes, settings=SETTINGS, grid=GRID):
    """The finished curve, and the asks of its rounds."""
    curve, rounds = Curve(grid, settings), []
    while asked := curve.ask():
        assert curve.ask() == asked, "asking twice is asking once"
        assert not set(asked) & set(curve.points), "a rate is asked for once"
        rounds.append(asked)
        for lr in asked:
            curve.tell(lr, outcomes(lr))
    return curve, rounds


def random_valley(draws):
    best = draws.uniform(-3.2, -1.2)
    spike = best + draws.uniform(0.1, 1.5)
    return Valley(
        best,
        draws.uniform(0.05, 0.6),
        draws.uniform(0.05, 2.0),
        spike,
        spike + draws.uniform(0, 0.5),
        draws.choice((1, 3)),
    )


@pytest.mark.parametrize("resolution", [0.05, 0.02, 0.1])
def test_the_best_rate_and_both_edges_of_random_curves_are_found_within_the_resolution(resolution):
    draws, settings, counts = random.Random(0), EdgeSettings(resolution_decades=resolution), []
    for _ in range(300):
        valley = random_valley(draws)
        curve, rounds = search(valley.outcomes, settings)
        found = curve.summarise()
        assert found.resolved
        assert abs(math.log10(found.best_lr) - valley.best) <= resolution + DIGITS
        for edge, truth in ((found.by_verdict, valley.spike), (found.by_nll, valley.nll_edge)):
            # measured against the best rate found, whose NLL lies a little above the valley's floor, a rate a hair
            # further out is still near
            slack = 0.02 if edge is found.by_nll else 0.0
            assert math.log10(edge.lr) <= truth + slack and math.log10(edge.next_lr) > truth
            assert math.log10(edge.next_lr / edge.lr) <= resolution and not edge.exceptions
        assert found.num_rates == len(curve.points) == sum(map(len, rounds)) <= most_rates(GRID, settings)
        counts.append((found.num_rates, found.num_grid_rates, len(rounds)))
    used, of_grid = (sum(column) / 300 for column in list(zip(*counts, strict=True))[:2])
    assert used < 0.6 * of_grid


def test_the_grid_it_is_measured_against_has_the_resolution_over_the_range_that_was_tried():
    found = search(Valley(-2, spike=-1.5, death=-1.4).outcomes)[0].summarise()
    assert found.num_grid_rates == math.ceil(math.log10(1e-1 / 3e-4) / 0.05) + 1 == 52
    assert found.num_rates == 15


def test_a_search_goes_on_with_the_same_rates_wherever_it_was_cut_off():
    valley = Valley(-2.13, spike=-1.37, death=-1.2)
    _, rounds = search(valley.outcomes)
    for done in range(sum(map(len, rounds))):
        known = [lr for asked in rounds for lr in asked][:done]
        curve, again = Curve(GRID, SETTINGS), []
        while asked := curve.ask():  # the ledger's runs are told first, as they are asked for
            again.append(asked)
            for lr in sorted(asked, key=lambda lr: lr not in known):
                curve.tell(lr, valley.outcomes(lr))
        assert again == rounds


def test_an_edge_beyond_the_grid_is_found_by_extending_it():
    found = search(Valley(-1.4, above=0.2, spike=0.31, death=0.4).outcomes)[0].summarise()
    assert found.by_verdict.lr <= 10**0.31 < found.by_verdict.next_lr <= found.by_verdict.lr * 10**0.05


def test_a_curve_that_stays_stable_is_followed_no_further_than_asked_and_its_edge_left_open():
    found = search(Valley(-1.4, above=0.01, spike=9, death=9).outcomes)[0].summarise()
    assert found.by_verdict.lr == found.by_nll.lr == 10.0
    assert found.by_verdict.next_lr is None and found.by_nll.next_lr is None and found.resolved
    short = search(Valley(-1.4, above=0.01, spike=9, death=9).outcomes, EdgeSettings(extend_decades=0))[0].summarise()
    assert short.by_verdict.lr == 0.1


def test_a_best_rate_below_the_grid_is_found_by_extending_it_downwards():
    found = search(Valley(-4.2, spike=-3.1, death=-3).outcomes)[0].summarise()
    assert abs(math.log10(found.best_lr) + 4.2) <= 0.05 and found.best_low is not None


def test_where_nothing_is_stable_the_edge_lies_below_what_was_tried():
    curve, _ = search(lambda lr: [Outcome("diverged", math.nan)])
    found = curve.summarise()
    assert (found.best_lr, found.best_nll, found.by_verdict.lr, found.by_nll.lr) == (None, None, None, None)
    assert found.by_verdict.next_lr == found.by_nll.next_lr == min(curve.points) == 3e-6
    assert found.resolved and len(curve.points) <= most_rates(GRID, SETTINGS)


def test_nothing_learned_at_small_rates_is_no_hole_and_a_window_between_two_rates_is_looked_for():
    def outcomes(lr):
        x = math.log10(lr)
        return [
            Outcome(
                "plateaued" if x < -1.55 else "stable" if x < -1.4 else "diverged",
                3.0 - 0.1 * x if x < -1.4 else math.inf,
            )
        ]

    assert not any(outcomes(lr)[0].verdict == "stable" for lr in GRID)
    found = search(outcomes)[0].summarise()
    assert found.by_verdict.lr <= 10**-1.4 < found.by_verdict.next_lr <= found.by_verdict.lr * 10**0.05
    assert found.by_verdict.exceptions == ()


def test_verdicts_that_are_not_monotone_are_reported():
    hole = GRID[4]

    def outcomes(lr):
        return [Outcome("spiked", 2.9)] if lr == hole else Valley(-2.3, spike=-1.2).outcomes(lr)

    found = search(outcomes)[0].summarise()
    assert found.by_verdict.exceptions == (hole,)
    assert found.by_verdict.lr <= 10**-1.2 < found.by_verdict.next_lr


def test_a_rate_is_stable_if_every_seed_is_and_its_nll_is_their_median():
    curve = Curve(GRID, SETTINGS)
    for lr in GRID:
        curve.tell(
            lr, [Outcome("stable", 2.0), Outcome("stable", 2.4), Outcome("spiked" if lr > 1e-2 else "stable", 9.0)]
        )
    found = curve.summarise()
    assert found.best_nll == 2.4 and found.best_lr == GRID[0], "of equal rates the smallest"
    assert found.by_verdict.lr == max(lr for lr in GRID if lr <= 1e-2)
    assert found.by_nll.lr == GRID[-1] and not found.resolved
    curve.tell(GRID[0], [Outcome("stable", 1.0), Outcome("diverged", None), Outcome("diverged", None)])
    assert curve.summarise().best_lr == GRID[1]


def test_a_flat_curve_and_a_noisy_one_end_within_the_promised_number_of_rates():
    draws = random.Random(1)
    curves = [lambda lr: [Outcome("stable", 2.5)]]
    for _ in range(200):
        valley = random_valley(draws)
        noise = {}
        curves.append(
            lambda lr, valley=valley, noise=noise: [
                Outcome(
                    draws.choice((end.verdict, "stable", "spiked")),
                    end.nll and noise.setdefault(lr, end.nll + draws.gauss(0, 0.1)),
                )
                for end in valley.outcomes(lr)
            ]
        )
    for outcomes in curves:
        curve, _ = search(outcomes)
        assert len(curve.points) <= most_rates(GRID, SETTINGS)
