"""Restore a module's torchmetrics after a replay.

Otherwise the replay would count its batch again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_OF_MODULES = {"_parameters", "_buffers", "_modules"}  # nn.Module's own; a metric's update does not write into them


@contextmanager
def restore_metrics(module: nn.Module) -> Iterator[None]:
    """Put the state of the module's metrics back after the block.

    Also after an error.
    """
    metrics = [(metric, _copy_state(vars(metric))) for metric in _metrics(module)]
    try:
        yield
    finally:
        for metric, state in metrics:
            vars(metric).clear()
            vars(metric).update(state)


def _metrics(module: nn.Module) -> list[nn.Module]:
    """Find the module's metrics, also in attributes, lists and dicts; none without torchmetrics."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return []
    held = [value for each in module.modules() for value in vars(each).values()]
    held += [item for value in held if isinstance(value, (list, tuple)) for item in value]
    held += [item for value in held if isinstance(value, dict) for item in value.values()]
    roots = [module, *(item for item in held if isinstance(item, library.Metric))]
    found = {id(each): each for root in roots for each in root.modules() if isinstance(each, library.Metric)}
    return list(found.values())


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a metric's attributes: tensors, lists and dicts."""
    return {name: value if name in _OF_MODULES else _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is list:
        return [_copy(item) for item in value]
    return _copy_state(value) if type(value) is dict else value
