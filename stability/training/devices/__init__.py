"""Interface between a trainer and the devices of its run; the single device in one process; memory and load."""

from __future__ import annotations

import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stability.models.backbone import Backbone
from stability.objectives import Examples

Tensors = dict[str, Tensor]  # whole parameters, by their names
State = dict[str, Any]  # the whole state of an optimizer
Sums = tuple[Tensor, ...]  # scalars to add over microbatches, the loss first; equally many for each microbatch
# (microbatch, its first row in the batch) → its sums; adds its gradient to the parameters'
Add = Callable[[Examples, int], Sums]


class Devices(ABC):
    """A run's devices, from one of its processes; exit ends the other processes.

    ``model`` and ``optimizer`` in the methods are this process's own; they may be only a part.
    """

    def __enter__(self) -> Devices:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end(error)

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """End the other processes.

        Raises:
            RuntimeError: one of them died and so caused ``error``; the message has its last output.
        """

    @abstractmethod
    def describe(self) -> dict[str, int]:
        """Return the fields about devices in a row of timings."""

    @abstractmethod
    def tell(self, method: str, *numbers: int) -> None:
        """Send the other processes a method to call (`Replica.FOLLOWED`)."""

    @abstractmethod
    def build(self, make: Callable[[], Backbone]) -> Backbone:
        """Return the model that ``make`` builds on the CPU, placed on the devices."""

    @abstractmethod
    def put(self, model: nn.Module, optimizer: Optimizer, parameters: Tensors | None, state: State | None) -> None:
        """Load whole parameters and the optimizer's whole state.

        Args:
            model: receives the parameters.
            optimizer: receives the state.
            parameters: whole parameters by name.
            state: the optimizer's whole state; None: unchanged.
        """

    @abstractmethod
    def gather(self, model: Backbone, optimizer: Optimizer) -> tuple[nn.Module, State]:
        """Return the whole model and the optimizer's whole state, as for a checkpoint."""

    @abstractmethod
    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        """Add the gradient of a batch to the parameters'; return its sums.

        Args:
            add: adds the gradient of a microbatch, given its first row, and returns its sums.
            examples: the batch.
            rows: rows of a microbatch, at most.
            parameters: the model's parameters.
        """

    @abstractmethod
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the local part of each tensor, as plain tensors with shared memory."""

    @abstractmethod
    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the joint Euclidean norm of parameters, gradients or results of `local`."""

    @abstractmethod
    def norms(self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
        """Return the `norm` of each group of the tensors, given by their indices, (G,)."""

    @abstractmethod
    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients down to the norm ``limit`` if above it; return their previous norm.

        α_max assumes this single factor (`stability.probes.curvature.descent`), as do the logged share of clipped steps
        and `guards_can_act`.
        """

    @abstractmethod
    def all_true(self, is_so: bool) -> bool:
        """Return whether a condition is true in every process."""

    @abstractmethod
    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        """Yield ``function`` of each item in order, without gradients."""


def add_sums(parts: Sequence[Sums]) -> Sums:
    """Return the sums over all microbatches."""
    return tuple(torch.stack(column).sum() for column in zip(*parts, strict=True))


def norms_of_groups(tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the joint Euclidean norm of each group of tensors of one dtype, given by their indices, (G,)."""
    each = torch.stack(torch._foreach_norm(list(tensors)))
    if all(len(group) == 1 for group in groups):
        return each[[index for (index,) in groups]]
    return torch.stack([torch.linalg.vector_norm(each[list(group)]) for group in groups])


class OneDevice(Devices):
    """The only device of a run, with everything in one process."""

    def __init__(self, device: torch.device):
        self._device = device

    def end(self, error: BaseException | None) -> None:
        """End nothing: there are no other processes."""

    def describe(self) -> dict[str, int]:
        return {}

    def tell(self, method: str, *numbers: int) -> None:
        """Send nothing: there are no other processes."""

    def build(self, make: Callable[[], Backbone]) -> Backbone:
        return make().to(self._device)

    def put(self, model: nn.Module, optimizer: Optimizer, parameters: Tensors | None, state: State | None) -> None:
        assert parameters is not None
        model.load_state_dict(parameters)
        if state is not None:
            optimizer.load_state_dict(state)

    def gather(self, model: Backbone, optimizer: Optimizer) -> tuple[nn.Module, State]:
        return model, optimizer.state_dict()

    def backward(self, add: Add, examples: Examples, rows: int, parameters: Sequence[nn.Parameter]) -> Sums:
        return add_sums([add(part, rows * index) for index, part in enumerate(examples.split(rows))])

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(tensors)

    def norms(self, tensors: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
        return norms_of_groups(tensors, groups)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        if math.isinf(limit):  # an infinite norm over it would be NaN
            return self.norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        return nn.utils.clip_grad_norm_(parameters, limit)

    def all_true(self, is_so: bool) -> bool:
        return is_so

    def spread(self, function: Callable[[Any], tuple[float, ...]], items: Sequence[Any]) -> Iterator[tuple[float, ...]]:
        return map(function, items)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory in MB: of the CUDA allocator, or this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


EVERY_S = 5.0


class Telemetry:
    """Power, utilisation, memory and temperature of the GPU, at most every ``EVERY_S`` seconds.

    For the log only: no GPU, NVML or nvidia-ml-py gives no values, and unsupported quantities are omitted. Memory and
    utilisation cover the whole device with all its users.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic):
        self._clock, self._next_s = clock, -float("inf")
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            self._nvml, self._handle = _open(device)

    def sample(self) -> dict[str, float]:
        """Return ``gpu_power_w``, ``gpu_utilisation_percent``, ``gpu_memory_mb``, ``gpu_temperature_c``.

        {} between two samples.
        """
        if self._nvml is None or self._clock() < self._next_s:
            return {}
        self._next_s = self._clock() + EVERY_S
        nvml, handle = self._nvml, self._handle
        readings: dict[str, Callable[[], float]] = {
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, read in readings.items() if (value := self._query(read)) is not None}

    def _query(self, read: Callable[[], float]) -> float | None:
        try:
            return read()
        # unsupported by this GPU, driver or version of the bindings
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._query(self._nvml.nvmlShutdown)
            self._nvml = None


def _open(device: torch.device) -> tuple[Any, Any]:
    """Return NVML and its device handle, or (None, None) if either is missing."""
    try:
        import pynvml
    except ImportError:
        return None, None
    # By UUID: NVML also counts devices hidden by CUDA_VISIBLE_DEVICES.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None, None
