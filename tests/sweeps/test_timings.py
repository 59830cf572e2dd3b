"""Measured times of a kind of run: stored for a day, for the same code, machine, data and settings."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from stability.plan.plan import Plan
from sweeps import timings
from sweeps.costs import measure_costs
from sweeps.timings import MAX_AGE_S, StoredTimes, measure_times
from tests.sweeps.real import make_sweep


@pytest.fixture
def plan(tmp_path):
    return Plan.of(make_sweep(tmp_path)[0])


@pytest.fixture
def measured(monkeypatch):
    """The kinds that were measured, instead of their times."""
    found = []

    def measure(run, corpus, device, timed_s):
        found.append(run.mechanism.name)
        return timings.Times(1.0 + len(found), 0.5, 100.0)

    monkeypatch.setattr(timings, "measure_times", measure)
    return found


def times_of(plan, run=None, device="cpu"):
    return StoredTimes(plan.pool, torch.device(device)).look_up(run or plan.kinds[0].spec, plan.corpus, 1.0)


def stored_file(plan):
    (file,) = (plan.pool / "cache" / "timings").iterdir()
    return file


def test_a_kind_is_measured_once_and_a_plan_says_that_its_times_are_older(plan, measured):
    first = measure_costs(plan)
    again = measure_costs(plan)
    assert measured == ["sa", "sc"]
    for cost, other, step_s in zip(first.values(), again.values(), (2.0, 3.0), strict=True):
        assert not cost.timing.is_stored and other.timing.is_stored
        assert other.timing.step_s == cost.timing.step_s == step_s
        assert other.timing.train_s == cost.timing.train_s


def test_rates_and_seeds_share_their_times_and_other_settings_do_not(plan, measured):
    run = plan.kinds[0].spec
    times_of(plan)
    assert times_of(plan, run.model_copy(update={"lr_peak": 0.5, "seed": 3})).is_stored
    for change in ({"batch": run.batch + 1}, {"threads": 2}, {"data_fingerprint": "f" * 64}):
        assert not times_of(plan, run.model_copy(update=change)).is_stored
    assert not times_of(plan, device="cuda").is_stored


def test_times_of_other_code_or_of_yesterday_are_measured_anew(plan, measured, monkeypatch):
    times_of(plan)
    file = stored_file(plan)
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"measured_at": found["measured_at"] - MAX_AGE_S - 1}))
    assert not times_of(plan).is_stored and times_of(plan).is_stored
    file.write_text("{")
    assert not times_of(plan).is_stored and times_of(plan).is_stored
    monkeypatch.setattr(timings, "circumstances", lambda words: "other code")
    assert not times_of(plan).is_stored


def test_a_plan_without_prepared_data_stores_no_times(plan, measured):
    shutil.rmtree(plan.pool)
    times_of(plan)
    assert not plan.pool.exists()


def test_a_validation_is_timed_by_its_first_part(tmp_path, monkeypatch):
    """The clock is replaced: it counts the parts that were validated."""
    spec, _ = make_sweep(tmp_path, "evaluation.sequences=6")
    plan = Plan.of(spec)
    monkeypatch.setattr("stability.training.evaluate.CHUNK", 2)
    validated = []

    class Clock:
        time = staticmethod(lambda: 0.0)
        perf_counter = staticmethod(lambda: float(len(validated)))

    from stability.training.evaluate import Validation

    sums = Validation._sums
    monkeypatch.setattr(Validation, "_sums", lambda self, *args: validated.append(1) or sums(self, *args))
    monkeypatch.setattr(timings, "time", Clock)
    assert measure_times(plan.kinds[0].spec, plan.corpus, torch.device("cpu"), 1.0).validation_s == 3.0
