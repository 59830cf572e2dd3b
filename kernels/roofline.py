"""Bound the time of a launch from below by the bytes that it moves and the operations that it takes (Williams et al.
2009, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Traffic:
    """What a launch moves and computes: ``read`` and ``written``, bytes of global memory; ``flops``, operations, a
    multiply-add being two. Traffics add up."""

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
    """A GPU's peaks, as its maker states them.

    - ``bandwidth``: bytes a second of its memory.
    - ``peaks``: operations a second by precision: float32 (IEEE, no tensor cores), tf32 and bf16 (tensor cores, dense).
    - ``shared_memory``: bytes that one multiprocessor can share among its threads, ``of_a_block`` those that one block
      of them can have.
    """

    name: str
    bandwidth: float
    peaks: dict[str, float]
    multiprocessors: int
    shared_memory: int
    of_a_block: int

    def seconds(self, traffic: Traffic, precision: str = "float32") -> float:
        """Return the least time of a launch, max(bytes / bandwidth, operations / peak), in seconds."""
        return max(traffic.bytes / self.bandwidth, traffic.flops / self.peaks[precision])

    def bound_by(self, traffic: Traffic, precision: str = "float32") -> str:
        """Return which of the two that is, "memory" or "compute"."""
        is_memory = traffic.bytes / self.bandwidth >= traffic.flops / self.peaks[precision]
        return "memory" if is_memory else "compute"


# NVIDIA's data sheets of the H100 and the H200 Tensor Core GPU (SXM), whose tensor-core rates are with sparsity: half of
# them here. Shared memory: "Tuning CUDA Applications for Hopper", 1.4.2.3 (228 KiB; a block has at most 227).
HOPPER = {"float32": 67 * TERA, "tf32": 494.7 * TERA, "bf16": 989.4 * TERA}
H100 = Device("H100 SXM", 3.35 * TERA, HOPPER, 132, 228 * 1024, 227 * 1024)
H200 = Device("H200", 4.8 * TERA, HOPPER, 132, 228 * 1024, 227 * 1024)
DEVICES = (H100, H200)
