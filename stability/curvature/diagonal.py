"""Estimate the diagonal of a loss's Hessian from products of the Hessian with random vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stability.curvature._inputs import Tensors, check_params
from stability.curvature.products import hvp


def hutchinson_diagonal(
    loss_fn: Callable[..., Any],
    params: Mapping[str, Tensor],
    *,
    generator: torch.Generator,
    batches: Iterable[Any] | None = None,
) -> Tensors:
    """Estimate the Hessian's diagonal by z ⊙ Hz, z of independent N(0, 1), whose mean it is (Hutchinson 1989; Liu et
    al. 2023, Algorithm 1).

    Loss, ``params`` and ``batches`` as `hvp` takes them. ``generator``: of the CPU, whatever the device; z depends on
    it and on the names' order alone, not on how the batch is cut. The result has the keys and shapes of ``params``.
    """
    probe = {
        name: torch.randn(param.shape, generator=generator, dtype=param.dtype).to(param.device)
        for name, param in check_params(params).items()
    }
    product = hvp(loss_fn, params, probe, batches=batches)
    return {name: z * product[name] for name, z in probe.items()}
