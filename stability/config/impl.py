"""The setting ``impl`` of a part, and the capabilities of its kernels.

A part with Triton kernels has a field ``impl: Impl = "reference"`` in its Config. Every base class of a family is a
`KernelUser`; parts override its methods as needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stability.config.base import AXES
from stability.config.identity import Since

AUTO = "auto"
IMPL = (
    "how it is computed: reference, torch's own operations, twice differentiable; triton, fused kernels, on CUDA; "
    "auto, triton where it can be, settled when a sweep is read"
)
Impl = Annotated[Literal["reference", "triton", "auto"], Since("reference"), Field(description=IMPL)]
# of mechanisms that flash-linear-attention has, too (`stability.mechanisms._fla`)
IMPL_OR_FLA = (
    "how it is computed: reference, torch's own products, twice differentiable; fla, the kernels of "
    "flash-linear-attention, on CUDA, for training alone, with queries, keys and values in bfloat16; triton, kernels "
    "of ours, on CUDA; auto, triton where it can be, settled when a sweep is read"
)
ImplOrFla = Annotated[Literal["reference", "fla", "triton", "auto"], Since("reference"), Field(description=IMPL_OR_FLA)]


@dataclass(frozen=True)
class Use:
    """Properties of a model that its kernels depend on.

    Attributes:
        width: model width d.
        heads: number of heads H.
        direction: "bidirectional" or "causal".
        dropout: dropout of the attention weights.
    """

    width: int
    heads: int
    direction: str = "bidirectional"
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Kernels:
    """The kernels requested by one part's settings.

    Attributes:
        setting: the setting, e.g. ``sc.impl=triton``; ``mix.sc.impl=triton`` for a part inside another.
        second_order: whether the kernels have second derivatives along a line, so α_max can be measured through them
            (method taylor). No kernel supports second derivatives by autograd.
        lacks: `KernelUser.no_kernel` of these settings.
    """

    setting: str
    second_order: bool = False
    lacks: Callable[[Use], str | None] = field(default=lambda use: None, compare=False, repr=False)

    @property
    def impl(self) -> str:
        return self.setting.rpartition("=")[2]

    @property
    def path(self) -> str:
        return self.setting.rpartition("=")[0]

    def nest_in(self, name: str) -> Kernels:
        """Return a copy for a part nested in the part of this name."""
        return replace(self, setting=f"{name}.{self.setting}")

    def add_field(self, key: str, name: str) -> Kernels:
        """Return a copy with the setting under a run's field.

        Settings on a sweep's axis include the part's name, ``mechanism.sc.impl``, since an axis has several parts.
        Other fields have one part and omit the name, ``objective.impl``.
        """
        setting = self.setting if key in AXES else self.setting.removeprefix(f"{name}.")
        return replace(self, setting=f"{key}.{setting}")

    def check(self, use: Use) -> None:
        """Validate the part's other settings against the kernels.

        Raises:
            ValueError: the kernels do not support one of them, or ``impl=auto`` is not resolved yet; one line.
        """
        if self.impl == AUTO:
            raise ValueError(f"{self.setting}: auto is resolved in a sweep only; write triton or reference here")
        if (lacking := self.lacks(use)) is not None:
            raise ValueError(f"{self.setting} has no kernel for {lacking}; impl=reference computes it")


class KernelUser:
    """Base of parts that may have kernels.

    A part with this project's kernels has a field ``impl`` in its Config, sets ``kernels_second_order`` if they have
    second derivatives along a line, and overrides `no_kernel` for unsupported settings.
    """

    kernels_second_order: ClassVar[bool] = False

    @classmethod
    def kernels(cls, config: Any) -> tuple[Kernels, ...]:
        """Return the kernels for these settings; () for torch's own operations."""
        if "impl" not in type(config).model_fields or config.impl == "reference":
            return ()
        setting = f"{cls.__module__.rpartition('.')[2]}.impl={config.impl}"
        if config.impl == "fla":
            return (Kernels(setting),)
        return (Kernels(setting, cls.kernels_second_order, partial(cls.no_kernel, config)),)

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        """Return the settings unsupported by the Triton kernels, or None.

        Examples: ``graph=top_w``, ``heads of width 8``.
        """
        return None
