"""List the choices of each group, and the default values of choices and commands.

Defaults come from the classes of `stability.config` and from the Configs of parts. A yaml in conf/ is a preset: its
values have precedence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from stability.cli.declared import plain_default, read_attribute, read_settings
from stability.config.ablation import exact_text
from stability.config.base import AXES, Settings
from stability.config.curvature import CurvatureSpec
from stability.config.parse import SPECS
from stability.config.search import KINDS
from stability.config.training import ScheduleSpec
from stability.registry import FAMILIES, Registry, near_misses, plugins_of

PREFERRED = "text"  # suggested choice if several have a setting: the most frequent one
OF_SPEC = "settings"  # folder of the generated configs with a command's settings, named in its yaml's defaults list
FAMILY_OF = {family.removesuffix("s"): family for family in FAMILIES} | {"cross": "mechanisms"}  # of a group of parts
GLOBAL = ("study", "size")  # presets of the whole command, whose keys have no prefix
NO_PART = {"cross": ("auto", "none")}  # choices without code


def conf_dir() -> Path:
    """Return the Hydra folder: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def is_group(key: str) -> bool:
    """Return whether a key chooses among named choices."""
    return key in FAMILY_OF or key in _groups_of_specs() or (conf_dir() / key).is_dir()


def yamls(group: str) -> tuple[str, ...]:
    """Return the choices of a group with a yaml."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def choices(group: str) -> tuple[str, ...]:
    """Return the valid names for ``group=NAME``."""
    return tuple(sorted({*yamls(group), *declared_choices(group)}))


def declared_choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group that need no yaml: parts, and variants of a spec's class."""
    if group not in FAMILY_OF:
        return tuple(_groups_of_specs().get(group, ()))
    names = Registry(FAMILY_OF[group]).names()
    if FAMILY_OF[group] == "mechanisms":
        names = tuple(name for name in names if read_attribute("mechanisms", name, "cross") == (group == "cross"))
    return (*NO_PART.get(group, ()), *names)


def values_of(group: str, name: str) -> dict[str, Any]:
    """Return the default settings of a choice without a yaml, as plain values."""
    if group in AXES:
        return _collect_part_defaults(group, name)
    if name in NO_PART.get(group, ()):
        inner = declared_choices(group) if name == "auto" else ()
        return {key: values_of(group, key) for key in inner if key not in NO_PART[group]} | {"name": name}
    if group in FAMILY_OF:
        return {"name": name} | _collect_part_defaults(group, name)
    return dict(_groups_of_specs()[group][name])


def keys_of(group: str, name: str) -> tuple[str, ...]:
    """Return the settings of a choice."""
    return tuple(preset_values(group, name))


def preset_values(group: str, name: str) -> dict[str, Any]:
    """Return the values of a choice, from its yaml if it has one; a command's yaml has no group."""
    if group and name not in yamls(group):
        return values_of(group, name)
    return {key: value for key, value in _load_yaml(f"{group}/{name}".lstrip("/")).items() if key != "defaults"}


def preset_words(group: str, name: str) -> dict[str, str]:
    """Return the words of a command line that set everything a preset sets, its base yamls included.

    Args:
        group: the preset's group, e.g. ``study``.
        name: its name.
    """
    listed, words = _load_yaml(f"{group}/{name}").get("defaults", []), {}
    for entry in listed:
        if isinstance(entry, dict):
            words |= {key.removeprefix("override /"): exact_text(choice) for key, choice in entry.items()}
        elif not _is_generated(entry):
            words |= preset_words(group, entry)
    prefix = "" if group in GLOBAL else f"{group}."
    return words | {f"{prefix}{key}": exact_text(value) for key, value in flatten(preset_values(group, name))}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested dicts under its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def spec_values(root: str) -> dict[str, Any]:
    """Return the default settings of a command but for its groups of choices; ``???`` for one without a default."""
    return _collect_class_defaults(SPECS[root], without={group.partition("@")[0] for group in defaults(root)})


def _collect_part_defaults(group: str, name: str, owners: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a part's default settings, those of mechanisms within it included.

    Args:
        group: group of the part.
        name: name of the part.
        owners: the mechanisms around the part; it contains none of them.
    """
    values = {key: setting.default for key, setting in read_settings(FAMILY_OF[group], name).items()}
    if group != "mechanism":
        return values
    values.pop("parts", None)  # typed by the names of the parts
    directions = read_attribute("mechanisms", name, "Config.inner_directions")
    owners = (*owners, name)
    outside = {*owners, *read_attribute("mechanisms", name, "Config.inner_without"), *plugins_of("mechanisms")}
    return values | {
        inner: _collect_part_defaults(group, inner, owners)
        for inner in declared_choices(group)
        if inner not in outside and directions & read_attribute("mechanisms", inner, "directions")
    }


@cache
def _groups_of_specs() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the values of choices that are variants of a class, by group and choice."""
    schedule = _collect_class_defaults(ScheduleSpec)
    return {
        "schedule": {
            name: {"name": name, **{key: schedule[key] for key in keys}} for name, keys in ScheduleSpec.read_by.items()
        },
        "search": {"none": {"name": "none"}}
        | {name: _collect_class_defaults(spec) | {"name": name} for name, spec in KINDS.items()},
        "curvature": {"protocol": _collect_class_defaults(CurvatureSpec)},
    }


def _collect_class_defaults(
    spec: type[BaseModel], without: set[str] | None = None, *, is_left_out: bool = False
) -> dict[str, Any]:
    """Return the defaults of a class, nested ones included.

    Args:
        spec: the class.
        without: fields to leave out.
        is_left_out: whether the whole group is None unless a required setting is given; these are then None.
    """
    values: dict[str, Any] = {}
    flat = spec.written_flat if issubclass(spec, Settings) else None
    # a command's own settings before those that it shares with another class
    for key, field in sorted(spec.model_fields.items(), key=lambda item: item[0] not in spec.__annotations__):
        if key in (without or ()):
            continue
        union = () if get_origin(field.annotation) is tuple else get_args(field.annotation)
        nested: Any = next((each for each in (field.annotation, *union) if _is_spec(each)), None)
        if key == flat:  # settings of objectives' samples
            kinds = [read_settings("objectives", name, "Sampling") for name in Registry("objectives").names()]
            values |= {name: setting.default for kind in kinds for name, setting in kind.items()}
        elif nested is not None:
            values[key] = _collect_class_defaults(nested, is_left_out=not field.is_required() and field.default is None)
        else:
            values[key] = None if is_left_out and field.is_required() else plain_default(field)
    return values


def _is_spec(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def defaults(config: str) -> dict[str, str]:
    """Return the choices in a yaml's defaults list by group, its base yamls included."""
    found: dict[str, str] = {}
    for entry in _load_yaml(config).get("defaults", []):
        if isinstance(entry, dict):
            found |= {key.removeprefix("override /"): choice for key, choice in entry.items()}
        elif not _is_generated(entry):
            found |= defaults(_base(config, entry))
    return found


def list_keys(config: str) -> set[str]:
    """Return the top-level keys set by a yaml, its base yamls included."""
    values = _load_yaml(config)
    bases = [entry for entry in values.pop("defaults", []) if isinstance(entry, str) and not _is_generated(entry)]
    return {str(key) for key in values}.union(*(list_keys(_base(config, entry)) for entry in bases))


def _is_generated(entry: str) -> bool:
    """Return whether an entry of a defaults list is no other yaml."""
    return entry == "_self_" or entry.startswith(f"{OF_SPEC}/")


def _load_yaml(config: str) -> dict[str, Any]:
    """Return the values of a yaml, in its order; none without the yaml."""
    from omegaconf import OmegaConf

    file = conf_dir() / f"{config}.yaml"
    return OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}  # type: ignore[return-value]


def _base(config: str, entry: str) -> str:
    """Return the path of a yaml named in another yaml's defaults list; they are in one folder."""
    return str(Path(config).parent / entry)


def describe_unknown_key(key: str, known: tuple[str, ...], chosen: Mapping[str, str]) -> str:
    """Describe a key missing from the config in one line.

    A setting of another choice is reported as such, not as a misspelling.

    Args:
        key: the key.
        known: the dotted keys of the config.
        chosen: the choices on the command line, by group.
    """
    group, _, setting = key.partition(".")
    name = setting.partition(".")[0]
    if group in AXES and name in choices(group) and f"{group}.{name}" not in known:
        return f"{key}: this command does not select {group}.{name}; add {group}=[…,{name}]"
    if group not in AXES:
        if namesake := _namesake(key, known):
            return f"{key}: unknown key; did you mean '{namesake}'?"
        if owners := [name for name in choices(group) if setting and setting in keys_of(group, name)]:
            other = f"{group}={chosen[group]}" if group in chosen else "the chosen one"
            likely = PREFERRED if PREFERRED in owners else owners[0]
            add = "" if group in chosen else f"; add {group}={likely}"
            listed = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
            return f"{key}: {group}={listed} {'has' if len(owners) == 1 else 'have'} this setting, {other} has not{add}"
    return f"{key}: unknown key; {near_misses(key, known)}"


def _namesake(key: str, known: tuple[str, ...]) -> str | None:
    """Return the key of a setting with the same name and group, or None."""
    # e.g. cross.window for cross.cc.window if cc is the choice
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    return next((other for other in known if other.startswith(f"{group}.") and other.endswith(f".{last}")), None)
