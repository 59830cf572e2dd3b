"""Check for a machine able to run Triton's kernels, without importing triton."""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRET = "TRITON_INTERPRET"  # read by triton on import


def is_interpreted() -> bool:
    """Return whether kernels are interpreted on a CPU: correct, and very slow."""
    return os.environ.get(INTERPRET) == "1"


def find_lacking(device: torch.device | None = None, *, interpreted: bool = True) -> str | None:
    """Return the missing requirement for Triton's kernels, or None.

    Args:
        device: the kernels' device; None: any on this machine.
        interpreted: whether interpretation is acceptable.
    """
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
    """Raise a one-line ``RuntimeError`` if kernels cannot run on a device."""
    if device.type != "cuda" and not is_interpreted():
        needed = find_lacking(device) or "device=cuda"
        raise RuntimeError(f"impl=triton needs {needed}, and tensors are on {device}; impl=reference computes the same")
