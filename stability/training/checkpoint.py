"""Checkpoints on disk: written atomically, verified when read, never unpickled; those of a training in order."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stability.build import build_model
from stability.config.base import Settings
from stability.config.parse import parse_run
from stability.config.parts import parts_of_model
from stability.config.run import RunSpec
from stability.models.backbone import Backbone
from stability.printable import line_of, print_text
from stability.runs.directory import RunDirectory, checkpoint_name, read_json, replace_folder, step_of
from stability.runs.leftovers import name_temporary
from stability.runs.records import ManifestFile
from stability.training.machine import require_kernels

MODEL, TRAINER, MANIFEST = "model.safetensors", "trainer.pt", "manifest.json"
# Key of the trainer's state. If the optimizer averages, it holds the trained parameters; the model's file holds the
# averaged ones, for evaluation.
MOVING = "moving_parameters"


def save(
    folder: Path, model: torch.nn.Module, trainer: dict[str, Any], spec: Settings, *, step: int, data_format: Any
) -> Path:
    """Write the checkpoint folder atomically: temporary name, fsync, rename.

    Args:
        folder: the target, …/step_000200; an existing one is damaged and is removed just before the rename.
        model: its state_dict becomes ``model.safetensors``.
        trainer: the trainer's state; tensors and plain values only.
        spec: spec of the run or tokenizer, copied into the manifest.
        step: step of the checkpoint.
        data_format: format of the corpus; for tokens the vocabulary size.
    """
    with replace_folder(folder) as aside:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, aside / MODEL
        )
        torch.save(trainer, aside / TRAINER)
        files = {name: sha256_of(aside / name) for name in (MODEL, TRAINER)}
        manifest = {"step": step, **_describe(data_format), "sha256": files, "spec": spec.model_dump(mode="json")}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))
    return folder


def load(folder: str | Path) -> tuple[RunSpec, Backbone]:
    """Return (spec, model in eval mode on the CPU).

    Raises:
        ValueError: the folder is no checkpoint, or a file differs from its manifest.
    """
    folder = Path(folder)
    return _model(folder, verify_manifest(folder))


def read(folder: Path) -> tuple[RunSpec, Backbone, dict[str, Any]]:
    """Return the results of `load` and `load_trainer`, with each file hashed once."""
    return *_model(folder, verify_manifest(folder)), _trainer(folder)


def load_trainer(folder: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint.

    It is read with ``weights_only``: code in the file is refused, not run.
    """
    verify_manifest(folder)
    return _trainer(folder)


def _model(folder: Path, manifest: dict[str, Any]) -> tuple[RunSpec, Backbone]:
    spec = parse_run(manifest["spec"], folder)
    require_kernels(parts_of_model(spec))
    try:
        model = build_model(spec, manifest.get("vocab_size") or manifest["format"])
        model.load_state_dict(load_file(folder / MODEL))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder / MODEL} does not fit the model of its own manifest: {line_of(error)}") from None
    return spec, model.eval()


def _trainer(folder: Path) -> dict[str, Any]:
    try:
        return torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 errors of pickle, zip and torch all mean a bad file
        # torch's own message advises weights_only=False, and that would run the code
        raise ValueError(
            f"{folder / TRAINER} cannot be read safely: it is damaged or contains code, which is never run; use "
            "another checkpoint"
        ) from None


def _describe(data_format: Any) -> dict[str, Any]:
    """Return the manifest's entry for the corpus's format."""
    # Tokens keep the older key: manifests had it before other formats existed.
    return {"vocab_size" if isinstance(data_format, int) else "format": data_format}


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, without verifying its files.

    Raises:
        ValueError: the folder or its manifest is missing or unreadable.
    """
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


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest after the sha256 of every file was checked.

    Raises:
        ValueError: a file is missing or differs from the manifest.
    """
    manifest = manifest_of(folder)
    for name in (MODEL, TRAINER):
        path = folder / name
        if not path.is_file() or sha256_of(path) != manifest["sha256"].get(name):
            raise ValueError(
                f"{path} is missing, truncated or altered (its sha256 is not the manifest's); use another checkpoint"
            )
    return manifest


def remove(folder: Path) -> None:
    """Remove a checkpoint: rename it, then delete it."""
    # Renamed first: a half-deleted folder must not pass for a checkpoint.
    doomed = name_temporary(folder.with_name(f"{folder.name}.gone"))
    folder.replace(doomed)
    shutil.rmtree(doomed)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Held = tuple[dict[str, Tensor], dict[str, Any]]  # parameters, and the trainer's state


class Checkpoints(ABC):
    """The checkpoints of one training, in a folder with no other writer.

    An old checkpoint is removed only after its successor is written.
    """

    def __init__(self, spec: Settings, directory: RunDirectory, data_format: Any):
        self._spec, self._directory, self._format = spec, directory, data_format
        # steps of checkpoints written or read by this process: intact, so not to be written again
        self._standing: set[int] = set()

    @abstractmethod
    def choose_kept(self, step: int) -> set[int]:
        """Return the steps of all checkpoints to keep once training is at this step."""

    @abstractmethod
    def read(self, folder: Path) -> Held:
        """Return the parameters and the trainer's state of a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another training.
        """

    @property
    def newest(self) -> int:
        """Step of the newest intact checkpoint, the point to resume from; 0 if none."""
        return max(self._standing, default=0)

    def latest(self, until: float = math.inf, damage: str = "") -> Held | None:
        """Return the newest readable checkpoint, or None.

        Args:
            until: step of the log's last intact row; later checkpoints are ignored.
            damage: description of the log's damage after that step, for the message; "" if the log just ends.
        """
        found = self._directory.checkpoints()
        whole = [folder for folder in found if step_of(folder) <= until]
        if len(whole) < len(found):
            why = damage or f"{self._directory.metrics_file} ends at step {max(until, 0)}"
            print_text(f"{self._directory.run_id}: {why}; goes on from before that step", flush=True)
        return self._first(reversed(whole))

    def first_of(self, steps: Sequence[int]) -> Held | None:
        """Return the first readable checkpoint of these steps, or None."""
        return self._first(folder for step in steps if (folder := self._folder(step)).exists())

    def _first(self, folders: Iterable[Path]) -> Held | None:
        for folder in folders:
            try:
                parameters, state = self.read(folder)
            except ValueError as error:
                print_text(f"{self._directory.run_id}: skips a damaged checkpoint ({error})", flush=True)
                continue
            self._standing.add(state["step"])
            return parameters, state
        return None

    def lacks(self, step: int) -> bool:
        """Return whether a step above 0 is unsaved."""
        return step > 0 and step not in self._standing

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Write a checkpoint of the current step, then remove those not kept.

        Args:
            step: current step of the training.
            model: model to save.
            state: the trainer's state.
        """
        stays = {*self.choose_kept(step), step}
        save(self._folder(step), model, state, self._spec, step=step, data_format=self._format)
        self._standing.add(step)
        self._remove_but(stays)

    def remove_unplanned(self, step: int) -> None:
        """Remove the checkpoints outside the plan at the end of training.

        They are the rolling ones and those written at an interruption. So a resumed run leaves the same folder as an
        undisturbed one.
        """
        self._remove_but(self.choose_kept(step))

    def _remove_but(self, stays: set[int]) -> None:
        for folder in self._directory.checkpoints():
            if step_of(folder) not in stays:
                remove(folder)

    def _folder(self, step: int) -> Path:
        return self._directory.path / "checkpoints" / checkpoint_name(step)
