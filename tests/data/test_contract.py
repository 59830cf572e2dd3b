"""Every registered data source keeps the contract; every check fails on the fault it is there for."""

from __future__ import annotations

import pytest

from stability.config.parts import validate_settings
from stability.registry import Registry
from tests.data import checks, faults
from tests.data.sources import ELSEWHERE, MADE

REGISTRY = Registry("data")
NAMES = REGISTRY.names()
CHECKS = (
    checks.check_prepares_alike_without_network,
    checks.check_sides_are_disjoint,
    checks.check_batches,
    checks.check_survives_its_folder,
)
PLANTED = (
    (checks.check_prepares_alike_without_network, faults.AsksTheNetwork),
    (checks.check_prepares_alike_without_network, faults.ChoosesAtRandom),
    (checks.check_prepares_alike_without_network, faults.ForgetsWhatItKeyed),
    (checks.check_sides_are_disjoint, faults.HoldsOutWhatItTrainsOn),
    (checks.check_batches, faults.GivesNarrowTokens),
    (checks.check_batches, faults.GivesTokensBeyond),
    (checks.check_batches, faults.RedrawsItsBatch),
    (checks.check_batches, faults.GivesOneBatch),
    (checks.check_survives_its_folder, faults.GivesOneBatch),
)
PLANTED_SETTINGS = (
    (faults.IgnoresItsSetting, "the setting changes nothing"),
    (faults.ForgetsItsSettingInItsKey, "the cache would give"),
)


@pytest.mark.parametrize("name", NAMES)
def test_source_keeps_the_contract_and_every_setting_of_it_shows(name, tmp_path, monkeypatch):
    if name not in MADE:
        pytest.skip(f"{name}: there are no small files to read; add what makes them to MADE in tests/data/sources.py")
    source, changes = REGISTRY.load(name), MADE[name](tmp_path, monkeypatch)
    known = {field for field in changes if field} | {field for owner, field in ELSEWHERE if owner == name}
    assert known == set(source.Config.model_fields), "a setting without a change that would show it"
    base = validate_settings("data", name, next(iter(changes.values()))[0])
    for check in CHECKS:
        check(source, base)
    for field, pair in changes.items():
        if field:
            checks.check_setting_shows(source, *(validate_settings("data", name, settings) for settings in pair))


@pytest.mark.parametrize(("check", "fault"), PLANTED)
def test_check_catches_planted_fault(check, fault):
    with pytest.raises(AssertionError):
        check(fault, fault.Config())


@pytest.mark.parametrize(("fault", "message"), PLANTED_SETTINGS)
def test_check_of_settings_catches_planted_fault(fault, message):
    with pytest.raises(AssertionError, match=message):
        checks.check_setting_shows(fault, fault.Config(), fault.Config(first=100))


def test_the_sound_source_behind_the_faults_passes():
    for check in CHECKS:
        check(faults.Sound, faults.Sound.Config())
    checks.check_setting_shows(faults.Sound, faults.Sound.Config(), faults.Sound.Config(first=100))
