"""A linear part says what stands for the linear maps within mixers and feed-forward networks."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from stability.config import Settings
from stability.models.init import own_parameters


class AbstractLinear:
    """Base of every kind of linear map. ``is_affine``: whether its output is the map Wx + b of its own parameters, so
    that a mechanism may as well take the weight itself."""

    family: ClassVar[str] = "linears"
    Config: ClassVar[type[Settings]]
    is_affine: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any, dense: nn.Linear) -> nn.Linear:
        """Return what stands in the place of ``dense`` and holds its very parameters; nothing is drawn."""
        raise NotImplementedError


def drop_biases(module: nn.Module, kept: str) -> None:
    """Take the biases from the linear maps below ``module``, but those that a module starts itself (`OwnInit`).

    ``kept``: "all", "out" (of maps with that name, a branch's last one), "none".
    """
    own = own_parameters(module)
    for name, child in module.named_modules():
        is_kept = kept == "all" or (kept == "out" and name.rsplit(".", 1)[-1] == "out")
        if isinstance(child, nn.Linear) and not is_kept and id(child.bias) not in own:
            child.register_parameter("bias", None)


def replace_linears(module: nn.Module, kind: type[AbstractLinear], config: Any) -> None:
    """Put a linear map of another kind in the place of every `nn.Linear` below ``module``, under its name."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind.of(config, child))
