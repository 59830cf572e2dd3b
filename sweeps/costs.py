"""Measure what a variant's steps cost in time and memory before a sweep begins."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stability import build
from stability.config.computed import computed_parts
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.config.generation import GenerationSpec
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.base import AbstractCorpus
from stability.plan.plan import Plan
from stability.plan.resolved import ResolvedRun
from stability.training.machine import lacking_kernels, peak_memory_mb
from stability.training.step import Replica
from sweeps.gpus import DEFAULT, GPUS, Gpu

# In units of a training step, roughly. A recorded step: a gradient with its graph, a product along the direction and a
# forward pass. A Hessian-vector
# product goes twice through the graph; one curvature takes a forward pass of three terms; the paper's difference takes
# gradients at θ ± εu, and at θ once more.
RECORDED_STEP, PRODUCT, ALONG, FORWARD, DIFFERENCE = 4.0, 3.3, 2.0, 1 / 3, 3.0
BRACKETING = 6  # loss values that the critical learning rate takes until it is bracketed


# On a CPU, what a step may take to be measured; a training step takes 6 operations per parameter and token, and 16
# bytes per parameter stand.
MOST_OPERATIONS, MOST_PARAMETERS = 2e12, 1e8
OPERATIONS, REFERENCE_SPEED = 6, 1e13  # the speed of one large GPU in float32, roughly


TIMED_STEPS, TIMED_S = 3, 3.0  # after a first one that warms up: as many as fit the time, at least one


@dataclass(frozen=True)
class Timing:
    """The times of one run: seconds of a training step, of all of them with their validations, of what follows them
    (α_max, samples), and the peak memory of the process that measured a step: on a CPU all that is resident, on a GPU
    what the allocator held; of a GPU that is not here, what `sweeps.estimated` says of it."""

    step_s: float
    train_s: float
    after_s: float
    memory_mb: float

    @property
    def run_s(self) -> float:
        return self.train_s + self.after_s


@dataclass(frozen=True)
class Cost:
    """The cost of one run: its parameters, multiply-adds of the mechanism per token in one forward pass, its timing
    (None: not known), and the bytes that its mixers keep of one sequence to go on reading (None: it cannot
    be gone on with)."""

    num_params: int
    mixing: float
    timing: Timing | None
    state_bytes: int | None = None


def measure_costs(plan: Plan, gpu: Gpu | None = None) -> dict[str, Cost]:
    """Return the cost of each kind of run by its name: measured on this machine, or estimated for ``gpu``."""
    return {kind.name: _cost(kind, plan, gpu) for kind in plan.kinds}


def gpu_of(plan: Plan) -> Gpu | None:
    """Return the GPU that a plan estimates its runs for: ``plan_gpu``, or `DEFAULT` if one of them is too large to be
    timed on this machine's CPU; None: runs are timed here."""
    spec = plan.spec
    if spec.shard_parameters:
        return None
    if spec.plan_gpu is not None:
        return GPUS[spec.plan_gpu]
    if build.resolve_device(spec.device).type != "cpu":
        return None
    return GPUS[DEFAULT] if any(map(_too_large, plan.kinds)) else None


def _too_large(kind: ResolvedRun) -> bool:
    """Return whether a step of a run is too much to be timed on a CPU."""
    num_params, tokens = kind.num_params, kind.spec.batch * kind.spec.model.positions
    return num_params > MOST_PARAMETERS or OPERATIONS * num_params * tokens > MOST_OPERATIONS


def _cost(kind: ResolvedRun, plan: Plan, gpu: Gpu | None) -> Cost:
    """Return the cost of one kind of run. It is timed if the model is not too large for this machine, or estimated for
    ``gpu``."""
    run, spec, corpus, device = kind.spec, plan.spec, plan.corpus, build.resolve_device(plan.spec.device)
    # what is split may not fit the one device that would be timed, and kernels may be for other machines than this one
    can_run = not spec.shard_parameters and lacking_kernels(computed_parts(run), device) is None
    timing = None
    if gpu is not None:
        timing = _estimated(run, corpus, spec, gpu)
    elif can_run and (device.type != "cpu" or not _too_large(kind)):
        timing = _timing(run, corpus, spec, device)
    direction = plan.objective.direction
    state_bytes = build.sequence_state_bytes(run, direction)
    return Cost(kind.num_params, _mixing(run, direction), timing, state_bytes)


def _estimated(run: RunSpec, corpus: AbstractCorpus, spec: SweepSpec, gpu: Gpu) -> Timing | None:
    """Return a run's timing on a GPU, from its step's; a validation takes a forward pass of its sequences."""
    from sweeps.estimated import estimated_step

    step = estimated_step(run, corpus, gpu)
    if step is None:
        return None
    step_s, memory = step
    validation_s = FORWARD * step_s * run.evaluation.sequences / run.batch
    return _whole(run, spec, step_s, validation_s, memory / 2**20)


def _timing(run: RunSpec, corpus: AbstractCorpus, spec: SweepSpec, device: Any) -> Timing:
    """Time a step and a validation of one run, and add up from them what the whole run takes, α_max and samples
    included."""
    _forget_peak(device)
    replica = Replica(run, corpus, device)
    replica.train_step(1)
    step_s = _step_s(replica)
    started = time.perf_counter()
    replica.validation.measure(replica.model)
    validation_s = time.perf_counter() - started
    return _whole(run, spec, step_s, validation_s, peak_memory_mb(device))


def _whole(run: RunSpec, spec: SweepSpec, step_s: float, validation_s: float, memory_mb: float) -> Timing:
    """Return the timing of a whole run, α_max and samples included, from a step's and a validation's seconds."""
    validations = 2 + run.steps // run.evaluation.every_steps
    curvature_s = (
        curvature_steps(spec.curvature, run.model.layers) * step_s * (spec.curvature.batch or run.batch) / run.batch
        if spec.hessian
        else 0.0
    )
    samples_s = 0.0 if spec.generate is None else generation_steps(run, spec.generate) * step_s
    return Timing(step_s, run.steps * step_s + validations * validation_s, curvature_s + samples_s, memory_mb)


def _step_s(replica: Replica) -> float:
    """Return the median of a few steps' seconds, since a machine that does something else for a moment makes one step
    look long."""
    seconds: list[float] = []
    while len(seconds) < TIMED_STEPS and sum(seconds) < TIMED_S:
        started = time.perf_counter()
        replica.train_step(2 + len(seconds))
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _forget_peak(device: Any) -> None:
    """Reset the measured peak of memory, so that each kind's is its own. Where the system has no such switch (macOS),
    it is the largest so far."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5: the peak of resident memory


def _mixing(run: RunSpec, direction: str) -> float:
    """Return the multiply-adds of all mixing layers per position in one forward pass, cross mechanisms included; a
    layer counts as often as its residual connection evaluates it."""
    from stability.mechanisms import MixerShape
    from stability.registry import Registry

    size, mechanism = run.model, Registry("mechanisms").load(run.mechanism.name)
    shapes = [MixerShape(size.width, size.heads, direction, layer, size.layers) for layer in range(size.layers)]
    shapes *= size.loops
    evaluations = Registry("residuals").load(run.residual.name).evaluations(run.residual.settings)
    mixing = evaluations * sum(mechanism.cost(run.mechanism.settings, shape, size.positions) for shape in shapes)
    if run.cross is not None:
        cross, objective = Registry("mechanisms").load(run.cross.name), Registry("objectives").load(run.objective.name)
        contexts, num_context = (
            objective.contexts_of(run.objective.settings),
            objective.num_context(run.objective.settings),
        )
        if contexts:  # once before the blocks, on a plain connection, counted as if each were as long as the source
            num_context, shapes, evaluations = size.positions, shapes[:1] * len(contexts), 1
        costs = [cross.cost(run.cross.settings, shape, size.positions, num_context) for shape in shapes]
        mixing += evaluations * sum(costs)
    return mixing / size.positions


def curvature_steps(curvature: CurvatureSpec, layers: int) -> float:
    """Return the cost of the protocol, and of what `measure` adds to it, in training steps."""
    warm_up = curvature.warmup_steps * len(curvature.state) + (
        curvature.warmup_batches if "paper" in curvature.state else 0
    )
    phases = 2 if curvature.phase == "all" else 1
    cost = 0.0
    if {"alpha_max", "critical_lr"} & set(curvature.measure):
        cost += warm_up + len(curvature.state) * _recorded(curvature)
    tables = _tables(curvature.spectra, layers)
    asked = [tables[name] for name in tables if name in curvature.measure]
    if asked:  # each state's protocol once more, up to its first recorded step
        cost += warm_up + len(curvature.state) * (RECORDED_STEP + sum(asked))
    return phases * cost


def generation_steps(run: RunSpec, generation: GenerationSpec) -> float:
    """Return the cost of sampling in training steps: a forward pass of a batch of samples for each step of the sampler.
    An oracle's own cost is not in it."""
    from stability.probes.generation.generating import steps_of_a_phase

    return FORWARD * steps_of_a_phase(run, generation) * min(generation.batch, generation.num) / run.batch


def _recorded(curvature: CurvatureSpec) -> float:
    """Return the cost of the recorded steps of one state, in training steps."""
    critical = _critical(curvature.spectra) if "critical_lr" in curvature.measure else 0.0
    return (RECORDED_STEP + critical) * curvature.recorded_steps + DIFFERENCE * min(
        curvature.parity_steps, curvature.recorded_steps
    )


def _critical(spectra: SpectraSpec) -> float:
    return FORWARD * (BRACKETING - math.log2(spectra.critical_resolution))


def _tables(spectra: SpectraSpec, layers: int) -> dict[str, float]:
    """Return what each table costs at one step of one state, in training steps. Lanczos is charged with all the
    products that it may take."""
    return {
        "profile": _critical(spectra) + FORWARD * 2 * (spectra.profile_points + 1),
        "sharpness": PRODUCT * (2 * spectra.eigenvalue_products + spectra.trace_products + 2) + spectra.noise_batches,
        "density": PRODUCT * spectra.density_probes * spectra.density_products,
        "blocks": PRODUCT + ALONG * (4 * layers + 3),
    }
