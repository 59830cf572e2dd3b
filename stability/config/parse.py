"""From plain dicts to validated specs: of the entries, and of a run's ``spec.json``."""

from __future__ import annotations

from typing import Any

from stability.config.base import checked
from stability.config.entries import HessianSpec, ProbeSpec, ReportSpec, StatusSpec
from stability.config.generation import GenerateSpec
from stability.config.identity import filled
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.config.tokenizer import TokenizerSpec
from stability.registry import add_plugin

SPECS = {"sweep": SweepSpec, "hessian": HessianSpec, "report": ReportSpec, "status": StatusSpec, "probe": ProbeSpec, "generate": GenerateSpec}
SPECS["train_tokenizer"] = TokenizerSpec


def parse(kind: str, values: dict[str, Any]) -> Any:
    """The validated spec of an entry. Plugins named in it are made known first. Errors: ``ValueError``, at most two lines."""
    listed = values.get("plugins") or ()
    for module in listed if isinstance(listed, list | tuple) else ():  # what is no list is refused with the rest
        add_plugin(module)
    return checked(SPECS[kind], values)


def parse_run(values: dict[str, Any]) -> RunSpec:
    """The `RunSpec` behind a ``spec.json`` (or a checkpoint's manifest), plugins included. A field younger than the file has its neutral value."""
    for module in values.get("plugins") or ():
        add_plugin(module)
    return checked(RunSpec, filled(values, RunSpec))
