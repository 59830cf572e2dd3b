"""Contexts of a model's forward pass: precision, mode, seeded dropout, order of derivatives; and all seeded draws.

The precision is float32, or bfloat16 by autocast with float32 weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stability.config.training import Precision


def computing_in(precision: Precision, device: torch.device | str) -> AbstractContextManager[Any]:
    """Return the context for a forward pass in a precision.

    "bf16": matrix products are in bfloat16 (`torch.autocast`). Additions to the residual state, norms and losses remain
    in float32, and so do parameters, gradients and the optimizer's state. The backward pass is outside the context:
    each operation uses its forward dtype. "float32" and "tf32" differ only by `allow_tf32`, for the whole process.
    """
    return torch.autocast(_switch(device), dtype=torch.bfloat16, enabled=precision == "bf16")


def in_float32(device: torch.device | str) -> AbstractContextManager[Any]:
    """Return a context without autocast: operations use their inputs' dtype."""
    return torch.autocast(_switch(device), enabled=False)


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """Return autocast's dtype on a device, or None without autocast."""
    kind = _switch(device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _switch(device: torch.device | str) -> str:
    """Return the type of device with the autocast switch of ``device``."""
    kind = torch.device(device).type
    # torch's meta device has no autocast. A plan (sweeps.traced) emulates CUDA's and uses the CPU's switch, because
    # torch.utils.checkpoint restores it for the recomputation.
    return "cpu" if kind == "meta" else kind


def rounds_products(device: torch.device | str) -> bool:
    """Return whether matrix products round their factors below float32.

    This is so within autocast, or if TF32 is allowed.
    """
    kind = torch.device(device).type
    is_tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return is_tf32 or autocast_dtype(device) is not None


def require_precision(precision: Precision, device: torch.device) -> None:
    """Raise a ``ValueError`` if the device does not support the precision."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            "precision=tf32 is a mode of CUDA devices, and this one is a CPU; use precision=float32 or bf16"
        )


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Set whether float32 products and convolutions on CUDA may use TF32.

    TF32 rounds factors to 10 bits of mantissa. The setting is for the whole process.

    Raises:
        ValueError: precision is tf32 and the device has none.
    """
    require_precision(precision, device)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider, the least dtype of the residual state."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def generator_for(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """Return a fresh CPU generator for one draw, equal on every device.

    Args:
        seed: e.g. ``spec.seed``.
        purpose: name of the stream of draws, e.g. "train".
        index: number of the draw in the stream, e.g. the step.
    """
    return torch.Generator().manual_seed(_number(seed, purpose, index))


def drops(model: nn.Module) -> bool:
    """Return whether training mode has any dropout: an `nn.Dropout` with p > 0."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode; restore each module's mode on exit.

    Modes change only here. A model already in this mode is left alone: a training run leaves training mode only for
    validations, and a model loaded for reading stays in evaluation mode. Optimizers are not notified.
    """
    if model.training == training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def dropping(
    model: nn.Module, device: torch.device, seed: int, purpose: str, index: int, first_row: int
) -> Iterator[None]:
    """Run a forward pass with dropout seeded by (seed, purpose, index, first_row).

    The draws depend only on these and on the order of the model's modules, not on earlier draws or on the process of
    the microbatch. Other microbatch boundaries give other draws. torch's own generators (CPU and device) are seeded and
    restored on exit, so random draws inside plugins are reproducible, too.

    Args:
        model: put into training mode within.
        device: device of the forward pass.
        seed: seed of the run.
        purpose: stream of draws, e.g. "train".
        index: number of the batch.
        first_row: first row of the microbatch in its batch.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[number])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(_number(seed, f"{purpose}/dropout/{first_row}", index))
        with in_mode(model, training=True):
            yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _number(seed: int, purpose: str, index: int) -> int:
    """Return a seed below 2^63 for one draw."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


_promised = False  # of the current pass: that it is differentiated only once


@contextmanager
def differentiated_once(promised: bool = True) -> Iterator[None]:
    """Let mixers compute a forward pass by functions without second derivatives.

    A second derivative of such a pass raises an error. The backward pass may lie outside the context.

    Args:
        promised: False: change nothing, as for a compiled model.
    """
    global _promised
    before, _promised = _promised, promised
    try:
        yield
    finally:
        _promised = before


def is_differentiated_once(x: Tensor) -> bool:
    """Return whether a pass over ``x`` on a CPU is differentiated once, and without autocast."""
    return _promised and torch.is_grad_enabled() and x.device.type == "cpu" and autocast_dtype(x.device) is None
