"""Parametrizations, one file each: the factors by which initial values, learning rates, decay and ε grow with size.

Every number is a factor on the standard parametrization's. All are 1 for a model of the base size, which is then the
standard one bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from stability.config import Settings
from stability.models.scaling import STANDARD, Factors, TensorSize

__all__ = ["AbstractParametrization", "Growth"]


Update = Literal["adam", "sign", "sgd", "orthogonal"]


@dataclass(frozen=True)
class Growth:
    """How much larger a model is than its base.

    Attributes:
        width: m, width over the base's.
        depth: blocks over the base's.
        rule: rule of the initial values (`stability.models.init.Rule`).
        update: the optimizer's family, of one tensor.
        built_in: factor that the optimizer itself multiplies a step of a matrix by, from its shape; 1 without one.
    """

    width: float
    depth: float
    rule: str
    update: Callable[[str], Update]
    built_in: Callable[[TensorSize], float] = lambda size: 1.0


class WidthSettings(Settings):
    """Settings of a parametrization that scales with the width."""

    base_width: int | None = Field(
        default=None, ge=2, description="width at which it is the standard one; null: the smallest of the sweep"
    )
    weight_decay: Literal["independent", "coupled"] = Field(
        default="independent",
        description="independent: each tensor's decay over a step is the same at every width; coupled: it follows the "
        "tensor's learning rate",
    )

    def grown(self, width: int) -> float:
        """Return m, a width over the base's; the base is a number in a run."""
        assert self.base_width is not None
        return width / self.base_width

    @property
    def base_layers(self) -> int | None:
        """Number of blocks at which it is the standard one; None: any."""
        return None


class AbstractParametrization:
    """Base of parametrizations.

    Attributes:
        scales_depth: whether a deeper model differs from the standard one, too.
    """

    family: ClassVar[str] = "parametrizations"
    Config: ClassVar[type[Settings]]
    scales_depth: ClassVar[bool] = False

    @classmethod
    def factors(cls, config: Any, name: str, size: TensorSize, growth: Growth) -> Factors:
        """Return the factors of one tensor.

        Args:
            config: the part's settings.
            name: name of the parameter.
            size: its size beside the base model's.
            growth: of the model.
        """
        return STANDARD

    @classmethod
    def readout(cls, config: Any, growth: Growth) -> float:
        """Return the factor on the head's input."""
        return 1.0

    @classmethod
    def branch(cls, config: Any, growth: Growth) -> float:
        """Return the factor on every branch's output in the blocks."""
        return 1.0
