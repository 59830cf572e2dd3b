"""Estimate what a run takes on a GPU that is not here, from a trace of its step and the card's published peaks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from stability.config.parts import Part
from stability.config.run import RunSpec
from stability.corpora.base import AbstractCorpus
from sweeps.gpus import Gpu

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32 = 4  # bytes
SEED = 0


def estimated_step(run: RunSpec, corpus: AbstractCorpus, gpu: Gpu) -> tuple[float, float] | None:
    """Return (seconds of one training step at least, bytes of its peak memory) on a GPU; None where that cannot be
    said: computation in bfloat16, a compiled step, parts that need numbers to say what they do, optimizers whose state
    is not so many numbers a parameter.

    Seconds: of every operation, one after another as torch launches them, the least time by its bytes and its matrix
    products (`kernels.roofline`), of all microbatches, and what AdamW and its kind read and write. Bytes: of all
    tensors that live at once in two microbatches one after another (weights, gradients, what is kept for the backward
    pass, what is in between), the optimizer's state, and the copy that the norm of an update is taken by. Neither
    counts what the allocator, CUDA's context and libraries take, nor launches.
    """
    state = state_of(run.optimizer)
    if state is None or run.precision == "bf16" or run.compile:
        return None
    try:
        traced, num_params = _traced(run, corpus, gpu)
    except (NotImplementedError, RuntimeError):  # of torch, where the meta device has no answer
        return None
    standing = num_params * (state + FLOAT32)
    moved = (
        num_params * (5 * FLOAT32 + 2 * state) / gpu.device.bandwidth
    )  # state, weights and copy to and fro, gradient
    num_parts, times = math.ceil(run.batch / _rows(run)), _times(run)
    return traced.seconds / times * num_parts + moved, traced.peak_bytes + standing


def _rows(run: RunSpec) -> int:
    return min(run.microbatch or run.batch, run.batch)


def _times(run: RunSpec) -> int:
    """Return how many microbatches are traced: of several the second finds gradients standing."""
    return 1 if _rows(run) == run.batch else 2


def _traced(run: RunSpec, corpus: AbstractCorpus, gpu: Gpu) -> tuple[Any, int]:
    """Return the trace of a run's first microbatches, and the number of its parameters."""
    import torch

    from stability.build import build_model, build_objective
    from stability.models.backbone import num_parameters
    from stability.training.draws import generator_for
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
    """Return the bytes that an optimizer's step reads and writes: state, weights and their copy to and fro, the
    gradient. ``state``: bytes a parameter."""
    return num_params * (5 * FLOAT32 + 2 * state)


def state_of(optimizer: Part) -> float | None:
    """Return the bytes of the optimizer's state per parameter's entry, after a step on a small matrix; None where they
    depend on the shapes of the parameters."""
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
