"""A deployed model's folder: weights, spec, tokens and a manifest with the sha256 of each file; no pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from stability.build import build_model
from stability.config.identity import Place
from stability.config.parse import parse_run
from stability.config.parts import parts_of_model
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.deployed.formats import Choices, decode, encode, freeze_ternary
from stability.deployed.tokens import Tokens
from stability.models.backbone import Backbone, num_parameters
from stability.printable import line_of
from stability.registry import Registry
from stability.runs.directory import read_json, write_json
from stability.runs.records import Record, Whole
from stability.training.checkpoint import sha256_of
from stability.training.machine import require_kernels

VERSION = 1  # raised when the layout changes
MODEL, SPEC, TOKENS, MANIFEST = "model.safetensors", "spec.json", "tokenizer.json", "manifest.json"
FILES = (MODEL, SPEC, TOKENS)
REMEDY = "deploy the checkpoint again"


class DeployedFile(Record):
    """The fields of a deployed folder's ``manifest.json``."""

    version: Whole
    format: str
    run: str
    step: Whole
    data_format: Any
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]
    validation: dict[str, Any] = Field(default_factory=dict)
    sha256: str


@dataclass(frozen=True)
class Deployed:
    """A deployed model in memory.

    Attributes:
        folder: its folder.
        manifest: format, run, step, sizes and validation.
        spec: the run's spec, its data's folders left out.
        model: in eval mode, float32, on the CPU.
        tokens: what inputs and outputs stand for.
    """

    folder: Path
    manifest: dict[str, Any]
    spec: RunSpec
    model: Backbone
    tokens: Tokens

    @property
    def data_format(self) -> Any:
        """Format of the data, for `stability.build.build_objective`."""
        return self.manifest["data_format"]


def load(folder: str | Path) -> Deployed:
    """Read a deployed model; every file is verified, and nothing else is read.

    Raises:
        ValueError: the folder is no deployed model, or a file differs from its manifest.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name in FILES:
        if not (folder / name).is_file() or sha256_of(folder / name) != manifest["files"].get(name, {}).get("sha256"):
            raise ValueError(
                f"{folder / name} is missing, truncated or altered (its sha256 is not the manifest's); {REMEDY}"
            )
    spec = parse_run(read_json(folder / SPEC, remedy=REMEDY), folder)
    require_kernels(parts_of_model(spec))
    model = build_model(spec, manifest["data_format"])
    try:
        model.load_state_dict(decode(load_file(folder / MODEL), manifest["tensors"]))
        tokens = Tokens.of_json((folder / TOKENS).read_text(encoding="utf-8"))
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} does not fit the model of its own manifest ({line_of(error)}); {REMEDY}") from None
    if manifest["format"] == "ternary":
        freeze_ternary(model)
    return Deployed(folder, manifest, spec, model.eval(), tokens)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a deployed folder, without verifying its files.

    Raises:
        ValueError: the folder is no deployed model, a later version wrote it, or its manifest is altered.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"no deployed model in {folder}; python -m stability.deploy ckpt=… out={folder} writes one")
    try:
        manifest = read_json(folder / MANIFEST, DeployedFile, REMEDY)
    except ValueError as error:
        raise ValueError(f"{folder} is no folder of stability.deploy: {line_of(error)}") from None
    if manifest["version"] > VERSION:
        raise ValueError(
            f"{folder} has the layout version {manifest['version']}, and this program reads {VERSION}; update it"
        )
    if manifest["sha256"] != _hash_manifest(manifest):
        raise ValueError(f"{folder / MANIFEST} is altered (its sha256 is not its own); {REMEDY}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write a manifest with the sha256 of its other fields, and return it as it will be read."""
    manifest = json.loads(json.dumps(manifest))
    manifest["sha256"] = _hash_manifest(manifest)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _hash_manifest(manifest: dict[str, Any]) -> str:
    """Return the sha256 of all fields but ``sha256``."""
    others = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def write_files(
    folder: Path, spec: RunSpec, model: Backbone, corpus: AbstractCorpus, choices: Choices, origin: dict[str, Any]
) -> dict[str, Any]:
    """Write a deployed model's files into an empty folder, and return its manifest.

    Args:
        folder: the folder.
        spec: the run's spec.
        model: the model of a checkpoint.
        corpus: the run's prepared data.
        choices: how the tensors are stored.
        origin: ``run``, ``step`` and ``checkpoint_bytes``, for the manifest.
    """
    stored, layout = encode(model, choices)
    (folder / MODEL).write_bytes(save(stored))  # not `save_file`, whose files only their owner may read
    values = spec.model_dump(mode="json")
    fields = Registry("data").load(spec.data.name).Config.model_fields
    for key in list_places(fields, values["data"]):
        values["data"][key] = Path(values["data"][key]).name
    (folder / SPEC).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")
    (folder / TOKENS).write_text(Tokens.of_run(spec, corpus).to_json(), encoding="utf-8")
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in FILES}
    manifest = {
        "version": VERSION,
        **choices._asdict(),
        **origin,
        "num_params": num_parameters(model),
        "data_format": corpus.format,
        "files": files,
        "bytes": sum(each["bytes"] for each in files.values()),
        "tensors": layout,
    }
    return write_manifest(folder, manifest)


def list_places(fields: Any, values: dict[str, Any]) -> Sequence[str]:
    """Return the keys of paths among a part's values.

    Args:
        fields: fields of the part's Config.
        values: its values.
    """
    return [
        key
        for key, field in fields.items()
        if isinstance(values.get(key), str)
        and any(isinstance(each, Place) and not each.is_part_of_an_id(values[key]) for each in field.metadata)
    ]
