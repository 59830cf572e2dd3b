"""Feed-forward networks, one file each; ``build("glu", width=64)`` makes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from stability.config import Settings
from stability.models.block import WithLoss
from stability.models.init import OwnInit
from stability.models.passes import at_least_float32

__all__ = ["AbstractFeedForward", "WithLoss", "at_least_float32", "build"]


def build(name: str, *, width: int, ffn_multiple: float = 4.0, **settings: Any):
    """Return one feed-forward network as a module: ``forward(x_BND) -> y_BND``.

    Args:
        name: the network's name, e.g. "glu".
        width: D.
        ffn_multiple: the model's hidden width in widths D.
        settings: fields of the network's Config.
    """
    from stability.config.parts import validate_settings
    from stability.registry import Registry

    return Registry("ffns").load(name).build(validate_settings("ffns", name, settings), width, ffn_multiple)


def _squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": _squared_relu,
}


class AbstractFeedForward(OwnInit):
    """Base class for every feed-forward network, (B, N, D) → (B, N, D).

    Subclasses are constructed as ``cls(config, width, multiple)``: their own settings, the model's width D and the
    model's ``ffn_multiple``, used unless the settings have their own multiple. The last projection is called ``out``:
    the initialisation scales it by the number of branches. `own_init` lists the parameters with an initialisation of
    their own.

    Attributes:
        activated: name of the linear map whose output enters ``activation``, for the share of dead units
            (``log.activations``); None: unknown.
        has_loss: whether `forward` returns a `WithLoss`.
        num_idle: number of parameters that a position does not meet.
        piecewise_smooth: True if the network selects parts of itself by its own scores, as of a mechanism.
        dropped: dropout of the hidden layer in training mode; the model sets its rate after construction
            (`model.dropout_at=maps`). A network without such a layer ignores it, and its output has dropout anyway.
    """

    family: ClassVar[str] = "ffns"
    Config: ClassVar[type[Settings]]
    activated: ClassVar[str | None] = None
    has_loss: ClassVar[bool] = False
    num_idle: int = 0
    piecewise_smooth: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Dropout(0.0)

    @classmethod
    def build(cls, config: Any, width: int, multiple: float) -> AbstractFeedForward:
        """Return the network of one layer.

        Args:
            config: its settings.
            width: D.
            multiple: the model's hidden width in widths D.
        """
        return cls(config, width, multiple)  # type: ignore[call-arg]

    def margin(self, x_BND: Tensor, *, mask_BN: Tensor | None = None) -> Tensor:
        """Return the smallest gap between a selecting score and its switching value, a scalar.

        It is inf if nothing can change. Only for `piecewise_smooth` networks.
        """
        raise NotImplementedError

    def forward(self, x_BND: Tensor) -> Any:
        """Return (B, N, D), or a `WithLoss` around it for a network with its own loss (a router's).

        A `forward` with a parameter ``mask_BN`` also receives the padding mask, True at valid positions; None: all.
        """
        raise NotImplementedError
