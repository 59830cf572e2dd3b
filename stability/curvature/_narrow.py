"""Number types inside second-order rules, as torch treats them.

Rules on narrow types compute in float32, arguments are cast as by autocast, and complex numbers are refused.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.curvature._jet import AUTOCAST, NoRule, Rule, map_components


def compute_in_float32(rule: Rule) -> Rule:
    """Compute a rule of x in float32 if x is bfloat16 or float16.

    The result is rounded once, as in torch's kernels.
    """

    @wraps(rule)
    def compute_rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return rule(x, *args, **kwargs)
        result = rule(map_components(Tensor.float, x), *args, **kwargs)
        return map_components(lambda part: part.to(x.dtype), result)

    return compute_rule


def refuse_complex(name: str, *tensors: Any) -> None:
    """Raise `NoRule` if a tensor is complex and the function has no complex derivative.

    For such a function, f(z + t·u) is not g(t).
    """
    if any(isinstance(x, Tensor) and x.is_complex() for x in tensors):
        raise NoRule(f"taylor has no rule for {name} of complex numbers")


def _cast(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a floating tensor in ``dtype`` (default: autocast's) if autocast is on; float64 unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x
    wanted = torch.get_autocast_dtype(device) if dtype is None else dtype
    return map_components(lambda part: part.to(wanted), x)


def _cast_on_gpus(x: Any) -> Any:
    return _cast(x, torch.float32) if isinstance(x, Tensor) and x.device.type != "cpu" else x


_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm)
AUTOCAST.update(dict.fromkeys((*_MATRIX_PRODUCTS, Tensor.bmm, F.linear, F.scaled_dot_product_attention), _cast))
AUTOCAST[F.cross_entropy] = partial(_cast, dtype=torch.float32)
_WIDE_ON_GPUS = (F.cosine_similarity, torch.cosine_similarity, F.rms_norm, torch.rms_norm)
AUTOCAST.update(dict.fromkeys(_WIDE_ON_GPUS, _cast_on_gpus))
# these also have an ATen rule; torch calls it with arguments cast by autocast
_LEFT = (torch.einsum, F.layer_norm, torch.layer_norm, torch.sum, Tensor.sum)
AUTOCAST.update(dict.fromkeys((*_LEFT, torch.cumsum, Tensor.cumsum), None))
