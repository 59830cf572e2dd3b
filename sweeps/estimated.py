"""Estimate a run's time and memory on an absent GPU.

The estimate uses a trace of a training step and the card's published peaks, listed here.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus

if TYPE_CHECKING:
    from torch import Tensor
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


FLOAT32 = 4  # bytes
SEED = 0


def estimate_step(run: RunSpec, corpus: AbstractCorpus, gpu: Gpu) -> tuple[float, float] | None:
    """Return (minimum seconds of a training step, peak memory in bytes) on a GPU.

    Seconds are the sum of each operation's least time by its bytes and matrix products (`kernels.roofline`). Operations
    run one after another, over all microbatches. The reads and writes of AdamW-like optimizers are added.

    Bytes are the peak of live tensors over two consecutive microbatches: weights, gradients, activations saved for the
    backward pass, intermediates. The optimizer's state and the copy of the weights for the update's norm are added.
    Neither includes launches, nor memory of the allocator, CUDA's context and libraries.

    Args:
        run: the run.
        corpus: its data.
        gpu: the GPU.

    Returns:
        The pair, or None for a compiled step, value-dependent operations, or an optimizer with state sizes dependent on
            the parameters' shapes.
    """
    state = state_of(run.optimizer)
    if state is None or run.compile:
        return None
    try:
        traced, num_params = _trace_run(run, corpus, gpu)
    except (NotImplementedError, RuntimeError):  # raised by torch: the meta device cannot run an operation
        return None
    standing = num_params * (state + FLOAT32)
    moved = (
        num_params * (5 * FLOAT32 + 2 * state) / gpu.device.bandwidth
    )  # read and write state, weights and copy; read the gradient
    num_parts, times = math.ceil(run.batch / _rows(run)), _times(run)
    return traced.seconds / times * num_parts + moved, traced.peak_bytes + standing


def _rows(run: RunSpec) -> int:
    return min(run.microbatch or run.batch, run.batch)


def _times(run: RunSpec) -> int:
    """Return the number of traced microbatches; in the second of several, gradients already exist."""
    return 1 if _rows(run) == run.batch else 2


def _trace_run(run: RunSpec, corpus: AbstractCorpus, gpu: Gpu) -> tuple[Any, int]:
    """Return the trace of a run's first microbatches, and its number of parameters."""
    import torch

    from stability.build import build_model, build_objective
    from stability.models.backbone import num_parameters
    from stability.models.passes import generator_for
    from sweeps.traced import trace

    objective, generator = build_objective(run, corpus.format), generator_for(SEED, "plan")
    drawn = corpus.longest_batch(_rows(run), objective.tokens_needed(run.model.positions), generator)
    drawn_examples = objective.examples(objective.augmented(drawn, generator), generator)
    counts = drawn_examples.weights_BN if drawn_examples.weights_BN.ndim == 2 else drawn_examples.weights_BN.any(-1)
    num_counted, count = int(counts.count_nonzero()), float(objective.count(drawn_examples, torch.float32))
    examples = drawn_examples.to("meta")
    with torch.device("meta"):
        model = build_model(run, corpus.format)

    def loss() -> Tensor:
        return objective.training_loss(model, examples).total / count

    found = partial(trace, model, loss, device=gpu.device, precision=run.precision, num_counted=num_counted)
    return found(times=_times(run)), num_parameters(model)


def step_traffic(num_params: int, state: float) -> float:
    """Return the bytes read and written by an optimizer's step.

    They are state, weights and their copy in both directions, and the gradient. ``state``: bytes per parameter.
    """
    return num_params * (5 * FLOAT32 + 2 * state)


def state_of(optimizer: Part) -> float | None:
    """Return the bytes of optimizer state per parameter, or None if shape-dependent.

    They are measured after one step on a small matrix.
    """
    import torch

    from stability.optimizers import build, state_bytes
    from stability.registry import Registry

    if not Registry("optimizers").load(optimizer.name).elementwise:
        return None
    matrix = torch.nn.Linear(64, 64, bias=False)
    built = build(optimizer.name, matrix, lr=1e-3, **optimizer.settings.model_dump())
    matrix.weight.grad = torch.ones_like(matrix.weight)
    built.step()
    return round(state_bytes(built))
