"""What runs on CUDA is what runs on a CPU in float64, and resumes bit for bit: the tests that a lent GPU runs first.

Without CUDA the same tests run on the CPU for a few parts, so that no file here is first executed on a GPU."""

from __future__ import annotations

import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"


def here(every, few):
    """Return all cases with CUDA, else a few of them."""
    return tuple(every) if HAS_CUDA else tuple(few)
