"""NVIDIA GPU telemetry during training through NVML (nvidia-ml-py, imported on demand)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

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
