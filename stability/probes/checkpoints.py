"""Read a run's checkpoint and its data once, for all measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stability.build import as_read, resolve_device
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.corpora.cache import load, prepare
from stability.models.backbone import Backbone
from stability.training import checkpoint
from stability.training.machine import prepare_torch


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, with its run's data.

    Shared between measurements: copy the model or trainer state before changing either.
    """

    folder: Path
    spec: RunSpec
    model: Backbone  # in eval mode, on the CPU
    trainer: dict[str, Any]  # the other state saved by `training.checkpoint.save`
    corpus: AbstractCorpus

    @classmethod
    def read(cls, folder: Path, cache_dir: Path) -> Loaded:
        """Read a checkpoint; ``ValueError`` if damaged, or if the run's data have changed."""
        spec, model, trainer = checkpoint.read(folder)
        return cls(folder, spec, model, trainer, corpus_of(spec, cache_dir))


def corpus_of(spec: RunSpec, cache_dir: Path) -> AbstractCorpus:
    """Return a run's prepared data; prepare again if the cache is missing.

    Raises:
        ValueError: the prepared data have another fingerprint than the run's.
    """
    if (cache_dir / spec.data_fingerprint).is_dir():
        return load(cache_dir, spec.data_fingerprint)
    corpus = as_read(prepare(spec.data, cache_dir), spec.objective, cache_dir.parent)
    if corpus.fingerprint != spec.data_fingerprint:
        trained_on, now = spec.data_fingerprint[:12], corpus.fingerprint[:12]
        raise ValueError(
            f"the run was trained on data {trained_on}, which is not under {cache_dir};\ndata={spec.data.name} reads "
            f"{now} now"
        )
    return corpus


def place_model(model: Backbone, spec: RunSpec, device: str) -> torch.device:
    """Place a run's model on a device, computing as the run did; return the device.

    Args:
        model: moved in place.
        spec: the run's.
        device: as in settings.
    """
    place = resolve_device(device)
    prepare_torch(spec.threads, place, spec.precision)
    model.to(place)
    return place
