"""No id has moved since the code of commit 2428c84, which wrote the list (`golden_ids`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stability.config.identity import run_id, tokenizer_id
from stability.config.parse import parse_run
from stability.registry import add_plugin
from tests.identity import golden_ids
from tests.identity.golden_ids import BASE, GOLDEN, PLUGINS, TOKENIZER_BASE


def listed(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


PRESETS = listed("presets")


@pytest.fixture(autouse=True)
def plugins(plugins_of_a_test_alone):
    for module in PLUGINS:
        add_plugin(module)


@pytest.mark.parametrize("name", PRESETS)
def test_the_runs_of_a_preset_keep_their_ids(name):
    """A preset that is changed on purpose has other runs: then, and only then, its entry is written anew."""
    runs = golden_ids.preset(name)
    assert (len(runs), golden_ids.sum_of([run_id(run) for run in runs])) == (
        PRESETS[name]["num"],
        PRESETS[name]["sha256"],
    )


@pytest.mark.parametrize("name", [name for name in PRESETS if "before" in PRESETS[name]])
def test_the_runs_of_a_preset_from_before_a_default_changed_are_a_setting_away(name):
    before = PRESETS[name]["before"]
    assert golden_ids.sum_of([run_id(run) for run in golden_ids.preset(name, before["changes"])]) == before["sha256"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_that_is_written_out_whole_keeps_its_id_whatever_its_preset_says_today(name):
    first = PRESETS[name]["first"]
    for kind in PRESETS[name]["kinds"]:
        assert run_id(parse_run(first | kind["changes"])) == kind["id"], kind


def test_every_change_of_one_field_keeps_its_id():
    cases = listed("runs")
    moved = [case for case in cases if run_id(golden_ids.run_of(BASE | case["changes"])) != case["id"]]
    assert moved == []
    assert len(cases) > 250
    named = {key for case in cases for key in case["changes"]}
    assert {
        "model",
        "schedule",
        "norm",
        "evaluation",
        "verdict",
        "guards",
        "checkpoint",
        "log",
        "data",
        "cross",
        "threads",
        "plugins",
    } <= named


def test_every_change_of_a_tokenizers_field_keeps_its_id():
    cases = listed("tokenizers")
    moved = [
        case for case in cases if tokenizer_id(golden_ids.tokenizer_of(TOKENIZER_BASE | case["changes"])) != case["id"]
    ]
    assert moved == []
    assert len(cases) > 100
