"""Bound a launch's time from below by its memory traffic and operations.

Williams et al. 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Traffic:
    """A launch's bytes in global memory, read and written, and its operations.

    A multiply-add is two ``flops``. Traffics can be added.
    """

    read: int
    written: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.flops + other.flops)


@dataclass(frozen=True)
class Device:
    """A GPU's peaks, from the maker's data sheet.

    - ``bandwidth``: memory bytes per second.
    - ``peaks``: operations per second by precision: float32 (IEEE, no tensor cores), tf32 and bf16 (tensor cores,
    dense).
    - ``shared_memory``: bytes per multiprocessor; ``of_a_block``: bytes available to one block.
    """

    name: str
    bandwidth: float
    peaks: dict[str, float]
    multiprocessors: int
    shared_memory: int
    of_a_block: int

    def seconds(self, traffic: Traffic, precision: str = "float32") -> float:
        """Return a launch's least time, max(bytes / bandwidth, operations / peak), in seconds."""
        return max(traffic.bytes / self.bandwidth, traffic.flops / self.peaks[precision])


# NVIDIA's data sheets for the H100 and H200 Tensor Core GPU (SXM). Their tensor-core rates assume sparsity and are
# halved here. Shared memory: "Tuning CUDA Applications for Hopper", 1.4.2.3 (228 KiB; a block has at most 227).
HOPPER = {"float32": 67 * TERA, "tf32": 494.7 * TERA, "bf16": 989.4 * TERA}
H100 = Device("H100 SXM", 3.35 * TERA, HOPPER, 132, 228 * 1024, 227 * 1024)
H200 = Device("H200", 4.8 * TERA, HOPPER, 132, 228 * 1024, 227 * 1024)
DEVICES = (H100, H200)
