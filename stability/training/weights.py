"""Initial weights of a run, taken from a finished run or another model's files.

They are cached beside the prepared data under their sha256, and matched with the model's tensors by name and shape.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stability.config.training import WeightsSpec
from stability.runs.directory import RunDirectory, fsync, step_of
from stability.runs.leftovers import name_temporary, remove_abandoned
from stability.runs.phases import TERMINAL, phases, resolve_run_folder
from stability.training import hugging_face
from stability.training.checkpoint import MODEL, sha256_of, verify_manifest

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 3  # tensors of each kind in a message


@dataclass(frozen=True)
class Fit:
    """The match between a file's tensors and a model's, in the model's order.

    Attributes:
        taken: names in both, with equal shape.
        missing: names absent from the file.
        unread: names absent from the model.
        reshaped: names in both, with different shapes.
        given: shapes of the file.
        own: shapes of the model.
    """

    taken: tuple[str, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    reshaped: tuple[str, ...]
    given: Shapes
    own: Shapes

    @classmethod
    def of(cls, given: Shapes, own: Shapes) -> Fit:
        """Compare the tensors of a file (``given``) with those of a model (``own``)."""
        both = [name for name in own if name in given]
        return cls(
            taken=tuple(name for name in both if own[name] == given[name]),
            missing=tuple(name for name in own if name not in given),
            unread=tuple(name for name in given if name not in own),
            reshaped=tuple(name for name in both if own[name] != given[name]),
            given=given,
            own=own,
        )

    @property
    def fresh(self) -> tuple[str, ...]:
        """The model's tensors that keep their own initialisation, in the model's order."""
        return tuple(name for name in self.own if name not in self.taken)

    def require(self, spec: WeightsSpec, whose: str = "the model") -> None:
        """Raise a two-line ``ValueError`` that names the differing tensors, unless the match suffices.

        Args:
            spec: the weights; with ``partial`` one matching tensor suffices.
            whose: name of the model, for the message.
        """
        if not (self.missing or self.unread or self.reshaped) or (spec.partial and self.taken):
            return
        if spec.partial:
            raise ValueError(
                f"init={spec.source} init.partial=true: none of its {len(self.given)} tensors has the name and the "
                f"shape of one of {whose}"
            )
        reshaped = [f"{name} ({_shape(self.given[name])}, here {_shape(self.own[name])})" for name in self.reshaped]
        parts = {"missing": self.missing, "unexpected": self.unread, "of another shape": reshaped}
        told = "; ".join(f"{kind}: {_first(names)}" for kind, names in parts.items() if names)
        raise ValueError(
            f"init={spec.source} does not fit {whose}: {told}\nall tensors must match by name and shape; "
            "init.partial=true takes those that do, and initialises the others as without init"
        )

    def describe(self) -> str:
        """Describe the taken, initialised and unread tensors in a few words."""
        if not self.fresh:
            told = f"all {len(self.own)} tensors"
        else:
            told = f"{len(self.taken)} of {len(self.own)} tensors; initialised anew: {_first(self.fresh)}"
        return told + (f"; not read: {_first(self.unread)}" if self.unread else "")


@dataclass(frozen=True)
class Weights:
    """A file of weights with the sha256 of its spec."""

    spec: WeightsSpec
    file: Path

    @classmethod
    def find(cls, asked: WeightsSpec, own: Shapes, scratch: Path) -> Weights:
        """Find the weights of a sweep's ``init``; fill in their sha256 and label.

        Args:
            asked: the ``init`` of the sweep.
            own: tensor shapes of a model that will take them.
            scratch: folder for converted weights; it must exist while they are in use.

        Raises:
            ValueError: the folder holds no finished run, intact checkpoint or GPT-2, or the sha256 differs; one or two
                lines.
        """
        if asked.source.startswith("hf:"):
            file = scratch / MODEL
            save_file(hugging_face.tensors(asked.place, own), file)
            folder = Path(asked.place).expanduser().resolve()
            return cls._make(asked, f"hf:{folder}", folder.name, sha256_of(file), file)
        folder = _checkpoint(asked)
        try:
            manifest = verify_manifest(folder)
        except ValueError as error:
            raise ValueError(f"init={asked.source}: {error}") from None
        run = folder.parent.parent
        name = run.name if (run / "spec.json").exists() else folder.name
        label = f"{name} at step {manifest['step']}"
        return cls._make(asked, f"ckpt:{folder}", label, manifest["sha256"][MODEL], folder / MODEL)

    @classmethod
    def _make(cls, asked: WeightsSpec, source: str, label: str, sha256: str, file: Path) -> Weights:
        """Return the weights with source, sha256 and label; ``ValueError`` if another sha256 was requested."""
        if asked.sha256 not in (None, sha256):
            raise ValueError(
                f"init={asked.source}: its weights have the sha256 {sha256}, but init.sha256 is\n{asked.sha256}"
            )
        known = {"source": source, "sha256": sha256, "label": asked.label or label}
        return cls(asked.model_copy(update=known), file)

    @classmethod
    def load_cached(cls, spec: WeightsSpec, cache_dir: Path) -> Weights:
        """Return the weights of a run from the cache.

        Raises:
            ValueError: they are gone or altered; one line.
        """
        file = _place(spec, cache_dir)
        again = "the sweep's command keeps them there again, as long as it finds their run"
        if not file.is_file():
            raise ValueError(f"{file}, the weights that this run starts from ({spec.label}), is gone; {again}")
        if sha256_of(file) != spec.sha256:
            raise ValueError(f"{file}, the weights that this run starts from ({spec.label}), was altered; {again}")
        return cls(spec, file)

    def keep(self, cache_dir: Path) -> Weights:
        """Copy the weights into the cache atomically, unless an intact copy exists."""
        target = _place(self.spec, cache_dir)
        if not target.is_file() or sha256_of(target) != self.spec.sha256:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(target.parent)
            aside = name_temporary(target)
            try:
                shutil.copyfile(self.file, aside)
                fsync(aside)
                if sha256_of(aside) != self.spec.sha256:
                    raise RuntimeError(f"{self.file} changed while it was copied; run again when nothing writes there")
                aside.replace(target)
            finally:
                aside.unlink(missing_ok=True)
            fsync(target.parent)
        return Weights(self.spec, target)

    def fit(self, own: Shapes) -> Fit:
        """Compare these weights with a model's tensors."""
        with safe_open(self.file, framework="pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
        return Fit.of(given, own)

    def state(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's initial tensors: matching ones from these weights, others as ``drawn``.

        Raises:
            ValueError: the tensors do not match (`Fit.require`).
        """
        fit = self.fit({name: tuple(tensor.shape) for name, tensor in drawn.items()})
        fit.require(self.spec)
        given = load_file(self.file)
        return drawn | {name: given[name] for name in fit.taken}

    def account(self, own: Shapes) -> dict[str, Any]:
        """Return the source of the weights and the match of tensors, for provenance.json."""
        fit = self.fit(own)
        where = {"from": self.spec.source, "label": self.spec.label, "sha256": self.spec.sha256}
        return {**where, "num_taken": len(fit.taken), "initialised": list(fit.fresh), "not_read": list(fit.unread)}


def describe_weights(spec: WeightsSpec, fits: Mapping[str, Fit]) -> str:
    """Describe the weights of a sweep's runs: their source, then a line per kind of match.

    Args:
        spec: the weights.
        fits: by kind of run, its match.
    """
    kinds: dict[str, list[str]] = {}
    for kind, fit in fits.items():
        kinds.setdefault(fit.describe(), []).append(kind)
    lines = [f"init: every run starts from the weights of {spec.label} (sha256 {str(spec.sha256)[:12]})"]
    for told, whose in kinds.items():
        lines.append(f"  {told}" + (f" ({', '.join(whose)})" if len(kinds) > 1 else ""))
    return "\n".join(lines)


def _place(spec: WeightsSpec, cache_dir: Path) -> Path:
    return cache_dir / "weights" / f"{spec.sha256}.safetensors"


def _checkpoint(asked: WeightsSpec) -> Path:
    """Return the folder of the checkpoint that a source names; for a run, its last planned step's."""
    word = f"init={asked.source}"
    folder = resolve_run_folder(asked.place, word, "a run starts from one run's weights")
    if not (folder / "spec.json").exists():
        return folder
    directory = RunDirectory.at(folder)
    if (terminal := phases(directory, TERMINAL).get(TERMINAL)) is not None:
        return terminal
    status, left = directory.status(), directory.checkpoints()
    remedy = (
        f"name the checkpoint that is meant, e.g. init=ckpt:{left[-1]} (step {step_of(left[-1])})"
        if left
        else "it left no checkpoint; name a run that has ended"
    )
    raise ValueError(f"{word}: this run is {status['state']} and has not reached its last step;\n{remedy}")


def _first(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a number"
