"""`benchmarks.edge_rates`: edges by the report's rule of broken runs, rates around them, and commands that parse."""

from __future__ import annotations

import shlex
import sys

import numpy as np
import pytest

from benchmarks import edge_rates
from tests.analysis.foretelling import run, study_of
from tests.reading import read_spec

RATES = (1e-3, 1e-2, 1e-1, 1.0)
EDGES = {("sa", "adamw"): 1, ("sc", "adamw"): 2, ("sa", "sgd"): 0}  # the last unbroken rate's place


def coarse(edges):
    return study_of(
        [
            run(lr, None, "diverged" if place > last else "stable", mechanism=mechanism, optimizer=optimizer, seed=seed)
            for (mechanism, optimizer), last in edges.items()
            for place, lr in enumerate(RATES)
            for seed in range(3)
        ]
    )


def test_each_curve_has_the_edge_at_which_half_of_its_runs_break():
    found = {
        (mechanism, optimizer): (low, high) for mechanism, optimizer, low, high in edge_rates.list_edges(coarse(EDGES))
    }
    assert found == {key: (RATES[last], RATES[last + 1]) for key, last in EDGES.items()}


@pytest.mark.parametrize("last", [-1, len(RATES) - 1])
def test_a_curve_without_an_edge_inside_is_refused(last):
    with pytest.raises(ValueError, match="sa with adamw has no edge between two of its rates"):
        list(edge_rates.list_edges(coarse({("sa", "adamw"): last})))


def test_rates_lie_within_the_decades_on_both_sides_and_differ():
    draws = [edge_rates.draw_rates(2e-3, 0.3, 10, np.random.default_rng(seed)) for seed in range(50)]
    assert all(rates == sorted(set(rates)) and len(rates) == 10 for rates in draws)
    decades = np.log10(np.array(draws) / 2e-3)
    assert np.abs(decades).max() < 0.3 + np.log10(1.005)  # three digits
    assert abs(np.median(decades)) < 0.05 and decades.min() < -0.28 and decades.max() > 0.28


def test_more_rates_than_three_digits_tell_apart_are_refused():
    with pytest.raises(ValueError, match="400 distinct rates of three digits do not lie within 0.3 decades of 0.002"):
        edge_rates.draw_rates(2e-3, 0.3, 400, np.random.default_rng(0))


def test_its_commands_are_sweeps_of_one_study_with_rates_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(edge_rates, "load", lambda folder: coarse(EDGES))
    words = ["edge_rates", "coarse", "--name", "near", "--num", "4", "--words", "study=edge_prediction"]
    monkeypatch.setattr(sys, "argv", words)
    edge_rates.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    specs = [read_spec("sweep", shlex.split(line)[3:]) for line in lines]
    assert [(spec.mechanism[0].name, spec.optimizer[0].name) for spec in specs] == list(EDGES)
    rates = [rate for spec in specs for rate in spec.lr.rates()]
    assert {spec.name for spec in specs} == {"near"} and len(set(rates)) == len(rates) == 12
