"""Define a case: a computation at one size by several contestants, with promises about ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kernels.roofline import Traffic

Call = Callable[[], object]
OURS, EAGER, COMPILED = "ours", "eager", "compile"


@dataclass(frozen=True)
class Promise:
    """A promise about two contestants: ``measured`` over ``beside`` in ``quantity``, at most ``limit``.

    With ``is_gain``: ``beside`` over ``measured``, at least ``limit``. ``quantity`` is "time" or "memory". ``beside``
    "bound" is the roofline's time on the current device.
    """

    measured: str
    beside: str
    limit: float
    quantity: str = "time"
    is_gain: bool = False


@dataclass(frozen=True)
class Case:
    """A computation at one size.

    Attributes:
        contestants: by name, a function that makes the measured call on a device, or raises if unsupported.
        traffic: bytes and operations of ours; None without a model.
        precision: of products: float32, tf32 or bf16.
    """

    kernel: str
    label: str
    contestants: dict[str, Callable[[torch.device], Call]]
    traffic: Callable[[], Traffic] | None = None
    precision: str = "float32"
    promises: tuple[Promise, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.label} {self.precision}"


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """Return numbers of N(0, 1), the same for the same shape.

    Args:
        shape: the tensor's shape.
        device: its device.
        dtype: its type.
        grad: whether it requires gradients.
    """
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def step_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """Return a call of forward and backward pass; it returns gradients.

    The loss is a weighted sum of all outputs.
    """
    with torch.no_grad():
        found = forward()
    weight = drawn(*found.shape, device=found.device, dtype=found.dtype, grad=False)
    return lambda: torch.autograd.grad(forward(), leaves, weight)


def module_step(build: Callable[[], nn.Module], *shape: int, precision: str, compiled: bool = False) -> Any:
    """Return a function that makes a module's forward and backward call on a device.

    Gradients are those of the input and the parameters.

    Args:
        build: makes the module.
        shape: the input's shape.
        precision: "bf16" runs under autocast.
        compiled: whether torch.compile is used.
    """

    def on(device: torch.device) -> Call:
        torch.manual_seed(0)
        module = build().to(device)
        leaves = [drawn(*shape, device=device), *module.parameters()]
        run = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                return run(leaves[0])

        return step_of(forward, leaves)

    return on
