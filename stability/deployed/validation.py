"""Measure a deployed folder on held-out data in a fresh process, beside the checkpoint it was made of."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stability.build import build_objective
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from stability.corpora.cache import load as load_corpus
from stability.deployed.folder import load
from stability.deployed.fresh import call_fresh, print_numbers
from stability.registry import add_plugins
from stability.training.evaluate import Validation
from stability.training.machine import prepare_torch

CPU = torch.device("cpu")


def measure(spec: RunSpec, model: nn.Module, corpus: AbstractCorpus) -> tuple[dict[str, float], np.ndarray]:
    """Return a model's numbers on its run's held-out examples, and its logits on the first of them.

    Args:
        spec: the run's.
        model: in eval mode.
        corpus: the run's prepared data.

    Returns:
        ``nll`` in nats per counted position, ``examples`` and ``seconds``; the logits of at most 64 examples.
    """
    prepare_torch(spec.threads, CPU, spec.precision)
    validation = Validation(spec, corpus, build_objective(spec, corpus.format), CPU)
    logits = validation.logits(model).float().numpy()
    start = time.perf_counter()
    nll = validation.measure(model)["val_nll"]
    numbers = {"nll": nll, "examples": validation.num_sequences, "seconds": time.perf_counter() - start}
    return numbers, logits


def compare(folder: Path, spec: RunSpec, model: nn.Module, corpus: AbstractCorpus, cache_dir: Path) -> dict[str, Any]:
    """Return the NLL of a checkpoint's model and of the folder, loaded in a fresh process, and their difference.

    Args:
        folder: the deployed folder.
        spec: the run's.
        model: the checkpoint's.
        corpus: the run's prepared data.
        cache_dir: folder with the prepared data.

    Raises:
        ValueError, RuntimeError: the fresh process failed.
    """
    before, logits = measure(spec, model, corpus)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "logits.npy"
        after = call_fresh(__name__, [str(folder), str(cache_dir), str(file), *spec.plugins])
        distance = float(np.abs(np.load(file, allow_pickle=False) - logits).max())
    return {
        "nll_before": before["nll"],
        "nll_after": after["nll"],
        "relative_change": (after["nll"] - before["nll"]) / before["nll"],
        "largest_logit_difference": distance,
        "examples": after["examples"],
        "seconds_before": before["seconds"],
        "seconds_after": after["seconds"],
    }


def main(argv: Sequence[str]) -> int:
    """Print a folder's numbers as JSON and write its logits; the words are folder, cache, file and plugins."""
    folder, cache_dir, file, *plugins = argv

    def measure_folder() -> dict[str, float]:
        add_plugins(plugins)
        found = load(folder)
        numbers, logits = measure(found.spec, found.model, load_corpus(Path(cache_dir), found.spec.data_fingerprint))
        np.save(file, logits)
        return numbers

    return print_numbers(measure_folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
