"""Read a command line into a validated spec.

Hydra composes the values, `stability.config.parse` validates them.
"""

from __future__ import annotations

import re
from typing import Any

from stability.cli.conf import defaults, list_keys
from stability.cli.mistakes import check_words, explain_error, shorten
from stability.cli.study_name import study_name
from stability.cli.words import CHOICES, Invocation, Word
from stability.config.base import AXES, AnySettings, Settings, check_numbers
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
