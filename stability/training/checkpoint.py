"""Checkpoints that are whole or absent, verified when read, and never unpickled."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stability.build import build_model
from stability.config.base import Settings
from stability.config.computed import parts_of_model
from stability.config.parse import parse_run
from stability.config.run import RunSpec
from stability.models.backbone import Backbone
from stability.runs.directory import fsync, read_json
from stability.runs.leftovers import temporary
from stability.runs.records import ManifestFile
from stability.training.machine import require_kernels

MODEL, TRAINER, MANIFEST = "model.safetensors", "trainer.pt", "manifest.json"
# Of the trainer's state, where the optimizer averages: the parameters that training moves. The model's file holds those
# that are evaluated.
MOVING = "moving_parameters"


def save(
    folder: Path, model: torch.nn.Module, trainer: dict[str, Any], spec: Settings, *, step: int, data_format: Any
) -> Path:
    """Write ``folder`` (…/step_000200) under a temporary name, fsync, rename. ``trainer``: tensors and plain values
    only.

    One that stands there already goes at the last moment, as `remove` does it: it is a damaged one, a good one is not
    written again.
    """
    aside = temporary(folder)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, aside / MODEL
        )
        torch.save(trainer, aside / TRAINER)
        files = {name: sha256_of(aside / name) for name in (MODEL, TRAINER)}
        manifest = {"step": step, **_described(data_format), "sha256": files, "spec": spec.model_dump(mode="json")}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
        for path in (*aside.iterdir(), aside):
            fsync(path)
        if folder.exists():
            remove(folder)
        aside.replace(folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def load(folder: str | Path) -> tuple[RunSpec, Backbone]:
    """Return (spec, model in eval mode on the CPU). ``ValueError`` where the folder is no checkpoint or a file is not
    what its manifest vouches for."""
    folder = Path(folder)
    return _model(folder, verified_manifest(folder))


def read(folder: Path) -> tuple[RunSpec, Backbone, dict[str, Any]]:
    """Return what `load` and `load_trainer` give, the files hashed once."""
    return *_model(folder, verified_manifest(folder)), _trainer(folder)


def load_trainer(folder: Path) -> dict[str, Any]:
    """Return what ``save`` was given as ``trainer``; read with ``weights_only``, so code in it is refused, not run."""
    verified_manifest(folder)
    return _trainer(folder)


def _model(folder: Path, manifest: dict[str, Any]) -> tuple[RunSpec, Backbone]:
    spec = parse_run(manifest["spec"], folder)
    require_kernels(parts_of_model(spec))
    try:
        model = build_model(spec, manifest.get("vocab_size") or manifest["format"])
        model.load_state_dict(load_file(folder / MODEL))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{folder / MODEL} does not fit the model of its own manifest: {str(error).splitlines()[0]}"
        ) from None
    return spec, model.eval()


def _trainer(folder: Path) -> dict[str, Any]:
    try:
        return torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 pickle's, zip's and torch's errors mean the same to the reader
        # torch's own words advise to set weights_only=False, which would run the code
        raise ValueError(
            f"{folder / TRAINER} is no trainer state that can be read safely: it is damaged, or holds code, which is "
            "never run; use another checkpoint"
        ) from None


def _described(data_format: Any) -> dict[str, Any]:
    """Return the corpus's `format` in a manifest: under a name of its own for tokens, as it was before there was
    anything else."""
    return {"vocab_size" if isinstance(data_format, int) else "format": data_format}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are yet to be read, and verified then."""
    if not folder.is_dir():
        raise ValueError(f"no checkpoint at {folder}; give a folder like runs/<run_id>/checkpoints/step_000200")
    try:
        return read_json(folder / MANIFEST, ManifestFile)
    except (OSError, ValueError) as error:
        why = f" ({error})" if (folder / MANIFEST).is_file() else ""
        raise ValueError(
            f"{folder} has no readable {MANIFEST}{why}; it is no checkpoint, run (runs/<run_id>) or study "
            "(runs/studies/<name>), or it was cut short"
        ) from None


def verified_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, after every file in it was hashed and found unchanged."""
    manifest = manifest_of(folder)
    for name in (MODEL, TRAINER):
        path = folder / name
        if not path.is_file() or sha256_of(path) != manifest["sha256"].get(name):
            raise ValueError(
                f"{path} is missing, truncated or altered (its sha256 is not the manifest's); use another checkpoint"
            )
    return manifest


def remove(folder: Path) -> None:
    """Take a checkpoint away under another name first, so that no half of it is ever taken for one."""
    doomed = temporary(folder.with_name(f"{folder.name}.gone"))
    folder.replace(doomed)
    shutil.rmtree(doomed)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
