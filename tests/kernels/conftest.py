"""On a machine with CUDA these tests run compiled: what they draw and make lies on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from kernels import availability

MADE_ON_A_DEVICE = (torch.rand, torch.randn, torch.randint, torch.randperm)


class DrawnOnCPU(TorchFunctionMode):
    """Draw from a CPU's generator on the CPU, then move to the GPU: the same numbers on every machine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu":
            return func(*args, **kwargs)
        if func in MADE_ON_A_DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs.get("device") or "cuda")
        on_cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
        drawn = func(*[value.cpu() if isinstance(value, torch.Tensor) else value for value in args], **on_cpu)
        in_place = func.__name__.endswith("_")  # torch.nn.init hands its tensor over by name
        return (args[0] if args else kwargs["tensor"]).copy_(drawn) if in_place else drawn.to("cuda")


def rounded_as_compiled(argument: Any) -> Any:
    """Return a launch's argument as a compiled kernel gets it: a float in float32, where the interpreter has float64."""
    return torch.tensor(argument, device="cpu").item() if isinstance(argument, float) else argument


@pytest.fixture(autouse=True)
def floats_are_passed_as_to_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda argument: convert(rounded_as_compiled(argument)))


@pytest.fixture(autouse=True)
def compiled_where_there_is_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make tensors on the GPU where kernels are compiled for it."""
    if availability.is_interpreted() or not torch.cuda.is_available():
        yield
        return
    if "lab" in request.fixturenames:
        pytest.skip("trains on the CPU")
    with torch.device("cuda"), DrawnOnCPU():
        yield
