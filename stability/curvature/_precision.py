"""Find the narrowest floating type in a loss's computation.

Rounding errors are estimated from it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stability.curvature._autocast import Autocast
from stability.curvature._graph import graph_nodes
from stability.curvature._inputs import Tensors


def precision_of(value: Tensor, params: Tensors, inside: Iterable[Autocast]) -> float:
    """Return the eps of the narrowest type in a loss's computation.

    Args:
        value: the loss, or outputs, with its graph.
        params: the tensors it was computed from.
        inside: autocasts entered by the loss. The graph alone is not enough: it shows only the ends of a compiled part.
    """
    devices = {param.device.type for param in params.values()}
    types = {param.dtype for param in params.values()}
    types |= {entry.dtype for node in graph_nodes(value) for entry in getattr(node, "_input_metadata", ())}
    types |= {each.dtype for each in inside if each.device in devices and each.gradients}
    types |= {torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
    return max(torch.finfo(each).eps for each in types if each.is_floating_point)
