"""Ask an NVIDIA GPU about itself while a run trains on it, through NVML (nvidia-ml-py, imported where there is such a
GPU only)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

EVERY_S = 5.0


class Telemetry:
    """Power, utilisation, memory in use and temperature of the device a run trains on, at most every ``EVERY_S``
    seconds.

    It serves the log only: without a GPU, without NVML or nvidia-ml-py there is none of it, and a quantity that a GPU
    does not tell is left out. Memory and utilisation are those of the whole device, whoever uses it.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic):
        self._clock, self._next_s = clock, -float("inf")
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            self._nvml, self._handle = _opened(device)

    def sample(self) -> dict[str, float]:
        """Return ``gpu_power_w``, ``gpu_utilisation_percent``, ``gpu_memory_mb``, ``gpu_temperature_c``; {} between two
        samples."""
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
        return {name: value for name, read in readings.items() if (value := self._told(read)) is not None}

    def _told(self, read: Callable[[], float]) -> float | None:
        try:
            return read()
        # not of this GPU, not in this driver, not in this version of the bindings
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._told(self._nvml.nvmlShutdown)
            self._nvml = None


def _opened(device: torch.device) -> tuple[Any, Any]:
    """Return NVML and its handle of the device, by its UUID: NVML counts devices that CUDA_VISIBLE_DEVICES hides.
    (None, None) where either is missing."""
    try:
        import pynvml
    except ImportError:
        return None, None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None, None
