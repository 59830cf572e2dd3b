"""Turn plain dicts into validated specs: of the entries, and of a run's ``spec.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from stability.config.base import AnySettings, Settings, checked
from stability.config.computed import COMPUTED
from stability.config.cross import cross_choice
from stability.config.entries import HessianSpec, ProbeSpec, ReportSpec, StatusSpec
from stability.config.generation import GenerateSpec
from stability.config.identity import filled
from stability.config.parts import part
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.config.tokenizer import TokenizerSpec
from stability.config.wandb import DashboardSpec
from stability.registry import add_plugins, require_plugins
from stability.startup import uncollected

SPECS: dict[str, type[Settings]] = {
    "sweep": SweepSpec,
    "hessian": HessianSpec,
    "report": ReportSpec,
    "status": StatusSpec,
    "probe": ProbeSpec,
    "generate": GenerateSpec,
    "train_tokenizer": TokenizerSpec,
    "dashboard": DashboardSpec,
}  # of each entry, what it works from


def parse(kind: type[AnySettings], values: dict[str, Any]) -> AnySettings:
    """Validate the spec of an entry, of class ``kind``, after torch was imported for it. Plugins named in it are made
    known first, and ``impl=auto`` of a sweep is settled. Errors: ``ValueError``, at most two lines."""
    add_plugins(values.get("plugins"))
    with uncollected():
        spec = checked(kind, values)
        if isinstance(spec, SweepSpec):
            spec = spec.settled()
            spec.kinds()  # a run that breaks a rule is refused before data are prepared for it
        return cast(AnySettings, spec)


def parse_run(values: dict[str, Any], place: Path | str = "this run") -> RunSpec:
    """Return the `RunSpec` behind a ``spec.json`` or a checkpoint's manifest, with neutral values for younger fields.

    Args:
        values: what the file holds.
        place: the folder, for the message.

    Raises:
        ValueError: a value is wrong, or a plugin is needed that the command has not named: it is not imported.
    """
    return checked(RunSpec, _fill_younger_fields(values, place))


def computed_parts_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a ``spec.json`` that may be computed by kernels as `parse_run` does, without reading the
    rest: by its fields, of those that are there."""
    known = _fill_younger_fields(values, "this run")
    return {
        key: cross_choice(known[key]) if key == "cross" else part(family, known[key])
        for key, family in COMPUTED.items()
        if key in known
    }


def _fill_younger_fields(values: dict[str, Any], place: Path | str) -> dict[str, Any]:
    """Return a run's values with neutral ones for younger fields. Errors: ``ValueError`` if a plugin is missing."""
    require_plugins(values.get("plugins"), place)
    return filled(values, RunSpec)
