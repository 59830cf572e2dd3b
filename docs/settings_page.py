"""A hook of mkdocs: the page of all settings, written from the schema when the documentation is built, so that it
cannot be out of date."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stability.cli.conf import AXES, choices, conf_dir, defaults
from stability.cli.words import OF_EVERY_MODEL, SHORT
from stability.config.ablation import Ablation, value_text
from stability.config.base import Settings
from stability.config.cross import CrossOfEach
from stability.config.groups import GROUPS, ROLES, Group
from stability.config.identity import family_of
from stability.config.parse import SPECS
from stability.config.parts import Part
from stability.config.search import Dimension
from stability.registry import FAMILIES, Registry

PAGE = "reference/settings.md"
INTRODUCTION = f"""# Settings

Every key of every command, with its default and its meaning, from the schema that validates them. `conf/` holds the same as yaml. A key is written as
`key=value`, one of a group as `group.key=value`, e.g. `evaluation.every_steps=50`. What stands in `<…>` is yours to fill in. A role is one of
{", ".join(f"`{role}`" for role in ROLES)}. Where a meaning begins with a choice, as `search=asha`, the key is there with that choice.
"""
PARTS = """
## Parts

The keys are those of `stability.sweep`. `stability.train_tokenizer` has the same; of data, objective and the like only those of the part that is chosen are there.
"""
# Of classes that are written with names of the user's in the key: each key, and the fields that it stands for.
WRITTEN: dict[type[BaseModel], dict[str, tuple[str, ...]]] = {
    Ablation: {"<part>.<setting>": ("part", "setting", "values")},
    CrossOfEach: {"<part>.<setting>": ("parts",)},
    Dimension: {"<field>": ("path",), "<field>.low": ("low",), "<field>.high": ("high",), "<field>.log": ("log",)},
    Group: {"<role>.lr_scale": ("role", "lr_scale"), "<role>.<setting>": ("role", "settings")},
}


class Row(NamedTuple):
    """One key of a table with its default and its meaning; ``needs``: the choice with which it is there, as
    ``search=asha``, empty where it always is."""

    key: str
    default: str
    meaning: str
    needs: str = ""


def on_files(files: Files, config: Any) -> Files:
    """Add the page to the documentation's files."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Return the whole page: a table for each command, then one for each part that has settings."""
    commands = "".join(f"\n## stability.{name}\n\n{_table(command(name))}" for name in SPECS)
    own = "".join(
        f"\n### {title}\n\n{_table(row._replace(needs='') for row in found) or 'It has no settings.'}\n"
        for title, found in parts().items()
    )
    return f"{INTRODUCTION}{commands}{PARTS}{own}"


def command(root: str) -> list[Row]:
    """Return the rows of an entry: its presets, then its fields."""
    schema = SPECS[root]
    presets = [name for name in defaults(root) if "@" not in name and name not in schema.model_fields]
    asked = [Row(name, str(defaults(root)[name]), f"a preset of several keys: {_yamls(name)}") for name in presets]
    return asked + [row if row.needs else row._replace(needs=_needs(root, row.key)) for row in rows(schema)]


def parts() -> dict[str, list[Row]]:
    """Return the rows of every part's own settings by its title."""
    found: dict[str, list[Row]] = {}
    for family in FAMILIES:
        registry = Registry(family)
        for name in registry.names():
            part = registry.load(name)
            group = "cross" if getattr(part, "cross", False) else registry.noun.removesuffix(" source")
            needs = f"{group}=[{name}]" if group in AXES else f"{group}={name}"
            prefix = f"{group}.{name}." if group in AXES else f"{group}."
            found[f"{registry.noun} {name}"] = [row._replace(needs=needs) for row in rows(part.Config, prefix)]
    return found


def rows(schema: type[BaseModel], prefix: str = "", needs: str = "") -> Iterator[Row]:
    """Yield the keys of a class's fields as they are typed, those of groups in their place, of a union of groups those
    of all its members."""
    for written, names in WRITTEN.get(schema, {}).items():
        fields = {name: schema.model_fields[name] for name in names}
        told = [f"<{name}>: " * (f"<{name}>" in written) + _told(field) for name, field in fields.items()]
        default = "" if written.endswith(">") else _default(fields[names[-1]])
        yield Row(f"{prefix}{written}", default, "; ".join(told), needs)
    for name, field in {} if schema in WRITTEN else schema.model_fields.items():
        if issubclass(schema, Settings) and name == schema.written_flat:
            groups = list(_groups(field.annotation)) or [type(field.get_default(call_default_factory=True))]
            yield from rows(groups[0], prefix, needs)
        else:
            yield from _of_field(name, field, prefix, needs)


def _of_field(name: str, field: FieldInfo, prefix: str, needs: str) -> Iterator[Row]:
    """Yield the rows of one field."""
    groups, key = list(_groups(field.annotation)), f"{prefix}{name}"
    if Part in groups:
        yield from _of_part(name, field, prefix, needs)
    elif len(groups) > 1:  # a union, whose members have names
        names = {group: get_args(group.model_fields["name"].annotation)[0] for group in groups}
        told = _told(groups[0].model_fields["name"])
        yield Row(key, _default(field), f"{_told(field)}; {told}: {', '.join(names.values())}", needs)
        for group, choice in names.items():
            yield from (row for row in rows(group, f"{key}.", f"{key}={choice}") if row.key != f"{key}.name")
    elif groups:
        if not prefix and (key in SHORT or choices(key)):
            yield Row(key, _default(field), _told(field) + (f": {_yamls(key)}" if choices(key) else ""), needs)
        yield from rows(groups[0], f"{key}.", needs)
    else:
        yield Row(key, _default(field), _told(field) or name, needs)


def _of_part(name: str, field: FieldInfo, prefix: str, needs: str) -> Iterator[Row]:
    """Yield the rows of a field that holds parts: itself, and keys of its parts that hold for several of them."""
    if prefix:  # a part within a part
        if name != "parts":
            yield Row(f"{prefix}{name}", _default(field), _told(field), needs)
        yield Row(f"{prefix}<part>.<setting>", "", f"{_told(field)}; as in the tables of these parts", needs)
        return
    yield Row(name, _default(field), f"{_told(field)}; its settings: Parts, below", needs)
    if CrossOfEach in _groups(field.annotation):
        yield from rows(CrossOfEach, f"{name}.", f"{name}=auto")
    if family_of(field.metadata) == "optimizers":
        yield from rows(Group, f"{name}.{GROUPS}.", needs)


def _groups(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every class of settings that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for item in get_args(annotation):
            yield from _groups(item)


def _needs(root: str, key: str) -> str:
    """Return the choices whose yaml has a key that the entry's own choice of its group has not."""
    group, _, setting = key.partition(".")
    if not setting or group not in defaults(root) or group in AXES or key in OF_EVERY_MODEL:
        return ""
    head = setting.partition(".")[0]
    if head in choices(group):
        return f"{group}={head}"
    yamls = {name: OmegaConf.load(conf_dir() / group / f"{name}.yaml") for name in choices(group)}
    owners = [name for name, held in yamls.items() if head in held]
    return "" if defaults(root)[group] in owners else " or ".join(f"{group}={name}" for name in owners)


def _yamls(group: str) -> str:
    return ", ".join(choices(group))


def _told(field: FieldInfo) -> str:
    return field.description or ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(from the yaml)"
    value = field.get_default(call_default_factory=True)
    return "(from the yaml)" if isinstance(value, BaseModel) else value_text(value) or '""'


def _table(found: Iterable[Row]) -> str:
    lines = [
        f"| `{row.key}` | {_cell(row.default)} | {f'`{row.needs}`: ' * bool(row.needs)}{_cell(row.meaning)} |\n"
        for row in found
    ]
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(lines) if lines else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
