"""Find the origin of a NaN: the first module with a non-finite output.

The output's derivatives along u are checked, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from stability.curvature._inputs import Objective, RandomState, Tensors
from stability.curvature._jet import parts
from stability.curvature.taylor import taylor_sums

_KINDS = ("output", "first derivative along u", "second derivative along u")


def find_nonfinite(objective: Objective, params: Tensors, direction: Tensors, random: RandomState) -> str:
    """Return one line with the name of the first non-finite parameter, direction or module.

    It makes one more evaluation. Module names start at the outermost module called.

    Args:
        objective: the loss.
        params: θ by name.
        direction: u by name.
        random: random state of the evaluation.
    """
    for owner, tensors in (("params", params), ("direction", direction)):
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                return f"{owner}[{name!r}] is not finite"
    watch, objective = _Watch(), objective.drop_recordings()  # a recording calls no module
    handles = [register_module_forward_pre_hook(watch.enter), register_module_forward_hook(watch.leave)]
    try:
        taylor_sums(objective, params, direction, random)
    except (RuntimeError, TypeError, AttributeError, AssertionError):  # taylor fails: check the values alone
        watch.clear()
        with random.replay(), torch.no_grad():
            for _ in objective.terms(params):
                pass
    finally:
        for handle in handles:
            handle.remove()
    return watch.found or "every module's output is finite; the loss or a derivative of it is not"


class _Watch:
    """Global hooks that record the first module with a NaN or +∞.

    First means innermost and earliest; the output and its derivatives are checked. −∞ is allowed, because masks consist
    of it.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.found: str | None = None
        self.root: nn.Module | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        self.root = self.root or module

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the first module with a NaN or +∞ in its output.

        Args:
            module: the module called.
            args: its inputs.
            output: its output, nested or not; its derivatives are checked, too.
        """
        if self.found is not None or self.root is None:
            return
        for tensor in _tensors(output):
            for kind, part in zip(_KINDS, parts(tensor), strict=True):
                if part is not None and part.is_floating_point() and bool((part.isnan() | (part == torch.inf)).any()):
                    names = {id(child): name for name, child in self.root.named_modules()}
                    self.found = (
                        f"the {kind} of {names.get(id(module)) or 'the model'} ({type(module).__name__}) is the "
                        "first that is not finite"
                    )
                    return


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]
