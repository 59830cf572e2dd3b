"""The page of all settings: every field that a command line can hold is on it, and every key on it is one that the
command line knows.

Both sides are looked up otherwise than the page is written: the fields by a walk over the annotations, the keys by
letting Hydra compose them.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from stability.cli.compose import compose
from stability.cli.words import ADDED, Invocation
from stability.config.groups import Group
from stability.config.parse import SPECS
from stability.config.parts import AXES, Part
from stability.registry import FAMILIES, Registry

pytest.importorskip("mkdocs")
FILE = Path(__file__).resolve().parent.parent / "docs" / "settings_page.py"


@pytest.fixture(scope="module")
def settings_page():
    spec = importlib.util.spec_from_file_location("settings_page", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def classes_in(annotation):
    """The classes of settings anywhere in an annotation."""
    if isinstance(annotation, type):
        return {annotation} if issubclass(annotation, BaseModel) else set()
    return set().union(*map(classes_in, get_args(annotation)))


def reachable(schema, found=None):
    """All classes of settings that a class holds, itself among them; of a part those that stand beside its own."""
    found = set() if found is None else found
    if schema not in found:
        found.add(schema)
        for name, field in schema.model_fields.items():
            if name == schema.written_flat and not classes_in(field.annotation):
                reachable(type(field.get_default(call_default_factory=True)), found)
            for each in (classes_in(field.annotation) | ({Group} if name == "optimizer" else set())) - {Part}:
                reachable(each, found)
    return found - {Part}


def missing(schema, rows):
    """The fields that no row tells of; a group is told of by its fields, a part by its name and its own table."""
    found = []
    for each in reachable(schema):
        for name, field in each.model_fields.items():
            if name != each.written_flat and not classes_in(field.annotation) - {Part}:
                told = [row for row in rows if field.description in row.meaning]
                if not any(
                    row.key.split(".")[-1] == name or name in ("name", "parts") or "<" in row.key for row in told
                ):
                    found.append(f"{each.__name__}.{name}")
    return found


def unknown(root, rows):
    """The keys that cannot be typed, each with what is said of it; those with something to fill in are not asked."""
    by_choice, chosen = defaultdict(list), defaultdict(dict)
    for row in rows:
        if "<" not in row.key:
            group, _, choice = row.needs.split(" or ")[0].partition("=")
            of = group if group in AXES else row.needs.split(" or ")[0]  # all parts of an axis stand in one sweep
            by_choice[of].append(row.key)
            chosen[of][choice.strip("[]")] = None
    found = [row.key for row in rows if "<" not in row.key and row.key.startswith(ADDED)]  # Hydra takes any key there
    for needs, keys in by_choice.items():
        given = [f"{needs}=[{','.join(chosen[needs])}]" if needs in AXES else needs] * bool(needs)
        dotted = [f"{key}=null" for key in keys if "." in key or not is_choice(root, key)]
        try:
            compose(root, Invocation.of([*given, *dotted]))
        except ValueError as error:
            found.append(str(error))
    return found


def is_choice(root, key):
    """Whether the key chooses a yaml, so that the page's default would have to be one."""
    return (FILE.parent.parent / "conf" / key).is_dir()


@pytest.mark.parametrize("root", SPECS)
def test_every_field_of_a_command_is_on_the_page(settings_page, root):
    assert missing(SPECS[root], settings_page.command(root)) == []


@pytest.mark.parametrize("root", SPECS)
def test_every_key_on_the_page_is_known_to_the_command(settings_page, root):
    assert unknown(root, settings_page.command(root)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_part_is_on_the_page_as_it_is_typed(settings_page, family):
    registry, tables = Registry(family), settings_page.parts()
    rows = {name: tables[f"{registry.noun} {name}"] for name in registry.names()}
    assert [missing(registry.load(name).Config, rows[name]) for name in rows] == [[] for _ in rows]
    assert unknown("sweep", [row for each in rows.values() for row in each]) == []


def test_what_is_filled_in_is_read_as_the_page_says(settings_page):
    """One word for each key with something to fill in, filled in, is a sweep that is accepted."""
    from stability.cli.compose import read

    keys = {row.key for row in settings_page.command("sweep") if "<" in row.key}
    filled = {
        "ablate.<part>.<setting>": "ablate.sc.window=[2,4]",
        "cross.<part>.<setting>": "cross.cc.window=3",
        "optimizer.groups.<role>.lr_scale": "optimizer.groups.mixer.lr_scale=0.5",
        "optimizer.groups.<role>.<setting>": "optimizer.groups.head.weight_decay=0.1",
        "search.space.<field>": "search.space.lr_peak={low:1e-4,high:1e-2}",
        "search.space.<field>.low": "search.space.lr_peak.low=2e-4",
        "search.space.<field>.high": "search.space.lr_peak.high=2e-2",
        "search.space.<field>.log": "search.space.lr_peak.log=true",
    }
    assert keys == set(filled)
    of_search = [word for key, word in filled.items() if key.startswith("search.")]
    others = [word for key, word in filled.items() if not key.startswith("search.")]
    shared = ["mechanism=[sc]", "cross=auto", "objective.context=64", "name=mine"]
    spec = read(SPECS["sweep"], Invocation.of([*shared, *others]))
    assert (
        spec.ablate[0].path == "ablate.sc.window"
        and {item.name: item for item in spec.cross.parts}["cc"].settings.window == 3
    )
    assert [(group.role, group.written()) for group in spec.optimizer[0].groups] == [
        ("mixer", {"lr_scale": 0.5}),
        ("head", {"weight_decay": 0.1}),
    ]
    space = read(SPECS["sweep"], Invocation.of(["search=optuna", *of_search[1:]])).search.space
    assert [(item.path, item.low, item.high, item.log) for item in space] == [("lr_peak", 2e-4, 2e-2, True)]
    space = read(SPECS["sweep"], Invocation.of(["search=optuna", of_search[0]])).search.space
    assert [(item.path, item.low, item.high) for item in space] == [("lr_peak", 1e-4, 1e-2)]


def test_a_key_that_cannot_be_typed_and_a_field_that_is_missing_are_seen(settings_page):
    rows = settings_page.command("sweep")
    assert missing(SPECS["sweep"], [row for row in rows if row.key != "search.quantile"]) == ["PbtSpec.quantile"]
    assert unknown("sweep", [settings_page.Row("steps.many", "", "")])
    assert unknown("sweep", [settings_page.Row("search.space.low", "", "", "search=optuna")]) == ["search.space.low"]
