"""Say whether this machine can run Triton's kernels, without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRET = "TRITON_INTERPRET"  # as triton reads it when it is imported


def is_interpreted() -> bool:
    """Return whether kernels are to be interpreted on a CPU, one program at a time: right, and very slow."""
    return os.environ.get(INTERPRET) == "1"


def lacking(device: torch.device | None = None, *, interpreted: bool = True) -> str | None:
    """Return in words what Triton's kernels need and is not there; None where they can run. ``device``: the one that
    they are to run on; None: any that this machine has. ``interpreted``: whether it will do that they are
    interpreted."""
    if importlib.util.find_spec("triton") is None:
        return "triton (pip install triton)"
    if is_interpreted() and interpreted:
        return None
    if is_interpreted() and torch.cuda.is_available():
        return f"{INTERPRET}=1 to be left out, by which they are interpreted"
    if not torch.cuda.is_available():
        return "a CUDA device" + (f" (or {INTERPRET}=1, which interprets them on a CPU, slowly)" if interpreted else "")
    return "device=cuda" if device is not None and device.type != "cuda" else None


def require_device(device: torch.device) -> None:
    """Raise a ``RuntimeError`` of one line where tensors lie on a device that kernels neither run nor are interpreted
    on."""
    if device.type != "cuda" and not is_interpreted():
        needed = lacking(device) or "device=cuda"
        raise RuntimeError(f"impl=triton needs {needed}, and tensors are on {device}; impl=reference computes the same")
