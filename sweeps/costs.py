"""Measure or estimate the time and memory of a sweep's runs before it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stability import build
from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.config.generation import GenerationSpec
from stability.config.parts import computed_parts
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.base import AbstractCorpus
from stability.plan.plan import Plan, ResolvedRun, name_kind
from stability.training.machine import describe_lacking
from sweeps.trial import Trial

if TYPE_CHECKING:
    from sweeps.estimated import Gpu
    from sweeps.timings import StoredTimes, Times

# Rough costs in training steps. RECORDED_STEP: a gradient with its graph, a product along the direction, a forward
# pass. PRODUCT: a Hessian-vector product, two passes through the graph. ALONG: one curvature, a forward pass of three
# terms. DIFFERENCE: the paper's finite difference, gradients at θ ± εu and once more at θ.
RECORDED_STEP, PRODUCT, ALONG, FORWARD, DIFFERENCE = 4.0, 3.3, 2.0, 1 / 3, 3.0
BRACKETING = 6  # loss evaluations to bracket the critical learning rate


# Largest step timed on a CPU. A training step takes 6 operations per parameter and token, and 16 bytes per parameter.
MOST_OPERATIONS, MOST_PARAMETERS = 2e12, 1e8
OPERATIONS, REFERENCE_SPEED = 6, 1e13  # operations per second of one large GPU in float32, roughly


EXPECTING_S = 10.0  # processor time before a launch after which no further kind is timed


@dataclass(frozen=True)
class Timing:
    """Times and peak memory of one run.

    Attributes:
        step_s: seconds of one training step.
        train_s: seconds of all training steps and validations.
        after_s: seconds after the training (α_max, samples).
        memory_mb: peak memory in MiB of the process timing a step: resident memory on a CPU, the allocator's memory on
            a GPU, or the estimate of `sweeps.estimated` for an absent GPU.
        is_stored: whether an earlier command measured the step.
    """

    step_s: float
    train_s: float
    after_s: float
    memory_mb: float
    is_stored: bool = False

    @property
    def run_s(self) -> float:
        return self.train_s + self.after_s


@dataclass(frozen=True)
class Cost:
    """Size and cost of one run.

    Attributes:
        num_params: number of parameters.
        mixing: multiply-adds of the mechanism per token in one forward pass, or None if it does not count them.
        timing: the run's timing, or None if unknown.
        state_bytes: bytes of the mixers' state after one sequence, or None if they cannot continue a sequence.
    """

    num_params: int
    mixing: float | None
    timing: Timing | None
    state_bytes: int | None = None


def measure_costs(plan: Plan, gpu: Gpu | None = None) -> dict[str, Cost]:
    """Return the cost of each kind of run, by name.

    Costs are measured on this machine, or estimated for ``gpu`` if one is given.
    """
    from sweeps.timings import StoredTimes

    stored = StoredTimes(plan.pool, build.resolve_device(plan.spec.device))
    return {kind.name: _cost(kind, plan, gpu, stored) for kind in plan.kinds}


def expected_times(plan: Plan, trials: Sequence[Trial]) -> dict[str, tuple[float, float]]:
    """Return (seconds per step, seconds after training) by run id, from timed steps of each kind.

    Kinds that take too long to time are left out. The result is {} for a single kind, and for runs on other machines
    or GPUs: their ratios differ from this CPU's.

    Args:
        plan: the sweep.
        trials: its runs, in the order of ``plan.points``.
    """
    kinds = [name_kind(run, variant) for variant, run in plan.points]
    is_here = plan.spec.launcher != "slurm" and build.resolve_device(plan.spec.device).type == "cpu"
    needed = {kind for kind, trial in zip(kinds, trials, strict=True) if not trial.directory.finished}
    if not is_here or len(needed) < 2:
        return {}
    from sweeps.timings import TIMED_S, StoredTimes

    found: dict[str, tuple[float, float]] = {}
    stored = StoredTimes(plan.pool, torch.device("cpu"))
    started = time.process_time()  # not the wall's: a busy machine would have no kind timed
    for kind in plan.kinds:
        if kind.name in needed and time.process_time() - started < EXPECTING_S and not _is_too_large(kind):
            # an error in a mechanism fails its runs, each with its traceback, and not the sweep
            with suppress(Exception), torch.random.fork_rng(devices=[]):
                times = stored.look_up(kind.spec, plan.corpus, TIMED_S / len(needed))
                timing = _extrapolate(kind.spec, plan.spec, times)
                found[kind.name] = (timing.step_s, timing.after_s)
    return {trial.run_id: found[kind] for kind, trial in zip(kinds, trials, strict=True) if kind in found}


def gpu_of(plan: Plan) -> Gpu | None:
    """Return the GPU to estimate a plan for, or None to time it here.

    It is ``plan_gpu``, or `DEFAULT` if a run is too large to time on this machine's CPU.
    """
    from sweeps.estimated import DEFAULT, GPUS

    spec = plan.spec
    if spec.shard_parameters:
        return None
    if spec.plan_gpu is not None:
        return GPUS[spec.plan_gpu]
    if build.resolve_device(spec.device).type != "cpu":
        return None
    return GPUS[DEFAULT] if any(map(_is_too_large, plan.kinds)) else None


def _is_too_large(kind: ResolvedRun) -> bool:
    """Return whether a training step is too large to time on a CPU."""
    num_params, tokens = kind.num_params, kind.spec.batch * kind.spec.model.positions
    return num_params > MOST_PARAMETERS or OPERATIONS * num_params * tokens > MOST_OPERATIONS


def _cost(kind: ResolvedRun, plan: Plan, gpu: Gpu | None, stored: StoredTimes) -> Cost:
    """Return the cost of one kind of run, timed here or estimated for ``gpu``."""
    from sweeps.timings import TIMED_S

    run, spec, corpus, device = kind.spec, plan.spec, plan.corpus, build.resolve_device(plan.spec.device)
    # a sharded model may not fit the one timed device, and this machine may not run the kernels
    can_run = not spec.shard_parameters and describe_lacking(computed_parts(run), device) is None
    timing = None
    if gpu is not None:
        timing = _estimate(run, corpus, spec, gpu)
    elif can_run and (device.type != "cpu" or not _is_too_large(kind)):
        timing = _extrapolate(run, spec, stored.look_up(run, corpus, TIMED_S / len(plan.kinds)))
    direction = plan.objective.direction
    state_bytes = build.sequence_state_bytes(run, direction)
    try:
        mixing = _count_mixing(run, direction)
    except NotImplementedError:  # a mechanism without `cost`, or one made of it
        mixing = None
    return Cost(kind.num_params, mixing, timing, state_bytes)


def _estimate(run: RunSpec, corpus: AbstractCorpus, spec: SweepSpec, gpu: Gpu) -> Timing | None:
    """Return a run's estimated timing on a GPU; a validation is one forward pass of its sequences."""
    from sweeps.estimated import estimate_step
    from sweeps.timings import Times

    step = estimate_step(run, corpus, gpu)
    if step is None:
        return None
    step_s, memory = step
    validation_s = FORWARD * step_s * run.evaluation.sequences / run.batch
    return _extrapolate(run, spec, Times(step_s, validation_s, memory / 2**20))


def _extrapolate(run: RunSpec, spec: SweepSpec, times: Times) -> Timing:
    """Return the timing of a whole run, including α_max and samples."""
    validations, step_s = 2 + run.steps // run.evaluation.every_steps, times.step_s
    curvature_s = (
        curvature_steps(spec.curvature, run.model.layers) * step_s * (spec.curvature.batch or run.batch) / run.batch
        if spec.hessian
        else 0.0
    )
    samples_s = 0.0 if spec.generate is None else generation_steps(run, spec.generate) * step_s
    train_s = run.steps * step_s + validations * times.validation_s
    return Timing(step_s, train_s, curvature_s + samples_s, times.memory_mb, times.is_stored)


def _count_mixing(run: RunSpec, direction: str) -> float:
    """Return the multiply-adds of all mixing layers per position in one forward pass.

    Cross mechanisms are included. A layer counts once per evaluation by its residual connection.
    """
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
        if contexts:  # once before the blocks, on a plain connection; each is counted as long as the source
            num_context, shapes, evaluations = size.positions, shapes[:1] * len(contexts), 1
        costs = [cross.cost(run.cross.settings, shape, size.positions, num_context) for shape in shapes]
        mixing += evaluations * sum(costs)
    return mixing / size.positions


def curvature_steps(curvature: CurvatureSpec, layers: int) -> float:
    """Return the cost of the curvature protocol and its tables, in training steps."""
    warm_up = curvature.warmup_steps * len(curvature.state) + (
        curvature.warmup_batches if "paper" in curvature.state else 0
    )
    phases = 2 if curvature.phase == "all" else 1
    cost = 0.0
    if {"alpha_max", "critical_lr"} & set(curvature.measure):
        cost += warm_up + len(curvature.state) * _cost_of_recorded_steps(curvature)
    tables = _tables(curvature.spectra, layers)
    asked = [tables[name] for name in tables if name in curvature.measure]
    if asked:  # each state repeats the protocol up to its first recorded step
        cost += warm_up + len(curvature.state) * (RECORDED_STEP + sum(asked))
    return phases * cost


def generation_steps(run: RunSpec, generation: GenerationSpec) -> float:
    """Return the cost of sampling in training steps, without the oracle's cost.

    Each step of the sampler costs one forward pass of a batch of samples.
    """
    from stability.probes.generation.generating import steps_of_a_phase

    return FORWARD * steps_of_a_phase(run, generation) * min(generation.batch, generation.num) / run.batch


def _cost_of_recorded_steps(curvature: CurvatureSpec) -> float:
    """Return the cost of one state's recorded steps, in training steps."""
    critical = _cost_of_critical_lr(curvature.spectra) if "critical_lr" in curvature.measure else 0.0
    return (RECORDED_STEP + critical) * curvature.recorded_steps + DIFFERENCE * min(
        curvature.parity_steps, curvature.recorded_steps
    )


def _cost_of_critical_lr(spectra: SpectraSpec) -> float:
    return FORWARD * (BRACKETING - math.log2(spectra.critical_resolution))


def _tables(spectra: SpectraSpec, layers: int) -> dict[str, float]:
    """Return each table's cost for one step of one state, in training steps; Lanczos counts its maximum of products."""
    return {
        "profile": _cost_of_critical_lr(spectra) + FORWARD * 2 * (spectra.profile_points + 1),
        "sharpness": PRODUCT * (2 * spectra.eigenvalue_products + spectra.trace_products + 2) + spectra.noise_batches,
        "density": PRODUCT * spectra.density_probes * spectra.density_products,
        "blocks": PRODUCT + ALONG * (4 * layers + 3),
    }
