"""Process-wide settings and checks of a trial: threads, precision, kernels, compilers, memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from stability.config.parts import kernels_of
from stability.config.training import Precision
from stability.models.passes import allow_tf32
from stability.startup import postpone_compiler

M_MMAP_THRESHOLD = -3  # of malloc.h


def prepare_torch(threads: int, device: torch.device, precision: Precision = "float32") -> None:
    """Set torch's global state for one trial, so that no setting leaks from another.

    It covers threads, default dtype, deterministic CUDA kernels, TF32, and the import of torch's compiler.

    Args:
        threads: number of CPU threads.
        device: device of the trial.
        precision: precision of matrix products.

    Raises:
        ValueError: the device does not support the precision.
    """
    postpone_compiler()
    allow_tf32(precision, device)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    if device.type == "cuda":
        # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # `torch.use_deterministic_algorithms` also sets this for the compiler, and imports it: as long as importing torch
    torch.set_deterministic_debug_mode("warn" if device.type == "cuda" else "default")


def require_compiler() -> None:
    """Raise a ``ValueError`` if no C++ compiler exists; `torch.compile` needs one everywhere."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise ValueError("compile=true needs a C++ compiler, g++ or clang++, and there is none; use compile=false")


def require_kernels(parts: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Raise a one-line ``ValueError`` if a requested kernel cannot run here.

    Args:
        parts: parts of a run, as for `kernels_of`.
        device: device of the run; None: not known yet.
    """
    if (line := describe_lacking(parts, device)) is not None:
        raise ValueError(line)


def describe_lacking(parts: Mapping[str, Any], device: torch.device | None = None) -> str | None:
    """Return one line about a requested kernel that cannot run here, or None.

    Args:
        parts: parts of a run, as for `kernels_of`.
        device: device of the run; None: not known yet.
    """
    for asked in kernels_of(parts):
        from kernels import availability, recurrences  # most runs request no kernel

        lacking = recurrences.find_lacking if asked.impl == "fla" else availability.find_lacking
        if (what := lacking(device)) is not None:
            return f"{asked.setting} needs {what}; impl=reference computes the same everywhere"
    return None


def compile_model(model: nn.Module) -> nn.Module:
    """Return a `torch.compile` version of a model with shared parameters.

    One graph is compiled per input shape. The uncompiled ``model`` still serves validation, checkpoints and α_max: no
    second derivative passes a compiled graph.

    Raises:
        ValueError: no C++ compiler (`require_compiler`).
    """
    require_compiler()
    torch.use_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=True
    )  # its compiler, too
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))


def return_freed_memory(device: torch.device) -> None:
    """Make malloc return freed blocks of 1 MiB or more to the system.

    It acts on a CPU with glibc, for the life of the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" and sys.platform == "linux" else None
    # By default glibc retains blocks of up to 32 MiB. A run that constantly gathers and frees parameters would grow to
    # the size of all of them at once.
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 20)
