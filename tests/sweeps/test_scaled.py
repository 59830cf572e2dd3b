"""Searches over `lr=scaled`: every curve is searched around its own optimizer's rates. Trials are fakes."""

from __future__ import annotations

import json
import math

import pytest

from stability.config.base import validate
from stability.config.sweep import SweepSpec
from sweeps.search.edge import most_rates
from sweeps.search.rounds import make_search
from sweeps.trial import make_trials
from tests.sweeps import fakes
from tests.sweeps.searching import Sweep

REFERENCES = {"adamw": 1e-3, "sgd": 0.1}
SCALED = ("optimizer=[adamw,sgd]", "lr.scaled=true", "lr.low=0.03", "lr.high=30", "seeds=2")


def train(sweep):
    """A valley around the reference rate, spiked above 4 times it and diverged above 10 times it."""

    def each(trial):
        sweep.trained.append(trial.run_id)
        yield
        x = math.log10(trial.spec["lr_peak"] / REFERENCES[trial.spec["optimizer"]["name"]])
        verdict = "diverged" if x > 1 else "spiked" if x > math.log10(4) else "stable"
        nll, last = None if x > 1 else 2.5 + 0.3 * x**2, trial.stop_at or trial.spec["steps"]
        for step in range(trial.directory.status()["step"] + 1, last + 1):
            if verdict != "diverged":
                fakes.log_step(trial.directory, step, wall_s=0.1, val_nll=nll + 1 / step)
        if last < trial.spec["steps"] and verdict != "diverged":
            trial.directory.set_status("stopped", step=last, reason="left", num_steps=trial.spec["steps"])
        else:
            result = {"val_nll": nll, "init_nll": 5.5, "unigram_nll": 3.0}
            trial.directory.set_status(verdict, step=last, num_steps=trial.spec["steps"], result=result)

    return each


def test_lr_edge_refines_each_optimizer_s_curve_around_its_own_range(tmp_path):
    sweep = Sweep(tmp_path, "lr=edge", *SCALED, "lr.num=7")
    sweep.run(train(sweep))
    curves = [choice["optimizer"].name for _, choice in sweep.spec.curves()]
    assert curves == ["adamw", "sgd"] * 2, "of sa, and of sc"
    for name, row in zip(curves, sweep.study.read()["edges"], strict=True):
        assert row["state"] == "found"
        assert abs(math.log10(row["best_lr"] / REFERENCES[name])) < 0.05
        assert row["verdict_lr"] <= 4 * REFERENCES[name] < row["verdict_next_lr"] <= row["verdict_lr"] * 10**0.05
        assert row["lowest_lr"] >= 0.029 * REFERENCES[name] and row["highest_lr"] <= 31 * REFERENCES[name]


def test_the_most_runs_of_a_search_are_those_of_all_its_curves(tmp_path):
    sweep = Sweep(tmp_path, "lr=edge", *SCALED, "lr.num=7")
    search = make_search(sweep.spec, "f" * 64, {})
    assert search.most_runs == 2 * sum(most_rates(rates, sweep.spec.lr.edge) for rates in sweep.spec.rates())


def test_halving_keeps_the_best_rate_of_each_optimizer(tmp_path):
    words = ("lr=range", *SCALED, "lr.num=7", "steps=18", "evaluation.every_steps=1", "search=asha")
    sweep = Sweep(tmp_path, *words)
    sweep.run(train(sweep))
    ended = {
        (trial.spec["optimizer"]["name"], trial.spec["lr_peak"])
        for trial in make_trials(sweep.spec, sweep.spec.points("f" * 64))
        if trial.directory.status()["state"] == "stable"
    }
    assert ended == {("adamw", 9.49e-4), ("sgd", 9.49e-2)}


def test_a_population_begins_and_draws_within_its_own_optimizer_s_rates(tmp_path):
    sweep = Sweep(tmp_path, "lr=range", *SCALED, "lr.num=4", "search=pbt", "steps=6", "search.every_steps=3")
    search = make_search(sweep.spec, "f" * 64, {})
    first = {}
    for _, run in search.ask():
        first.setdefault((run.mechanism.name, run.optimizer.name, run.seed), []).append(run.lr_peak)
    assert first == {
        (mechanism, name, seed): [float(f"{0.03 * 10**step * reference:.3g}") for step in range(4)]
        for mechanism in ("sa", "sc")
        for name, reference in REFERENCES.items()
        for seed in range(2)
    }


def test_the_record_has_reference_rates_and_multiples_for_the_report(tmp_path):
    from sweeps.record import _references

    scaled = Sweep(tmp_path, "lr=range", *SCALED, "lr.num=4").spec
    assert _references(scaled) == {"lr_references": REFERENCES, "lr_multiples": [0.03, 0.3, 3.0, 30.0]}
    several = Sweep(tmp_path, "optimizer=[adamw,sgd]", "lr=range").spec
    assert _references(several) == {"lr_references": REFERENCES}
    assert _references(Sweep(tmp_path, "lr=range", "ablate.optimizer=[sgd]").spec) == {"lr_references": REFERENCES}
    assert _references(Sweep(tmp_path, "lr=range").spec) == {}


def test_a_recorded_scaled_sweep_is_read_again(tmp_path):
    spec = Sweep(tmp_path, "lr=edge", *SCALED, "lr.num=7").spec
    assert validate(SweepSpec, json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


@pytest.mark.parametrize("scaled", [True, False])
def test_a_plan_names_multiples_as_such(tmp_path, scaled):
    from sweeps.dry_run import _rates_text

    words = [word for word in SCALED if scaled or word != "lr.scaled=true"]
    text = _rates_text(Sweep(tmp_path, "lr=range", *words, "lr.num=7").spec)
    wanted = "7 learning rates from 0.03 to 30"
    assert text == (f"{wanted} times each optimizer's own (adamw 0.001, sgd 0.1)" if scaled else wanted)
