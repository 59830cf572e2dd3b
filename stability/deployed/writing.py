"""Write a deployed folder whole: its files, then their validation; nothing stays of a rejected one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from stability.config.deployment import DeploySpec
from stability.deployed.folder import write_files, write_manifest
from stability.deployed.formats import Choices
from stability.deployed.validation import compare
from stability.probes.checkpoints import Loaded
from stability.runs.directory import replace_folder


class Rejected(Exception):
    """The stored weights change the NLL by more than the tolerance."""


def write(out: Path, checkpoint: Path, spec: DeploySpec, origin: dict[str, Any], cache_dir: Path) -> dict[str, Any]:
    """Write a checkpoint's deployed folder and return its manifest.

    Args:
        out: the folder; an existing one is replaced at the end.
        checkpoint: the checkpoint's folder.
        spec: format and tolerance.
        origin: ``run``, ``step`` and ``checkpoint_bytes``, for the manifest.
        cache_dir: folder with the run's prepared data.

    Raises:
        Rejected: the NLL changes by more than the tolerance; nothing is written.
        ValueError: the checkpoint is damaged, or its data have changed.
    """
    loaded = Loaded.read(checkpoint, cache_dir)
    choices = Choices(spec.format, spec.rest, spec.head, spec.pack)
    with replace_folder(out) as aside:
        manifest = write_files(aside, loaded.spec, loaded.model, loaded.corpus, choices, origin)
        found = compare(aside, loaded.spec, loaded.model, loaded.corpus, cache_dir)
        change = found["relative_change"]
        if spec.limit is not None and not abs(change) <= spec.limit:  # also a NaN
            hint = f". tolerance={_next_above(abs(change))} accepts it" if math.isfinite(change) else ""
            raise Rejected(
                f"format={spec.format} changes the held-out NLL from {found['nll_before']:.6f} to "
                f"{found['nll_after']:.6f}, by {100 * change:+.3g} %, more than tolerance={spec.limit:g}; nothing was "
                f"written{hint}"
            )
        return write_manifest(aside, manifest | {"validation": {**found, "tolerance": spec.limit}})


def _next_above(change: float) -> str:
    """Return a number of one digit above a change."""
    digits = f"{change:.0e}"
    return digits if float(digits) > change else f"{change + 10 ** int(digits.partition('e')[2]):.0e}"
