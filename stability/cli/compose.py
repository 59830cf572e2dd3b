"""A command line becomes a validated spec: Hydra composes, `stability.config.parse` validates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from stability.cli.conf import AXES, conf_dir, defaults
from stability.cli.mistakes import check_words, explained
from stability.cli.study_name import study_name
from stability.cli.words import CHOICES, PRESET_ROOT, given_values, hydra_overrides, key_of
from stability.config.parse import parse
from stability.registry import Registry, add_plugin
from stability.startup import uncollected

HESSIAN_KEYS = ("ckpt", "hf", "data", "lr", "positions", "device")  # of conf/hessian.yaml; its other keys are the protocol's


def read_spec(kind: str, argv: Sequence[str], into: str | None = None, *, composed: Callable[[dict[str, Any]], None] = lambda values: None) -> Any:
    """Command line → validated spec. ``into``: the field that takes the keys which the root yaml writes flat (see conf/hessian.yaml). ``composed``: told
    what Hydra composed, before it is validated, which imports torch."""
    with uncollected():
        return _read_spec(kind, argv, into, composed)


def _read_spec(kind: str, argv: Sequence[str], into: str | None, composed: Callable[[dict[str, Any]], None]) -> Any:
    store_plugins(argv)
    values = compose(kind, argv)
    if kind == "sweep" and values.get("name") is None:
        values["name"] = study_name(argv)
    if into is not None:
        own = {key: values[key] for key in HESSIAN_KEYS if key in values}  # data and lr are there where they were chosen
        values = own | {into: {key: value for key, value in values.items() if key not in HESSIAN_KEYS}}
    composed(values)
    try:
        return parse(kind, values)
    except ValueError as error:  # the keys are written without `into`
        raise ValueError(str(error) if into is None else re.sub(rf"(?m)^{into}\.", "", str(error))) from None


def compose(root: str, argv: Sequence[str]) -> dict[str, Any]:
    """The plain dict that ``conf/<root>.yaml`` and the overrides make. Errors: ``ValueError`` in one or two lines."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_words(argv, root, hydra_overrides)
    _refuse_repetitions(argv)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra_compose(root, overrides=hydra_overrides(argv))
            if anew := _chosen_anew(root, argv):
                own = _without_the_preset(root, argv, anew)
                for group in anew:  # of an axis, the parts that are still chosen keep what the preset says of them
                    config[group] = {name: config[group][name] for name in own[group]} if group in AXES else own[group]
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # ValueError: Hydra's own, e.g. for ~model=7
        raise ValueError(explained(error, root, argv, hydra_overrides)) from None


def _refuse_repetitions(argv: Sequence[str]) -> None:
    """``residual=[hc,hc]``, of which Hydra would make one without a word."""
    for axis, value in given_values(argv).items():
        names = re.findall(r"[^\[\],\s'\"]+", value) if axis in AXES else []
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{axis}={value}: {repeated[0]} is named {names.count(repeated[0])} times; give each once")


def _chosen_anew(root: str, argv: Sequence[str]) -> list[str]:
    """The groups of which the command line takes another choice than the preset does, and the axes that it names."""
    given = given_values(argv)
    named = [group for group in CHOICES if group in given]
    if root != PRESET_ROOT or not named:
        return []
    preset = defaults(root) | defaults(f"study/{given.get('study') or defaults(root)['study']}")
    return [group for group in named if group in AXES or given[group] != preset[group]]


def _without_the_preset(root: str, argv: Sequence[str], groups: Sequence[str]) -> Any:
    """The settings of ``groups``, their own yamls' and the command line's alone."""
    from hydra import compose as hydra_compose

    words = [word for word in hydra_overrides(argv) if key_of(word).split(".")[0] in groups]
    return hydra_compose(root, overrides=["~study", *words])


def store_plugins(argv: Sequence[str]) -> None:
    """Make ``plugins=[my_pkg.my_mechanism]`` known to the registry, and its Config's defaults to Hydra, so that it is chosen like a yaml of ours."""
    from hydra.core.config_store import ConfigStore

    listed = next((word.partition("=")[2] for word in argv if word.startswith("plugins=")), "[]")
    if not re.fullmatch(r"\s*\[.*\]\s*|null", listed, re.DOTALL):
        raise ValueError(f"plugins={listed}: must be a list of modules, e.g. plugins=[my_pkg.my_mechanism]")
    for module in re.findall(r"[^\s,\[\]'\"]+", listed.removeprefix("null")):
        family, name = add_plugin(module)
        exported = Registry(family).load(name)
        group = "cross" if getattr(exported, "cross", False) else {"data": "data"}.get(family, family.removesuffix("s"))
        fields = exported.Config.model_fields
        node = {key: "???" if field.is_required() else field.get_default(call_default_factory=True) for key, field in fields.items()}
        named = node if group in AXES else {"name": name, **node}
        ConfigStore.instance().store(group=group, name=name, node=named, package=f"{group}.{name}" if group in AXES else group)
