"""Every registered optimizer keeps the contract; every check fails on the fault it is there for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stability.config.parts import validate_settings
from stability.optimizers import Averaging, FindingRate, TakingHessian
from stability.registry import Registry
from tests.optimizers import checks, faults
from tests.optimizers.oracles import LOOPS, MODEL_LOOPS, TENSOR_LOOPS, by_tensor_a
from tests.optimizers.oracles.by_entry import sgd
from tests.optimizers.values import NEEDED, other, others

REGISTRY = Registry("optimizers")
NAMES = REGISTRY.names()
ALWAYS = (
    checks.check_one_step_moves_every_parameter,
    checks.check_zeros_do_no_harm,
    checks.check_deterministic,
    checks.check_state_survives_a_file,
)
PLANTED = (
    (checks.check_one_step_moves_every_parameter, faults.LeavesVectorsAlone),
    (checks.check_zeros_do_no_harm, faults.StepsByItsNorm),
    (checks.check_zeros_do_no_harm, faults.DividesByRows),
    (checks.check_deterministic, faults.Random),
    (checks.check_linear_in_lr, faults.CapsItsRate),
    (checks.check_state_survives_a_file, faults.KeepsAnObject),
    (checks.check_state_survives_a_file, faults.KeepsStateOutside),
    (checks.check_decay_reaches_what_is_told, faults.DecaysEverything),
    (checks.check_decay_reaches_what_is_told, faults.GrowsByItsDecay),
    (checks.check_elementwise, faults.NormalisesTheTensor),
    (checks.check_elementwise, faults.KeepsRowSums),
)
# `impl` says by what a step is computed, and changes rounding alone
SETTINGS = [(name, field) for name in NAMES for field in REGISTRY.load(name).Config.model_fields if field != "impl"]


def cases(name: str) -> list[Any]:
    """An optimizer's defaults, and all its settings at other values."""
    config = REGISTRY.load(name).Config
    return [config(), config(**others(name))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", ALWAYS, ids=lambda check: check.__name__)
def test_optimizer_keeps(name, check):
    for config in cases(name):
        check(REGISTRY.load(name), config)


@pytest.mark.parametrize("name", NAMES)
def test_displacement_is_linear_in_the_rate_but_where_it_is_said_not_to_be(name):
    for config in cases(name):
        if REGISTRY.load(name).linear_in_lr:
            checks.check_linear_in_lr(REGISTRY.load(name), config)
        else:
            with pytest.raises(AssertionError):
                checks.check_linear_in_lr(REGISTRY.load(name), config)


@pytest.mark.parametrize("name", [name for name in NAMES if "weight_decay" in REGISTRY.load(name).Config.model_fields])
def test_weight_decay_reaches_what_it_says(name):
    part = REGISTRY.load(name)
    for settings in ({}, others(name)):
        checks.check_decay_reaches_what_is_told(part, part.Config(**{**settings, "weight_decay": 0.3}))


@pytest.mark.parametrize("name", REGISTRY.names(elementwise=True))
def test_slices_of_a_tensor_take_the_steps_of_the_whole(name):
    for config in cases(name):
        checks.check_elementwise(REGISTRY.load(name), config)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_formula(name):
    if name not in {**LOOPS, **TENSOR_LOOPS, **MODEL_LOOPS}:
        pytest.skip(
            f"{name}: its steps are compared with no formula; add its loop to LOOPS in tests/optimizers/oracles"
        )
    for config in cases(name):
        if name in LOOPS:
            checks.check_follows_the_loop(REGISTRY.load(name), config, LOOPS[name])
        if name in TENSOR_LOOPS:
            within = 1e-12 if name in by_tensor_a.LOOPS else 1e-6
            checks.check_follows_the_tensor_loop(REGISTRY.load(name), config, TENSOR_LOOPS[name], within)
        if name in MODEL_LOOPS:
            checks.check_follows_the_model_loop(REGISTRY.load(name), config, MODEL_LOOPS[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_an_optimizer_is_what_it_has(name):
    part = REGISTRY.load(name)
    made = checks.built(part, part.Config(), checks.Toy())
    found = [isinstance(made, kind) for kind in (Averaging, TakingHessian, FindingRate)]
    assert found == [part.averages, part.takes_hessian, part.is_multiplier]


@pytest.mark.parametrize(("name", "field"), SETTINGS)
def test_every_setting_changes_the_step(name, field):
    part = REGISTRY.load(name)
    base = validate_settings("optimizers", name, NEEDED.get((name, field), {}))
    if "weight_decay" in part.Config.model_fields and field != "weight_decay":
        base = base.model_copy(update={"weight_decay": 0.3})
    checks.check_setting_changes_the_step(part, base, field, other(name, field))


@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_check_catches_planted_fault(check, fault):
    with pytest.raises(AssertionError):
        check(fault, fault.Config())


def test_adafactors_floor_is_below_the_gradients_of_float32():
    """Steps do not depend on the scale of the gradients, which torch's own floor makes them do below 3e-4."""
    ways = []
    for scale in (1.0, 1e-5):
        part, model = REGISTRY.load("adafactor"), checks.Toy(torch.float32)
        start = [value.detach().clone() for value in model.parameters()]
        checks.steps(checks.built(part, part.Config(), model), model, 1, 6, scale)
        ways.append([value.detach() - first for value, first in zip(model.parameters(), start, strict=True)])
    for one, other_one in zip(*ways, strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-3, atol=1e-6)


def test_checks_that_take_more_catch_planted_faults():
    with pytest.raises(AssertionError, match="and not"):
        checks.check_follows_the_loop(faults.LooksAhead, faults.Sound.Config(), sgd)
    with pytest.raises(AssertionError, match="momentum=0.5 changes nothing"):
        checks.check_setting_changes_the_step(faults.IgnoresMomentum, faults.Sound.Config(), "momentum", 0.5)


def test_the_sound_optimizer_behind_the_faults_passes():
    part, config = faults.Sound, faults.Sound.Config()
    for check in dict.fromkeys((*ALWAYS, *(check for check, _ in PLANTED))):
        check(part, config)
    checks.check_follows_the_loop(part, config, sgd)
    checks.check_setting_changes_the_step(part, config, "momentum", 0.5)
