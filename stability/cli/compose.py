"""Read a command line into a validated spec.

Hydra composes the values, `stability.config.parse` validates them. A study without a name is named by its words.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from stability.cli.conf import choices, defaults, list_keys
from stability.cli.mistakes import check_words, explain_error, shorten
from stability.cli.places import count_places
from stability.cli.words import CHOICES, SHORT, Invocation, Word
from stability.config.base import AXES, LONGEST_NAME, AnySettings, Settings, check_numbers
from stability.config.parse import SPECS, parse
from stability.config.scale import read_axes
from stability.config.sweep import SweepSpec
from stability.registry import add_plugin
from stability.startup import uncollected

# root yaml in conf/ of each entry's spec
ROOTS: dict[type[Settings], str] = {spec: root for root, spec in SPECS.items()}
PRESET_ROOT = ROOTS[SweepSpec]  # the only entry with presets, in conf/study
# a text of the user's own without study or objective: next-token prediction, by those quickstart mechanisms that can
OWN_TEXT, NEXT_TOKEN = ("text", "hf"), (Word("", "objective", "ar"), Word("", "mechanism", "[sa,sw]"))


def read(kind: type[AnySettings], invocation: Invocation) -> AnySettings:
    """Return the spec of class ``kind`` for a command line.

    Raises:
        ValueError: a word or a value is invalid; one or two lines.
    """
    return parse(kind, compose_values(kind, invocation))


def compose_values(kind: type[Settings], invocation: Invocation) -> dict[str, Any]:
    """Return the plain values of a spec, not fully validated: no torch is imported.

    Raises:
        ValueError: as in `read`.
    """
    with uncollected():
        add_listed_plugins(invocation)
        values = compose(ROOTS[kind], invocation)
        if kind is SweepSpec:
            _refuse_searched(invocation, values)
            values["name"] = study_name(invocation) if values.get("name") is None else values["name"]
            values = read_axes(values)
        check_numbers(kind, values)
        return values


def compose(root: str, invocation: Invocation) -> dict[str, Any]:
    """Return the plain dict composed from ``conf/<root>.yaml`` and the overrides.

    Raises:
        ValueError: a word is invalid; one or two lines.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from stability.cli.source import open_compose

    check_words(invocation, root)
    _refuse_repetitions(invocation)
    invocation = _add_next_token(invocation) if root == PRESET_ROOT else invocation
    try:
        with open_compose() as hydra_compose:
            config = hydra_compose(root, overrides=[str(word) for word in invocation.overrides])
            if anew := _find_replaced_groups(root, invocation):
                words = [str(word) for word in invocation.overrides if word.group in anew]
                own = hydra_compose(root, overrides=["~study", *words])  # without the preset's settings
                for group in anew:  # parts of an axis that are still chosen keep their settings from the preset
                    config[group] = {name: config[group][name] for name in own[group]} if group in AXES else own[group]
            _drop_claim(config, invocation)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    # Hydra raises ValueError itself, e.g. for ~model=7
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ValueError(explain_error(error, root, invocation)) from None


def _drop_claim(config: Any, invocation: Invocation) -> None:
    """Drop a preset's primary claim on a part that the command no longer chooses; claims on variants stay."""
    claim, names = config.get("primary"), {name for axis in AXES for name in config.get(axis) or ()}
    if claim and "primary" not in invocation.given and claim.rpartition(".")[0] not in names and "=" not in claim:
        config["primary"] = None


def _add_next_token(invocation: Invocation) -> Invocation:
    """Add next-token prediction for a text of the user's own, unless study or objective are typed."""
    given = invocation.given
    if given.get("data") not in OWN_TEXT or {"study", "objective"} & {word.group for word in invocation.words}:
        return invocation
    return Invocation((*invocation.words, *(word for word in NEXT_TOKEN if word.key not in given)))


def _refuse_repetitions(invocation: Invocation) -> None:
    """Refuse ``residual=[hc,hc]``: Hydra would silently merge them."""
    for axis, value in invocation.given.items():
        names = re.findall(r"[^\[\],\s'\"]+", value) if axis in AXES else []
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{axis}={value}: {repeated[0]} is named {names.count(repeated[0])} times; give each once")


def _refuse_searched(invocation: Invocation, values: dict[str, Any]) -> None:
    """Refuse a typed setting that every point of `search=optuna` would replace, e.g. ``search=optuna lr=1e-3``."""
    search, lr = values.get("search"), values.get("lr")
    # SweepSpec refuses lr=edge and lr=scaled beside a search
    if not isinstance(search, dict) or not isinstance(lr, dict) or lr.get("edge") or lr.get("scaled"):
        return
    for word in invocation.words:
        path = "lr_peak" if word.group == "lr" else word.key
        varied = search.get("space")
        for step in path.split("."):
            varied = varied.get(step) if isinstance(varied, dict) else None
        if word.value is not None and isinstance(varied, dict) and {"low", "high"} <= varied.keys():
            ranges = f"search.space.{path}"
            is_typed = any(f"{word.key}.".startswith(f"{ranges}.") for word in invocation.words)
            other = "that range" if is_typed else f"vary another setting instead and add {ranges}=null"
            raise ValueError(
                f"{shorten(str(word))}: search={search.get('name')} varies {path} from {varied['low']} to "
                f"{varied['high']} and would not use it; leave it out, or {other}"
            )


def _find_replaced_groups(root: str, invocation: Invocation) -> list[str]:
    """Return groups with settings in the preset but another choice in the command; axes if named."""
    given = invocation.given
    named = [group for group in CHOICES if group in given]
    if root != PRESET_ROOT or not named:
        return []
    study = f"study/{given.get('study') or defaults(root)['study']}"
    preset, said = defaults(root) | defaults(study), list_keys(study)
    return [group for group in named if group in said and (group in AXES or given[group] != preset[group])]


def list_plugins(invocation: Invocation) -> list[str]:
    """Return the modules of ``plugins=[…]``.

    Raises:
        ValueError: the value is not a list.
    """
    given = [word.value for word in invocation.words if str(word).startswith("plugins=")]
    listed = given[0] if given and given[0] is not None else "[]"
    if not re.fullmatch(r"\s*\[.*\]\s*|null", listed, re.DOTALL):
        raise ValueError(f"plugins={listed}: must be a list of modules, e.g. plugins=[my_pkg.my_mechanism]")
    return re.findall(r"[^\s,\[\]'\"]+", listed.removeprefix("null"))


def add_listed_plugins(invocation: Invocation) -> None:
    """Register the modules of ``plugins=[my_pkg.my_mechanism]``; each is then chosen like a part of this project."""
    for module in list_plugins(invocation):
        add_plugin(module)


# keys that change how or where a sweep runs, not its runs: never part of its name
LABELS = (
    "name",
    "replace",
    "runs_dir",
    "reports_dir",
    "launcher",
    "logger",
    "device",
    "dry_run",
    "plan_gpu",
    "report",
    "tables",
    "reference",
    "primary",
    "cpus_per_trial",
    "gpus_per_trial",
    "plugins",
    "study",
)
LABELS += ("retry", "search.num", "search.batch")  # the extent of a sweep
LAUNCHERS = ("ray.", "slurm.", "devices_per_trial", "shard_parameters")  # prefixes of launcher settings, likewise
DIGITS = 6  # characters of the hash at the end of a name
EDGES = "-._+="
EXPONENT = re.compile(r"(?<=\d)[eE][-+](?=\d)")


def study_name(invocation: Invocation) -> str:
    """Return the preset's name, or a name from the overrides.

    For example, ``mechanism=sc lr=range`` gives ``sc-range``. The name ends in 6 digits of the sha256 of all words if a
    word cannot be recovered from it: other words, another name.
    """
    given = {word.key: word.value or "" for word in invocation.words}
    asked = {key: value for key, value in given.items() if key not in LABELS and not key.startswith(LAUNCHERS)}
    preset = [given.get("study", "quickstart")] if "study" in given or not asked else []
    words = "-".join([*preset, *(_shorten_word(key, value) for key, value in asked.items())])
    name = words[:LONGEST_NAME].strip(EDGES)
    if name and name == words and all(_is_whole(key, value) for key, value in asked.items()):
        return name
    parts = [*preset, *([key, _resolve_place(value) if _is_place(key) else value] for key, value in asked.items())]
    digits = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]
    return f"{words[: LONGEST_NAME - DIGITS - 1].strip(EDGES) or 'sweep'}-{digits}"


def _shorten_word(key: str, value: str) -> str:
    value = Path(value).name.split(".")[0] if _is_place(key) else value
    value = re.sub(r"[^A-Za-z0-9._+-]+", "", value.replace(",", "+"))
    return value if key in CHOICES or _is_place(key) else f"{key}{value}"


def _is_whole(key: str, value: str) -> bool:
    """Return whether a word can be recovered from its part of the name."""
    # yes for letters and digits or a flat list of them (signs only in exponents), and for a choice of one group only
    listed = re.fullmatch(r"\[([^\[\]]*)\]", value)
    plain = EXPONENT.sub("e", re.sub(r"\s*,\s*", "", listed[1] if listed else value))
    is_choice = key in CHOICES and value in _names_of_several_groups()
    return bool(re.fullmatch(r"[A-Za-z0-9._]+", plain)) and not is_choice and not _is_place(key)


def _is_place(key: str) -> bool:
    return count_places(SHORT.get(key, key)) is not None


def _resolve_place(value: str) -> str:
    """Return the absolute path of a file or folder, also after ``ckpt:`` or ``hf:``; any other value as typed."""
    kind = next((kind for kind in ("ckpt:", "hf:") if value.startswith(kind)), "")
    try:
        path = Path(value.removeprefix(kind)).expanduser()
        return f"{kind}{path.resolve()}" if path.exists() else value
    except (OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        return value


@cache
def _names_of_several_groups() -> frozenset[str]:
    """Return the choices that exist in more than one group, presets included, e.g. ``none``."""
    names = [name for group in (*CHOICES, "study") for name in choices(group)]
    return frozenset(name for name in names if names.count(name) > 1)
