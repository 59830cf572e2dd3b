"""Settings read from a file's text are those that pydantic makes of the same file."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from typing import Literal

import pytest
from annotated_types import Gt

from stability import registry
from stability.cli import declared as reading
from stability.cli.conf import FAMILY_OF, choices, declared_choices, values_of
from stability.cli.declared import Kind, Setting, kind_of, read_attribute, read_settings
from stability.registry import FAMILIES, Registry

PARTS = [(family, name) for family in FAMILIES for name in Registry(family).names()]


def of_pydantic(family: str, name: str, config: str = "Config") -> dict[str, Setting]:
    fields = getattr(Registry(family).load(name), config).model_fields
    return {
        key: Setting(
            "???" if field.is_required() else listed(field.get_default(call_default_factory=True)), field.description
        )
        for key, field in fields.items()
    }


def listed(value):
    return [listed(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize(("family", "name"), PARTS)
def test_every_part_is_read_without_being_imported_as_pydantic_has_it(family, name):
    expected = of_pydantic(family, name)
    found = reading._read_settings(family, name, "Config")  # which imports nothing where `read_settings` might
    assert list(found) == list(expected)
    for key, setting in found.items():
        assert setting.default == expected[key].default and type(setting.default) is type(expected[key].default)
        assert setting.meaning.endswith(expected[key].meaning) and expected[key].meaning
    if family == "mechanisms":
        part = Registry(family).load(name)
        keys = (
            ("cross",)
            if part.cross
            else ("cross", "trainable", "directions", "Config.inner_directions", "Config.inner_without")
        )
        assert [reading._read_attribute(family, name, key) for key in keys] == [attrgetter(key)(part) for key in keys]
    if family == "objectives":
        sampling = of_pydantic(family, name, "Sampling")
        assert {key: each.default for key, each in read_settings(family, name, "Sampling").items()} == {
            key: each.default for key, each in sampling.items()
        }


def test_the_words_of_a_setting_are_named_before_its_meaning():
    assert read_settings("mechanisms", "sc")["graph"].meaning.startswith("window | cycle | complete | given | top_w: ")
    assert read_settings("mechanisms", "sc")["impl"].meaning.startswith("reference | triton | auto: ")
    assert read_settings("data", "dna")["hold_out"].meaning.startswith("auto | records | region: ")
    assert not read_settings("mechanisms", "sc")["window"].meaning.startswith("2")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A part in a package of its own that stands where ``stability`` does."""
    monkeypatch.setattr(reading, "ROOT", tmp_path / "stability")
    (tmp_path / "stability" / "ffns").mkdir(parents=True)
    for each in (reading._names, reading._read_settings, reading._read_attribute):
        each.cache_clear()

    def written(text: str) -> dict[str, Setting]:
        (tmp_path / "stability" / "ffns" / "novel.py").write_text(text)
        return reading._read_settings("ffns", "novel", "Config")

    yield written
    for each in (reading._names, reading._read_settings, reading._read_attribute):
        each.cache_clear()


@pytest.mark.parametrize(
    "default", ["math.sqrt(2)", "1 / 3", "elsewhere", "f'{1}'", "Other.value", "[x for x in (1, 2)]"]
)
def test_a_default_that_is_no_literal_is_refused_and_not_guessed(default, own):
    with pytest.raises(reading.Unreadable):
        own(
            f"class Config:\n    a: float = Field(default={default})\nclass Novel:\n    Config = Config\nEXPORT = Novel\n"
        )


def test_a_file_that_is_no_python_is_named_with_its_line(own):
    with pytest.raises(ValueError, match=r"^\S*/stability/ffns/novel\.py:2: .*: class Novel\($"):
        own("import math\nclass Novel(\n")


def test_a_file_without_a_part_is_named(monkeypatch):
    monkeypatch.setitem(registry._plugins, ("ffns", "sizes"), "tests.sizes")
    with pytest.raises(ValueError, match=r"^tests\.sizes has no EXPORT = YourClass$"):
        Registry("ffns").load("sizes")


def test_a_part_that_cannot_be_read_is_imported(monkeypatch):
    def refuse(*_):
        raise reading.Unreadable

    monkeypatch.setattr(reading, "_read_settings", refuse)
    monkeypatch.setattr(reading, "_read_attribute", refuse)
    assert read_settings("mechanisms", "sw")["window"] == Setting(
        2, read_settings("mechanisms", "sw")["window"].meaning, Kind("integer", (), (("minimum", 1),))
    )
    assert read_attribute("mechanisms", "cc", "cross") is True


def test_groups_of_parts_offer_each_part_once():
    mechanisms = Registry("mechanisms")
    assert declared_choices("mechanism") == mechanisms.names(cross=False)
    assert choices("cross") == tuple(sorted(("auto", "none", *mechanisms.names(cross=True))))
    for group, family in FAMILY_OF.items():
        if family != "mechanisms":
            assert choices(group) == Registry(family).names()
    assert values_of("cross", "auto") == {
        "name": "auto",
        "ca": values_of("cross", "ca"),
        "cc": values_of("cross", "cc"),
    }


def test_no_choice_of_a_command_line_needs_torch():
    code = """
import sys
from stability.cli import source, settings
from stability.cli.conf import FAMILY_OF, choices, values_of
from stability.cli.words import CHOICES
for group in CHOICES:
    for name in choices(group):
        settings.choice_rows(group, name)
for root in settings.SPECS:
    settings.command_rows(root)
assert "torch" not in sys.modules
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (out.returncode, out.stderr) == (0, "")


@pytest.mark.parametrize(("family", "name"), PARTS)
def test_every_setting_takes_the_values_that_pydantic_says(family, name):
    fields = Registry(family).load(name).Config.model_fields
    found = reading._read_settings(family, name, "Config")
    assert {key: each.kind for key, each in found.items()} == {
        key: kind_of(field.annotation, field.metadata) for key, field in fields.items()
    }


def test_a_kind_is_told_in_words_and_as_json_schema():
    kind = read_settings("mechanisms", "sc")["rank"].kind
    assert (str(kind), kind.to_json()) == (
        "integer ≥ 0, ≤ 65536",
        {"type": "integer", "minimum": 0, "maximum": 65536},
    )
    assert read_settings("data", "text")["path"].kind.type == "path"
    assert kind_of(tuple[Literal["a", "b"], ...] | None) == Kind("text", ("a", "b"), is_list=True, is_optional=True)
    assert str(kind_of(float | None, [Gt(0)])) == "number > 0, or null"
