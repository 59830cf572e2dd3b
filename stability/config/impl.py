"""Say by what a part is computed: the setting ``impl`` of its Config, and what the kernels that it asks for can do.

A part offers Triton kernels of ours by a field ``impl: Impl = "reference"`` in its Config; every base class of a family
is a `KernelUser`, whose other words it changes where they are not right for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stability.config.base import AXES
from stability.config.identity import Since

IMPL = (
    "how it is computed: reference, torch's own operations, twice differentiable; triton, fused kernels, on CUDA; "
    "auto, triton where it can be, settled when a sweep is read"
)
Impl = Annotated[Literal["reference", "triton", "auto"], Since("reference"), Field(description=IMPL)]


@dataclass(frozen=True)
class Use:
    """What a part is used for, as far as it matters to kernels: the model's ``width`` and ``heads``, the ``direction``
    ("bidirectional" or "causal"), the ``dropout`` of an attention's weights."""

    width: int
    heads: int
    direction: str = "bidirectional"
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Kernels:
    """The kernels that one part's settings ask for.

    - ``setting``: as it is written, e.g. ``sc.impl=triton`` or, of a part within another one, ``mix.sc.impl=triton``.
    - ``second_order``: whether they bring their second derivative along a line, so that α_max is measured through them
      (method taylor). By autograd none has one.
    - ``lacks``: `KernelUser.no_kernel` of these settings.
    """

    setting: str
    second_order: bool = False
    lacks: Callable[[Use], str | None] = field(default=lambda use: None, compare=False, repr=False)

    @property
    def impl(self) -> str:
        return self.setting.rpartition("=")[2]

    def inside(self, name: str) -> Kernels:
        """Return the same where the part stands inside the part of this name."""
        return replace(self, setting=f"{name}.{self.setting}")

    def written_behind(self, key: str, name: str) -> Kernels:
        """Return the same under the field of a run that the part of this name stands in. An axis of a sweep holds
        several parts, whose settings are written with their names, ``mechanism.sc.impl``; of others there is one,
        ``objective.impl``."""
        setting = self.setting if key in AXES else self.setting.removeprefix(f"{name}.")
        return replace(self, setting=f"{key}.{setting}")

    def check(self, use: Use) -> None:
        """Raise a ``ValueError`` of one line for settings beside them that they do not compute, and for ``impl=auto``,
        which is settled before anything is built."""
        if self.impl == "auto":
            raise ValueError(f"{self.setting} is settled when a sweep is read; write triton or reference here")
        if (lacking := self.lacks(use)) is not None:
            raise ValueError(f"{self.setting} has no kernel for {lacking}; impl=reference computes it")


class KernelUser:
    """What every part says of kernels. One with kernels of ours has a field ``impl`` in its Config, sets
    ``kernels_second_order`` where they bring their second derivatives along a line, and says in `no_kernel` which of
    its settings they do not compute."""

    kernels_second_order: ClassVar[bool] = False

    @classmethod
    def kernels(cls, config: Any) -> tuple[Kernels, ...]:
        """Return the kernels by which the part computes with these settings; () for torch's own operations."""
        if "impl" not in type(config).model_fields or config.impl == "reference":
            return ()
        setting = f"{cls.__module__.rpartition('.')[2]}.impl={config.impl}"
        if config.impl == "fla":
            return (Kernels(setting),)
        return (Kernels(setting, cls.kernels_second_order, partial(cls.no_kernel, config)),)

    @classmethod
    def no_kernel(cls, config: Any, use: Use) -> str | None:
        """Return what of these settings the Triton kernels do not compute, as it is written, e.g. ``graph=top_w`` or
        ``heads of width 8``; None where they compute all."""
        return None
