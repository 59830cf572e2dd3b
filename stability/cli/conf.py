"""Read what conf/ offers, and say of a word on the command line that it does not: one line, with the nearest word that
would be right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.config.base import AXES
from stability.registry import near_misses

PREFERRED = "text"  # of several choices that have a setting the one that is meant most often


def conf_dir() -> Path:
    """Return the Hydra folder: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def choices(group: str) -> tuple[str, ...]:
    """Return the names that ``group=NAME`` takes: the yamls of conf/<group>."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def defaults(config: str) -> dict[str, str]:
    """Return the choices that a yaml's defaults list makes, those of the yamls that it builds on included."""
    found: dict[str, str] = {}
    for entry in _plain(config).get("defaults", []):
        if isinstance(entry, dict):
            found |= {key.removeprefix("override /"): choice for key, choice in entry.items()}
        elif entry != "_self_":
            found |= defaults(_base(config, entry))
    return found


def keys_said(config: str) -> set[str]:
    """Return the outermost keys that a yaml gives values to, those of the yamls that it builds on included."""
    values = _plain(config)
    bases = [entry for entry in values.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return {str(key) for key in values}.union(*(keys_said(_base(config, entry)) for entry in bases))


def _plain(config: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(conf_dir() / f"{config}.yaml"))  # type: ignore[return-value]


def _base(config: str, entry: str) -> str:
    """Return the yaml that another one's defaults list names, which stands beside it."""
    return str(Path(config).parent / entry)


def unknown_key(key: str, root: str, chosen: Mapping[str, str]) -> str:
    """Say what is wrong with a key that the config does not have. ``chosen``: the choices that the command line makes,
    by group. What another choice has is named as that choice's, not as a slip of the pen."""
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
    """Return the key of the same group for a setting of the same name, e.g. for ``cross.cc.window`` where cc is the
    choice: ``cross.window``."""
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    return next((other for other in known if other.startswith(f"{group}.") and other.endswith(f".{last}")), None)


def _owners(group: str, setting: str) -> list[str]:
    """Return the choices of a group whose yaml has the setting, e.g. of ``objective`` and ``context``: mlm."""
    from omegaconf import OmegaConf

    return [
        name
        for name in choices(group)
        if setting and setting in list(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    ]


def _keys(root: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return the dotted keys of the root config with what is chosen."""
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
