"""Kinds of linear maps, one file each."""

from typing import Any, ClassVar

from torch import nn

from stability.config import Settings
from stability.models.init import own_parameters

__all__ = ["AbstractLinear", "drop_biases", "replace_linears"]


class AbstractLinear:
    """Base class for every kind of linear map.

    Attributes:
        is_affine: whether the output is Wx + b with its own parameters, so that a mechanism may use the weight
            directly.
    """

    family: ClassVar[str] = "linears"
    Config: ClassVar[type[Settings]]
    is_affine: ClassVar[bool] = False

    @classmethod
    def of(cls, config: Any, dense: nn.Linear) -> nn.Linear:
        """Return a replacement for ``dense`` with the same parameter objects; nothing is drawn."""
        raise NotImplementedError


def drop_biases(module: nn.Module, kept: str) -> None:
    """Remove biases from linear maps below ``module``, except self-initialised ones (`OwnInit`).

    ``kept``: "all", "out" (maps with that name, the last in a branch) or "none".
    """
    own = own_parameters(module)
    for name, child in module.named_modules():
        is_kept = kept == "all" or (kept == "out" and name.rsplit(".", 1)[-1] == "out")
        if isinstance(child, nn.Linear) and not is_kept and id(child.bias) not in own:
            child.register_parameter("bias", None)


def replace_linears(module: nn.Module, kind: type[AbstractLinear], config: Any) -> None:
    """Replace every `nn.Linear` below ``module`` by another kind, under the same name.

    Args:
        module: changed in place.
        kind: the new kind.
        config: its settings.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind.of(config, child))
