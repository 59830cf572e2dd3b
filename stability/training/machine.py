"""The machine under a run: torch's global state, and the memory that it takes."""

from __future__ import annotations

import os
import resource

import torch


def prepare_torch(threads: int, device: torch.device) -> None:
    """Global state that one trial must not inherit from another: threads, default dtype, deterministic kernels on CUDA."""
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)


def peak_memory_mb(device: torch.device) -> float:
    """Peak of the CUDA allocator, or of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
