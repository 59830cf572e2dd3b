"""Every registered objective keeps the contract; every check fails on the fault it is there for."""

from __future__ import annotations

from typing import Any

import pytest

from stability.registry import Registry
from tests.objectives import checks, faults
from tests.objectives.subjects import subject, subject_of
from tests.settings import other_value

REGISTRY = Registry("objectives")
NAMES = REGISTRY.names()
CHECKS = (
    checks.check_microbatches_add_up,
    checks.check_loss_is_a_mean,
    checks.check_generator_decides,
    checks.check_what_does_not_count_is_unread,
    checks.check_second_derivatives,
    checks.check_what_is_said,
    checks.check_samplers,
)
PLANTED = (
    (checks.check_microbatches_add_up, faults.AveragesItself),
    (checks.check_microbatches_add_up, faults.CountsOtherwise),
    (checks.check_microbatches_add_up, faults.GrowsWithTheBatch),
    (checks.check_loss_is_a_mean, faults.GrowsWithTheBatch),
    (checks.check_generator_decides, faults.DrawsGlobally),
    (checks.check_generator_decides, faults.DrawsForNothing),
    (checks.check_generator_decides, faults.WritesToItsBatch),
    (checks.check_what_does_not_count_is_unread, faults.ReadsEveryLogit),
    (checks.check_what_does_not_count_is_unread, faults.ReadsEveryTarget),
    (checks.check_what_does_not_count_is_unread, faults.PredictsPadding),
    (checks.check_what_does_not_count_is_unread, faults.ForgetsItsMask),
    (checks.check_second_derivatives, faults.DetachesAPart),
    (checks.check_what_is_said, faults.SaysNoUnit),
    (checks.check_what_is_said, faults.ForgetsItsScores),
    (checks.check_what_is_said, faults.LosesAComponent),
    (checks.check_samplers, faults.SamplesByHope),
    (checks.check_samplers, faults.GivesLogits),
    (checks.check_samplers, faults.SamplesFromTheLeft),
)
# but "impl", by which the loss must stay what it is: tests/kernels/test_loss_of_objectives.py
SETTINGS = [(name, field) for name in NAMES for field in REGISTRY.load(name).Config.model_fields if field != "impl"]
# what another setting has to be, so that a setting is read
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("mlm", "fixed_rate"): {"mask_rate": "fixed"},
    ("score_entropy", "epsilon"): {"noise": "loglinear"},
    ("classify", "magnitude"): {"rand_augment": 2},
    ("sentence_pairs", "temperature"): {"loss": "cosent"},
    ("sentence_pairs", "margin"): {"loss": "triplet"},
    ("sentence_pairs", "normalise"): {"loss": "triplet"},
}
# where another value than the one that a field's type suggests is needed
OTHERS: dict[tuple[str, str], Any] = {
    ("mlm", "fixed_rate"): 0.9,
    ("multitrack", "tokenizer"): "1" * 12,
    ("multitrack", "sources"): ("structure",),
}
VARIED = [
    ("mlm", {"mask_rate": "fixed", "corruption": "bert", "loss_chunk": 5}),
    ("mlm", {"context": 3}),
    ("score_entropy", {"graph": "uniform", "noise": "loglinear", "loss_chunk": 7}),
    ("multitrack", {"sources": ("sequence",), "tokenizer": None, "contexts": ()}),
    ("sentence_pairs", {"loss": "triplet", "pooling": "max", "normalise": False}),
]
# losses that compare the rows of a batch with each other: their microbatches do not add up, and are refused
OF_WHOLE_BATCHES = ("cosent", "mnrl")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_objective_keeps(name, check):
    check(subject(name))


@pytest.mark.parametrize(("name", "settings"), VARIED)
def test_objective_with_other_settings_keeps_the_contract(name, settings):
    for check in CHECKS:
        if settings.get("context") and check is checks.check_samplers:
            continue  # a model with cross branches has no context to sample with, and says so
        check(subject(name, **settings))


@pytest.mark.parametrize("loss", OF_WHOLE_BATCHES)
def test_sentence_pairs_with_a_loss_of_whole_batches_keeps_the_rest(loss):
    for check in (
        checks.check_generator_decides,
        checks.check_what_does_not_count_is_unread,
        checks.check_what_is_said,
    ):
        check(subject("sentence_pairs", loss=loss))


@pytest.mark.parametrize(("name", "field"), SETTINGS)
def test_every_setting_changes_something(name, field):
    base = WITH.get((name, field), {})
    key = (name, field)
    value = OTHERS[key] if key in OTHERS else other_value(REGISTRY.load(name).Config, field)
    checks.check_setting_changes_something(subject(name, **base), subject(name, **base, **{field: value}))


@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_check_catches_planted_fault(check, fault):
    with pytest.raises(AssertionError):
        check(subject_of(fault(), "mlm"))


def test_check_of_settings_catches_one_that_is_not_read():
    base, changed = (subject_of(faults.IgnoresItsCorruption(corruption=name), "mlm") for name in ("mask", "bert"))
    with pytest.raises(AssertionError, match="the setting changes neither"):
        checks.check_setting_changes_something(base, changed)


def test_the_sound_objective_behind_the_faults_passes():
    for check in CHECKS:
        check(subject_of(faults.Fault(), "mlm"))
    checks.check_setting_changes_something(
        subject_of(faults.Fault(), "mlm"), subject_of(faults.Fault(corruption="bert"), "mlm")
    )
