"""Set and read what a trial needs of the process that it runs in."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from kernels import availability, recurrences
from stability.config.computed import kernels_of
from stability.config.training import Precision
from stability.models.precision import allow_tf32

M_MMAP_THRESHOLD = -3  # of malloc.h


def prepare_torch(threads: int, device: torch.device, precision: Precision = "float32") -> None:
    """Set the global state that one trial must not inherit from another: threads, default dtype, deterministic kernels
    and TF32 on CUDA. Errors: ``ValueError`` where the device has no such precision."""
    allow_tf32(precision, device)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    if device.type == "cuda":
        # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)


def require_compiler() -> None:
    """Raise a ``ValueError`` where there is no C++ compiler, which `torch.compile` calls on every device."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise ValueError("compile=true needs a C++ compiler, g++ or clang++, and there is none; use compile=false")


def require_kernels(parts: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Raise a ``ValueError`` of one line where parts of a run ask for kernels that cannot run here. ``parts``: as
    `kernels_of` takes them; ``device``: the one that they are to run on; None: not known yet."""
    for asked in kernels_of(parts):
        lacking = recurrences.lacking if asked.impl == "fla" else availability.lacking
        if (what := lacking(device)) is not None:
            raise ValueError(f"{asked.setting} needs {what}; impl=reference computes the same everywhere")


def compiled(model: nn.Module) -> nn.Module:
    """Return a module that shares the parameters of ``model`` and computes what it does by `torch.compile`, one graph
    for each shape of inputs.

    ``model`` itself stays as it is, for validation, checkpoints, and α_max: no second derivative goes through a
    compiled graph. Errors: as `require_compiler`.
    """
    require_compiler()
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))


def return_freed_memory(device: torch.device) -> None:
    """Make memory that is freed go back to the system at once from 1 MiB on, on a CPU with glibc, for as long as the
    process lives. By itself glibc keeps blocks of up to 32 MiB, which in a run that gathers and frees parameters all
    the time grows to what it would take to have them all."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" and sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak of the CUDA allocator, or of this process's resident memory, in MB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
