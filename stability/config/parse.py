"""Validate plain dicts into specs: of the entries, and of a run's ``spec.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from stability.config.base import AnySettings, Settings, validate
from stability.config.deployment import DeploySpec, EmbedSpec, InferSpec
from stability.config.entries import (
    DashboardSpec,
    DescribeSpec,
    HessianSpec,
    ProbeSpec,
    ReportSpec,
    StatusSpec,
    TransferSpec,
    WebSpec,
)
from stability.config.generation import GenerateSpec
from stability.config.identity import fill_newer_fields
from stability.config.parts import COMPUTED, parse_cross, part
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.config.tokenizer import TokenizerSpec
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
    "transfer": TransferSpec,
    "deploy": DeploySpec,
    "infer": InferSpec,
    "embed": EmbedSpec,
    "describe": DescribeSpec,
    "web": WebSpec,
}  # the spec of each entry


def parse(kind: type[AnySettings], values: dict[str, Any]) -> AnySettings:
    """Validate an entry's spec of class ``kind``; this imports torch.

    The plugins in ``values`` are registered first. A sweep's ``impl=auto`` is resolved.

    Raises:
        ValueError: a value is invalid or a rule is broken; at most two lines.
    """
    add_plugins(values.get("plugins"))
    with uncollected():
        spec = validate(kind, values)
        return cast(AnySettings, spec.resolve_auto()) if isinstance(spec, SweepSpec) else spec


def parse_run(values: dict[str, Any], place: Path | str = "this run") -> RunSpec:
    """Return the `RunSpec` of a ``spec.json`` or a checkpoint's manifest.

    Newer fields missing from it have their neutral values.

    Args:
        values: the file's content.
        place: the folder, for the message.

    Raises:
        ValueError: a value is invalid, or the command does not name a required plugin; plugins are not imported here.
    """
    return validate(RunSpec, _fill_younger_fields(values, place))


def computed_parts_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parts with possible kernels in a ``spec.json``, by field, as `parse_run` does.

    No other field is validated; missing fields are left out.
    """
    known = _fill_younger_fields(values, "this run")
    return {
        key: parse_cross(known[key]) if key == "cross" else part(family, known[key])
        for key, family in COMPUTED.items()
        if key in known
    }


def _fill_younger_fields(values: dict[str, Any], place: Path | str) -> dict[str, Any]:
    """Return a run's values with neutral ones for newer fields; ValueError if a plugin is missing."""
    require_plugins(values.get("plugins"), place)
    return fill_newer_fields(values, RunSpec)
