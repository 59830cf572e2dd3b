"""Say whether this machine can run Triton's kernels, without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRET = "TRITON_INTERPRET"  # as triton reads it when it is imported


def is_interpreted() -> bool:
    """Return whether kernels are to be interpreted on a CPU, one program at a time: right, and very slow."""
    return os.environ.get(INTERPRET) == "1"


def lacking(device: torch.device | None = None) -> str | None:
    """Return in words what Triton's kernels need and is not there; None where they can run. ``device``: the one that
    they are to run on; None: any that this machine has."""
    if importlib.util.find_spec("triton") is None:
        return "triton (pip install triton)"
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return f"a CUDA device (or {INTERPRET}=1, which interprets them on a CPU, slowly)"
    return "device=cuda" if device is not None and device.type != "cuda" else None
