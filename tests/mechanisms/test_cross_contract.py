"""Every registered cross mechanism keeps the contract; every check of it fails on the fault it is there for."""

from __future__ import annotations

import pytest

from stability.config.parts import validate_settings
from stability.mechanisms import build
from stability.mechanisms._base import MixerShape
from stability.registry import Registry
from tests.mechanisms import checks, cross_checks, cross_faults
from tests.mechanisms.cross_checks import WithContext

REGISTRY = Registry("mechanisms")
NAMES = REGISTRY.names(cross=True)
AS_A_SELF_MECHANISM = (
    checks.check_shape_and_dtype,
    checks.check_padding_is_unread,
    checks.check_wholly_padded_is_finite,
    checks.check_second_derivatives,
    checks.check_degenerate_inputs,
)
OF_THE_CONTEXT = (
    cross_checks.check_contexts_of_any_length,
    cross_checks.check_context_padding_is_unread,
    cross_checks.check_no_context_adds_nothing,
    cross_checks.check_context_is_read,
    cross_checks.check_sources_do_not_meet,
)
OF_A_BUILDER = (checks.check_deterministic, checks.check_save_load)
PLANTED = (
    (cross_checks.check_contexts_of_any_length, cross_faults.TakesOneLengthOnly),
    (cross_checks.check_context_padding_is_unread, cross_faults.ReadsContextPadding),
    (cross_checks.check_context_padding_is_unread, cross_faults.WeighsContextPaddingWithZero),
    (cross_checks.check_context_padding_is_unread, cross_faults.CountsContextPadding),
    (cross_checks.check_no_context_adds_nothing, cross_faults.GivesNothing),
    (cross_checks.check_no_context_adds_nothing, cross_faults.EmptyMean),
    (cross_checks.check_context_is_read, cross_faults.IgnoresContext),
    (cross_checks.check_context_is_read, cross_faults.ReadsTheFirstAlone),
    (cross_checks.check_sources_do_not_meet, cross_faults.MixesSources),
)


def builder(name: str):
    return lambda: build(name, width=checks.WIDTH, heads=checks.HEADS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", AS_A_SELF_MECHANISM, ids=lambda check: check.__name__)
def test_with_its_context_it_keeps_a_self_mechanisms_contract(name, check):
    check(WithContext(checks.build_seeded(builder(name))))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", OF_THE_CONTEXT, ids=lambda check: check.__name__)
def test_cross_mechanism_keeps(name, check):
    check(checks.build_seeded(builder(name)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", OF_A_BUILDER, ids=lambda check: check.__name__)
def test_cross_mechanism_is_reproducible(name, check):
    check(lambda: WithContext(builder(name)()))


@pytest.mark.parametrize("name", NAMES)
def test_cost_grows_with_source_and_context_and_covers_the_projections(name):
    mechanism, config, shape = (
        REGISTRY.load(name),
        validate_settings("mechanisms", name, {}),
        MixerShape(checks.WIDTH, checks.HEADS),
    )
    cost = mechanism.cost(config, shape, 8, 6)
    assert cost >= (8 + 8 + 6) * checks.WIDTH**2
    assert cost < mechanism.cost(config, shape, 16, 6)
    assert cost < mechanism.cost(config, shape, 8, 12)


@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_check_catches_planted_fault(check, fault):
    with pytest.raises((AssertionError, RuntimeError)):
        check(checks.build_seeded(fault))


def test_the_sound_mechanism_behind_the_faults_passes():
    module = checks.build_seeded(cross_faults.CrossMean)
    for check in OF_THE_CONTEXT:
        check(module)
    for check in AS_A_SELF_MECHANISM:
        check(WithContext(module))
    for check in OF_A_BUILDER:
        check(lambda: WithContext(cross_faults.CrossMean()))
