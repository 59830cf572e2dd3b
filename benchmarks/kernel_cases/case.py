"""A case is a computation at one size that several contestants do, with what is promised of ours."""

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
    """A promise about two contestants: ``measured`` over ``beside`` in ``quantity``, "time" or "memory", or of
    ``beside`` over ``measured`` where ``is_gain``. ``beside`` "bound": the roofline's time on the device at hand."""

    measured: str
    beside: str
    limit: float
    quantity: str = "time"
    is_gain: bool = False


@dataclass(frozen=True)
class Case:
    """A computation at one size.

    - ``contestants``: by name what makes the call that is measured, on a device; it may raise where it cannot.
    - ``traffic``: what ours moves and computes; None: it has no model of it yet.
    - ``precision``: of products: float32, tf32 or bf16.
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
    """Return numbers of N(0, 1), the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def step_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """Return the call of a forward and a backward pass; its loss weighs every output, and its result is the
    gradients."""
    with torch.no_grad():
        found = forward()
    weight = drawn(*found.shape, device=found.device, dtype=found.dtype, grad=False)
    return lambda: torch.autograd.grad(forward(), leaves, weight)


def module_step(build: Callable[[], nn.Module], *shape: int, precision: str, compiled: bool = False) -> Any:
    """Return what makes the call of a module's forward and backward pass, to its input and its parameters. ``build``:
    the module; ``shape``: of its input; ``compiled``: by torch.compile."""

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
