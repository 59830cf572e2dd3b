"""Compute in the precision that torch would choose: float32 inside of operations on narrow numbers, and autocast's
types."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from stability.curvature._jet import Rule, each


def in_float32(rule: Rule) -> Rule:
    """Compute a rule of x in float32 where x is narrower, and round the result once, as torch's kernels do."""

    @wraps(rule)
    def widened(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return rule(x, *args, **kwargs)
        result = rule(each(Tensor.float, x), *args, **kwargs)
        return each(lambda part: part.to(x.dtype), result)

    return widened
