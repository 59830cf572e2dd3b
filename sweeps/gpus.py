"""List the GPUs available to plans, with their published peaks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kernels.roofline import H100, H200, TERA, Device

# NVIDIA's data sheets of the A40 and A100 80GB (SXM): dense rates, of tensor cores except for float32. Shared memory:
# CUDA C++ Programming Guide, technical specifications of compute capability 8.6 and 8.0.
A40 = Device(
    "A40",
    0.696 * TERA,
    {"float32": 37.4 * TERA, "tf32": 74.8 * TERA, "bf16": 149.7 * TERA},
    84,
    100 * 1024,
    99 * 1024,
)
A100 = Device(
    "A100 SXM",
    2.039 * TERA,
    {"float32": 19.5 * TERA, "tf32": 156 * TERA, "bf16": 312 * TERA},
    108,
    164 * 1024,
    163 * 1024,
)


@dataclass(frozen=True)
class Gpu:
    """A GPU with its published peaks, and its memory in bytes."""

    device: Device
    memory: float

    def describe(self, precisions: Collection[str] = ()) -> str:
        """Return the GPU's name, memory, bandwidth and peaks in float32 and ``precisions``, as text."""
        peaks = [
            f"{peak / TERA:.3g}{' TFLOP/s' if name == 'float32' else ''} in {name}"
            for name, peak in self.device.peaks.items()
            if name == "float32" or name in precisions
        ]
        return (
            f"{self.device.name} ({self.memory / 1e9:.0f} GB, {self.device.bandwidth / TERA:.3g} TB/s, "
            f"{', '.join(peaks)})"
        )


# keys are the values of `plan_gpu` (stability/config/sweep.py)
GPUS = {"a40": Gpu(A40, 48e9), "a100": Gpu(A100, 80e9), "h100": Gpu(H100, 80e9), "h200": Gpu(H200, 141e9)}
DEFAULT = "h100"
