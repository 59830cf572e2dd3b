"""Every random draw of a run as a function of (seed, purpose, index): nothing to save, nothing to replay on resume."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A CPU generator of its own for one draw, e.g. ``generator_for(spec.seed, "train", step)``; the same on every device."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
