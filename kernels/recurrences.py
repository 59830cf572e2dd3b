"""Run recurrences by flash-linear-attention's Triton kernels, for training on CUDA.

MIT; github.com/fla-org/flash-linear-attention. Same results as the references in `stability.mechanisms`, with queries,
keys and values rounded to bfloat16. First derivatives only: a second one is refused; the library's own would be
silently wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.operation import Operation

NEEDED = ("triton", "fla")


def find_lacking(device: torch.device | None = None) -> str | None:
    """Return the missing requirement for the kernels, or None.

    ``device`` is the kernels' device; None: any on this machine.
    """
    if not torch.cuda.is_available():
        return "a CUDA device"
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} (pip install flash-linear-attention)"
    return "device=cuda" if device is not None and device.type != "cuda" else None


def gated_linear_attention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, log_decay: Tensor) -> Tensor:
    """Return y_t = S_tᵀ q_t with S_t = Diag(a_t) S_{t−1} + k_t v_tᵀ.

    (B, H, N, V), float32. B and H may be 1 except in v.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        log_decay: ln a ≤ 0, (B, H, N, K) per key feature, or (B, H, N, 1).

    Raises:
        RuntimeError: the kernels cannot run.
    """
    if log_decay.shape[-1] > 1:
        run = _kernel("gla", "chunk_gla")
    else:
        run, log_decay = _kernel("simple_gla", "chunk_simple_gla"), log_decay[..., 0]
    return _run(run, ("q", "k", "v", "g"), v_BHNV, q_BHNK, k_BHNK, v_BHNV, log_decay)


def delta_rule(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, beta_BHN: Tensor, log_decay: Tensor | None = None
) -> Tensor:
    """Return y_t = S_tᵀ q_t for the delta rule, (B, H, N, V), float32.

    S_t = (I − β_t k_t k_tᵀ) Diag(a_t) S_{t−1} + β_t k_t v_tᵀ.

    Args:
        q_BHNK: queries.
        k_BHNK: keys.
        v_BHNV: values.
        beta_BHN: β.
        log_decay: ln a as in `gated_linear_attention`; None: no decay.

    Raises:
        RuntimeError: the kernels cannot run.
    """
    if log_decay is None:
        run = _kernel("delta_rule", "chunk_delta_rule")
        return _run(run, ("q", "k", "v", "beta"), v_BHNV, q_BHNK, k_BHNK, v_BHNV, beta_BHN)
    names = ("q", "k", "v", "beta", "g")
    if log_decay.shape[-1] > 1:
        run = _kernel("kda", "chunk_kda")
    else:
        run, log_decay = _kernel("gated_delta_rule", "chunk_gated_delta_rule"), log_decay[..., 0]
    return _run(run, names, v_BHNV, q_BHNK, k_BHNK, v_BHNV, beta_BHN, log_decay)


def _kernel(op: str, name: str) -> Callable[..., Any]:
    """Return the library's function ``fla.ops.<op>.<name>``.

    ``RuntimeError`` if kernels cannot run, or tensors are not on CUDA.
    """
    if (what := find_lacking()) is not None:
        raise RuntimeError(f"impl=fla needs {what}; impl=reference computes the same")
    kernel = getattr(importlib.import_module(f"fla.ops.{op}"), name)

    def run_on_cuda(**parts: Any) -> Any:
        if not parts["q"].is_cuda:
            raise RuntimeError("impl=fla computes on CUDA, and the model is on a CPU; use device=cuda")
        return kernel(**parts)

    return run_on_cuda


def _run(kernel: Callable[..., Any], names: tuple[str, ...], like_BHNV: Tensor, *parts: Tensor) -> Tensor:
    """Return a kernel's result for parts (B, H, N, …), passed by ``names``.

    The library's layout is (B, N, H, …). q, k and v in bfloat16, strengths and decays in float32; q is not divided by
    √K.
    """
    batch_and_heads = like_BHNV.shape[:2]
    whole = [part.expand(*batch_and_heads, *part.shape[2:]) for part in parts]
    dtypes = [torch.bfloat16 if name in ("q", "k", "v") else torch.float32 for name in names]

    def call(*inputs: Tensor) -> Tensor:
        laid = {
            name: part.transpose(1, 2).to(dtype).contiguous()
            for name, part, dtype in zip(names, inputs, dtypes, strict=True)
        }
        return kernel(**laid, scale=1.0)[0].transpose(1, 2).float()

    return KERNELS(*whole, call=call)


class _Library(Operation):
    """An operation with the setting impl=fla in its error messages, for all kernels."""

    def refusal(self, what: str) -> str:
        return f"the kernels of impl=fla have no {what}; impl=reference has one"


def _forward(*inputs: Tensor, call: Callable[..., Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the result of ``call``, with its autograd graph for the library's backward."""
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in inputs]
        found = call(*leaves)
    return found.detach(), (found, *leaves)


def _backward(
    gradient: Tensor, needed: Any, saved: tuple[Tensor, ...], *inputs: Tensor, call: Callable[..., Tensor]
) -> tuple[Tensor | None, ...]:
    found, *leaves = saved
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    given = iter(torch.autograd.grad(found, asked, gradient, retain_graph=True))
    return tuple(next(given) if leaf.requires_grad else None for leaf in leaves)


KERNELS = _Library("kernels", _forward, _backward)
