"""What the markers at the fields do to an id, and that they stand where they must."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from stability import registry
from stability.config import Settings
from stability.config.identity import (
    UNMARKED,
    Bare,
    Family,
    Fingerprinted,
    Place,
    Since,
    drop_excluded,
    essence,
    family_of,
    fill_newer_fields,
    group_of,
    is_same_run,
    run_id,
    tokenizer_id,
)
from stability.config.parse import parse_run
from stability.config.parts import Part, one_part
from stability.config.run import RunSpec
from stability.config.tokenizer import TokenizerRunSpec
from stability.registry import FAMILIES, Registry
from stability.runs.directory import RunDirectory, read_json, write_json
from stability.structure.tokenizer import directory_of
from tests.identity.golden_ids import BASE, TOKENIZER_BASE, tokenizer_of

ELSEWHERE = "/an/absolute/place (of 1, or 2)"
PROTEINS = {"name": "multitrack", "sources": ["sequence"], "contexts": []}
# Settings that take any text and are no paths: names within the data.
NAMES = {("text", "field"), ("hf", "field"), ("hf", "subset"), ("hf", "revision"), ("hf", "split")}


def free_texts(config: type[BaseModel]) -> list[str]:
    """The fields that take text of the user's own, alone or in a tuple."""

    def takes_text(annotation: Any) -> bool:
        if get_origin(annotation) is Literal:
            return False
        return annotation is str or any(takes_text(item) for item in get_args(annotation))

    patterned = [
        key
        for key, field in config.model_fields.items()
        if any(getattr(mark, "pattern", None) for mark in field.metadata)
    ]
    return [key for key, field in config.model_fields.items() if takes_text(field.annotation) and key not in patterned]


def own_parts() -> list[tuple[str, str]]:
    return [
        (family, name)
        for family in FAMILIES
        for name in Registry(family).names()
        if (family, name) not in registry._plugins
    ]


@pytest.mark.parametrize(("family", "name"), own_parts())
def test_every_text_of_a_part_is_a_place_or_known_not_to_be_one(family, name):
    """A path in a field that no marker calls a place would enter the ids."""
    config = Registry(family).load(name).Config
    texts = [key for key in free_texts(config) if (name, key) not in NAMES and (name, key) != ("mix", "pattern")]
    unmarked = [key for key in texts if not any(isinstance(mark, Place) for mark in config.model_fields[key].metadata)]
    assert unmarked == []


def test_the_places_are_those():
    found = (
        {(name, key) for family, name in own_parts() for key in free_texts(Registry(family).load(name).Config)}
        - NAMES
        - {("mix", "pattern")}
    )
    paths = {(name, "path") for name in ("text", "dna", "images", "protein", "pairs")}
    assert found == paths | {("text", "ranks"), ("hf", "ranks"), ("hf", "dataset"), ("protein", "annotations")}
    of_a_run = {key for key in free_texts(RunSpec) if key != "plugins"}
    assert of_a_run == {"data_fingerprint"}


@pytest.mark.parametrize(
    "data",
    [
        {"name": "text", "path": ELSEWHERE},
        {"name": "text", "path": "a", "tokenizer": "gpt2", "ranks": ELSEWHERE},
        {"name": "dna", "path": ELSEWHERE},
        {"name": "hf", "dataset": ELSEWHERE},
        {"name": "hf", "dataset": "~/folder"},
        {"name": "hf", "dataset": "./a"},
        {"name": "hf", "dataset": "../a/b"},
        {"name": "hf", "dataset": "a/b/c"},
        {"name": "hf", "dataset": "a b"},
        {"name": "hf", "dataset": "a/b", "tokenizer": "gpt2", "ranks": ELSEWHERE},
        {"name": "images", "path": ELSEWHERE},
        {"name": "protein", "path": ELSEWHERE, "annotations": ELSEWHERE},
    ],
)
def test_no_place_is_in_an_id(data):
    outer = {
        "images": {"objective": "classify"},
        "protein": {"objective": {"name": "multitrack", "sources": ["sequence"], "contexts": []}},
    }.get(data["name"], {})
    spec = parse_run(BASE | outer | {"data": data})
    written = json.loads(essence(spec))["data"]
    assert {
        value
        for key, value in data.items()
        if isinstance(value, str) and ("/" in value or " " in value) and value != "a/b"
    }.isdisjoint(written.values())
    moved = {
        key: value.replace(ELSEWHERE, "/moved") if isinstance(value, str) else value for key, value in data.items()
    }
    again = parse_run(BASE | outer | {"data": moved})
    assert run_id(again) == run_id(spec)
    assert run_id(parse_run(BASE | outer | {"data": data, "data_fingerprint": "0" * 64})) != run_id(spec), (
        "the fingerprint says what the data are"
    )


def test_a_name_on_the_hub_is_in_the_id_and_the_same_content_from_a_folder_is_another_run():
    ids = [
        run_id(parse_run(BASE | {"data": {"name": "hf", "dataset": name}}))
        for name in ("a/b", "a/c", "wikitext", "/a/b")
    ]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("data", "moved"),
    [
        (
            {"name": "text", "path": "a", "tokenizer": "gpt2", "ranks": "/here"},
            {"name": "text", "path": "a", "tokenizer": "gpt2", "ranks": "/there"},
        ),
        ({"name": "protein", "annotations": "/here/x.tsv"}, {"name": "protein", "annotations": "/there/y.tsv"}),
        ({"name": "hf", "dataset": "/here"}, {"name": "hf", "dataset": "/there"}),
    ],
)
def test_a_run_goes_on_where_its_ranks_annotations_or_dataset_have_been_moved(data, moved, tmp_path):
    outer = {"objective": PROTEINS} if data["name"] == "protein" else {}
    first, second = (parse_run(BASE | outer | {"data": each}) for each in (data, moved))
    assert run_id(first) == run_id(second)
    directory = RunDirectory(tmp_path, run_id(first))
    directory.write_spec(first.model_dump(mode="json"))
    directory.write_spec(second.model_dump(mode="json"))
    with pytest.raises(ValueError, match="is the spec of another run"):
        directory.write_spec(second.model_copy(update={"seed": 1}).model_dump(mode="json"))


def test_the_data_sources_of_ours_mark_what_used_to_be_left_out_by_name():
    for name in (name for family, name in own_parts() if family == "data"):
        fields = Registry("data").load(name).Config.model_fields
        for key in set(UNMARKED) & set(fields):
            assert any(isinstance(mark, Place | Fingerprinted) for mark in fields[key].metadata), (name, key)


def test_an_older_tokenizers_folder_is_that_tokenizers(tmp_path):
    """Written before sc had graphs: the settings that are younger are not in it."""
    spec = tokenizer_of(TOKENIZER_BASE | {"mechanism": "sc"})
    directory = directory_of(tmp_path, tokenizer_id(spec))
    values = spec.model_dump(mode="json")
    old = values | {
        "mechanism": {
            key: value for key, value in values["mechanism"].items() if key not in ("graph", "iterations", "step")
        }
    }
    write_json(directory.spec_file, old)
    directory.write_spec(values | {"data": {"name": "protein", "path": "elsewhere"}}, TokenizerRunSpec)
    assert read_json(directory.spec_file) == old
    with pytest.raises(ValueError, match="is the spec of another run"):
        directory.write_spec(values | {"mechanism": {**values["mechanism"], "graph": "cycle"}}, TokenizerRunSpec)


def neutral_values(config: type[BaseModel], name: str = "") -> dict[str, Any]:
    marks = [
        (key, mark) for key, field in config.model_fields.items() for mark in field.metadata if isinstance(mark, Since)
    ]
    return {key: mark.neutral for key, mark in marks if not mark.of or name in mark.of}


def test_every_neutral_value_is_one_that_its_field_can_hold():
    groups = [
        field.annotation
        for field in RunSpec.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
    ]
    configs = [(group, "") for group in groups if group is not Part] + [
        (Registry(family).load(name).Config, name) for family, name in own_parts()
    ]
    seen = 0
    for config, name in configs:
        for key, value in neutral_values(config, name).items():
            given = {"path": "a"} if name == "text" else {"dataset": "a/b"} if name == "hf" else {}
            more = {"every_steps": 1} if key == "keep_last" else {}
            missing = [(field, info) for field, info in config.model_fields.items() if info.is_required()]
            required: dict[str, Any] = {
                field: 1 if field == "heads" else 2 for field, info in missing if info.annotation is int
            }
            required |= {field: "constant" for field, _ in missing if field == "name"}
            assert getattr(config(**{**required, **given, **more, key: value}), key) == value
            seen += 1
    assert seen >= 16


def test_every_part_that_a_since_is_of_exists():
    names = {name for _, name in own_parts()}
    for family, name in own_parts():
        for field in Registry(family).load(name).Config.model_fields.values():
            assert all(set(mark.of) <= names for mark in field.metadata if isinstance(mark, Since))


# a new field of any part of the spec: what it would be for a run from before it


class Size(Settings):
    name: str
    width: int
    std: Annotated[float, Since(1.0)] = 0.5  # the default went its way later


class Norm(Settings):
    name: Literal["layernorm", "rmsnorm"]
    epsilon: Annotated[float, Since(1e-5)] = 1e-5
    bias: Annotated[bool, Since(True)] = True


class Recipe(Settings):
    model: Size
    norm: Annotated[Norm, Bare()]
    optimizer: Annotated[Part, one_part("optimizers")]
    deep: Annotated[dict[str, int] | None, Since(None)] = None


OLD = {"model": {"name": "nano", "width": 8}, "norm": "layernorm", "optimizer": {"name": "adamw", "beta1": 0.9}}


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"model": {"name": "nano", "width": 8, "std": 1.0}}, True),
        ({"model": {"name": "nano", "width": 8, "std": 0.5}}, False),
        ({"norm": {"name": "layernorm"}}, True),
        ({"norm": {"name": "layernorm", "epsilon": 1e-5, "bias": True}}, True),
        ({"norm": {"name": "layernorm", "epsilon": 1e-6, "bias": True}}, False),
        ({"norm": {"name": "rmsnorm", "epsilon": 1e-5, "bias": True}}, False),
        ({"norm": "rmsnorm"}, False),
        ({"optimizer": {"name": "adamw", "beta1": 0.9, "decay": "all"}}, True),
        ({"optimizer": {"name": "adamw", "beta1": 0.9, "decay": "matrices"}}, False),
        ({"deep": None}, True),
        ({"deep": {"a": 1}}, False),
    ],
)
def test_a_new_field_of_any_part_of_a_spec_can_leave_old_runs_their_ids(changes, is_same):
    assert is_same_run(OLD, OLD | changes, Recipe) is is_same
    assert (drop_excluded(OLD | changes, Recipe) == OLD) is is_same


class LayerNorm:
    class Config(Settings):
        epsilon: Annotated[float, Since(1e-5)] = 1e-5


class Norms:
    """A family that there is not yet."""

    def __init__(self, family: str):
        assert family == "norms"

    def names(self) -> tuple[str, ...]:
        return ("layernorm",)

    def load(self, name: str) -> Any:
        return {"layernorm": LayerNorm}[name]


class WithNorms(Settings):
    norm: Annotated[Part, Family("norms"), Bare()]


def test_norm_could_become_a_part_of_a_family_of_its_own(monkeypatch):
    """From ``"layernorm"`` to ``{"name": "layernorm", …settings}``, and no id moves."""
    monkeypatch.setattr("stability.config.identity.Registry", Norms)
    assert (
        drop_excluded({"norm": {"name": "layernorm", "epsilon": 1e-5}}, WithNorms)
        == {"norm": "layernorm"}
        == drop_excluded({"norm": "layernorm"}, WithNorms)
    )
    assert drop_excluded({"norm": {"name": "layernorm", "epsilon": 1e-6}}, WithNorms) == {
        "norm": {"name": "layernorm", "epsilon": 1e-6}
    }
    assert drop_excluded({"norm": {"name": "unknown", "epsilon": 1e-5}}, WithNorms) == {
        "norm": {"name": "unknown", "epsilon": 1e-5}
    }


def test_the_fields_say_what_is_in_them():
    families = {key: family_of(field.metadata) for key, field in RunSpec.model_fields.items()}
    found = {key: family for key, family in families.items() if family}
    assert found == {
        "objective": "objectives",
        "data": "data",
        "mechanism": "mechanisms",
        "cross": "mechanisms",
        "residual": "residuals",
        "optimizer": "optimizers",
        "norm": "norms",
        "ffn": "ffns",
        "position": "positions",
        "linear": "linears",
        "parametrization": "parametrizations",
    }
    parts = {
        key
        for spec in (RunSpec, TokenizerRunSpec)
        for key, field in spec.model_fields.items()
        if group_of(field.annotation) is Part
    }
    assert parts == set(found)


def test_an_old_file_has_the_neutral_values_whatever_the_defaults_are_today():
    class Group(Settings):
        old: int = 1
        young: Annotated[int, Since(2)] = 3

    class Whole(Settings):
        group: Group = Group()
        younger: Annotated[Group, Since({})] = Group(young=4)
        own: Annotated[int, Since(5, of=("other",))] = 6

    assert fill_newer_fields({"group": {"old": 7}}, Whole) == {"group": {"old": 7, "young": 2}, "younger": {"young": 2}}
    assert fill_newer_fields({"group": {"young": 8}, "younger": {"young": 9}}, Whole) == {
        "group": {"young": 8},
        "younger": {"young": 9},
    }


def test_a_run_s_file_from_before_a_setting_is_read_as_what_it_did(monkeypatch):
    config = Registry("mechanisms").load("sc").Config
    field = config.model_fields["iterations"]
    monkeypatch.setattr(field, "default", 3)
    config.model_rebuild(force=True)
    try:
        sc = {"name": "sc", "window": 2}
        assert parse_run(BASE | {"mechanism": sc}).mechanism.settings.iterations == 1
        assert (
            parse_run(BASE | {"mechanism": {"name": "mix", "pattern": ["sc"], "parts": [sc]}})
            .mechanism.settings.parts[0]
            .settings.iterations
            == 1
        )
        assert config().iterations == 3
    finally:
        monkeypatch.undo()
        config.model_rebuild(force=True)
