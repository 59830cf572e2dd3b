"""Read the choices in conf/, and describe unknown keys with the nearest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.config.base import AXES
from stability.registry import near_misses

PREFERRED = "text"  # suggested choice if several have a setting: the most frequent one


def conf_dir() -> Path:
    """Return the Hydra folder: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def choices(group: str) -> tuple[str, ...]:
    """Return the valid names for ``group=NAME``: the yamls of conf/<group>."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def defaults(config: str) -> dict[str, str]:
    """Return the choices in a yaml's defaults list by group, its base yamls included."""
    found: dict[str, str] = {}
    for entry in _plain(config).get("defaults", []):
        if isinstance(entry, dict):
            found |= {key.removeprefix("override /"): choice for key, choice in entry.items()}
        elif entry != "_self_":
            found |= defaults(_base(config, entry))
    return found


def keys_said(config: str) -> set[str]:
    """Return the top-level keys set by a yaml, its base yamls included."""
    values = _plain(config)
    bases = [entry for entry in values.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return {str(key) for key in values}.union(*(keys_said(_base(config, entry)) for entry in bases))


def _plain(config: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{config}.yaml"))  # type: ignore[return-value]


def _base(config: str, entry: str) -> str:
    """Return the path of a yaml named in another yaml's defaults list; they are in one folder."""
    return str(Path(config).parent / entry)


def unknown_key(key: str, root: str, chosen: Mapping[str, str]) -> str:
    """Describe a key missing from the config in one line.

    A setting of another choice is reported as such, not as a misspelling.

    Args:
        key: the key.
        root: name of the entry's root yaml.
        chosen: the choices on the command line, by group.
    """
    group, _, setting = key.partition(".")
    name, known = setting.partition(".")[0], _keys(root, chosen)
    if group in AXES and name in choices(group) and f"{group}.{name}" not in known:
        return f"{key}: {group}.{name} is not among what this command selects; add {group}=[…,{name}]"
    if group not in AXES:
        if namesake := _namesake(key, known):
            return f"{key}: unknown key; did you mean '{namesake}'?"
        if owners := _owners(group, setting):
            other = f"{group}={chosen[group]}" if group in chosen else "the one that is chosen"
            likely = PREFERRED if PREFERRED in owners else owners[0]
            add = "" if group in chosen else f"; add {group}={likely}"
            return (
                f"{key}: {group}={' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} this setting, "
                f"{other} has not{add}"
            )
    return f"{key}: unknown key; {near_misses(key, known)}"


def _namesake(key: str, known: tuple[str, ...]) -> str | None:
    """Return the key of a setting with the same name and group, or None."""
    # e.g. cross.window for cross.cc.window if cc is the choice
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    return next((other for other in known if other.startswith(f"{group}.") and other.endswith(f".{last}")), None)


def _owners(group: str, setting: str) -> list[str]:
    """Return the choices of a group with the setting, e.g. mlm for objective and context."""
    from omegaconf import OmegaConf

    return [
        name
        for name in choices(group)
        if setting and setting in list(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    ]


def _keys(root: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return the dotted keys of the root config with the given choices."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    flat: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            flat.append(f"{prefix}{key}")
            walk(value, f"{prefix}{key}.")

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        walk(
            OmegaConf.to_container(compose(root, overrides=[f"{group}={choice}" for group, choice in chosen.items()])),
            "",
        )
    return tuple(flat)
