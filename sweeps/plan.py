"""Plan what a sweep would do and what it would cost, from one measured step per kind of run; trains nothing, and writes
nothing but the prepared data."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stability.config.curvature import CurvatureSpec, SpectraSpec
from stability.config.generation import GenerationSpec
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.base import AbstractCorpus
from stability.runs.directory import RunDirectory, step_of
from stability.training.machine import peak_memory_mb
from stability.training.trainer import Trainer
from sweeps.search.rounds import Search
from sweeps.trial import Trial, is_done
from sweeps.view.board import duration, runs

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
    what the allocator held."""

    step_s: float
    train_s: float
    after_s: float
    memory_mb: float

    @property
    def run_s(self) -> float:
        return self.train_s + self.after_s


@dataclass(frozen=True)
class Left:
    """The part of a run that is still to be done: the share of its steps, and whether α_max or samples are."""

    steps: float
    after: bool

    def seconds(self, timing: Timing) -> float:
        return self.steps * timing.train_s + self.after * timing.after_s


def left_of(trial: Trial, retry: str) -> Left:
    """Return what is left to do by what the ledger holds: nothing of a run that is done, or that failed and is left so;
    of an interrupted one what its last checkpoint leaves."""
    if is_done(trial) or (retry == "none" and trial.directory.status()["state"] == "failed"):
        return Left(0.0, False)
    if trial.directory.finished:
        return Left(0.0, True)
    checkpoints = trial.directory.checkpoints()
    done = step_of(checkpoints[-1]) if checkpoints else 0
    return Left(1 - done / trial.spec["steps"], True)


@dataclass(frozen=True)
class Cost:
    """The cost of one run: its parameters, multiply-adds of the mechanism per token in one forward pass, its timing
    (None: too large to be timed)."""

    num_params: int
    mixing: float
    timing: Timing | None


def measure_costs(spec: SweepSpec, corpus: AbstractCorpus) -> dict[str, Cost]:
    """Measure what each kind of run costs: parameters counted without building the model, a warmed-up training step and
    a validation in a temporary folder."""
    kinds = {kind_of(run, variant): run for variant, run in spec.points(corpus.fingerprint)}
    return {kind: _cost(run, corpus, spec) for kind, run in kinds.items()}


def kind_of(run: RunSpec, variant: str) -> str:
    """Name a kind of run: ``mechanism/residual/norm/optimizer`` (``sa+ca`` with a cross mechanism), and what an
    ablation changes."""
    mechanism = run.mechanism.name + ("" if run.cross is None else f"+{run.cross.name}")
    kind = "/".join((mechanism, run.residual.name, run.norm.name, run.optimizer.name))
    return " ".join(filter(None, (kind, variant)))


def _cost(run: RunSpec, corpus: AbstractCorpus, spec: SweepSpec) -> Cost:
    from stability.build import build_objective, count_parameters, resolve_device

    num_params, device = count_parameters(run, corpus.format), resolve_device(spec.device)
    too_large = (
        num_params > MOST_PARAMETERS or OPERATIONS * num_params * run.batch * run.model.positions > MOST_OPERATIONS
    )
    # what is split may not fit the one device that would be timed
    is_timed = not spec.shard_parameters and not (too_large and device.type == "cpu")
    timing = _timing(run, corpus, spec, device) if is_timed else None
    return Cost(num_params, _mixing(run, build_objective(run, corpus.format).direction), timing)


def _timing(run: RunSpec, corpus: AbstractCorpus, spec: SweepSpec, device: Any) -> Timing:
    """Time a step and a validation of one run, and add up from them what the whole run takes, α_max and samples
    included."""
    _forget_peak(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run, RunDirectory(folder, "plan"), corpus, device)
        trainer.update(1)
        step_s = _step_s(trainer)
        started = time.perf_counter()
        trainer.validation.measure(trainer.model)
        validation_s = time.perf_counter() - started
    validations = 2 + run.steps // run.evaluation.every_steps
    curvature_s = (
        curvature_steps(spec.curvature, run.model.layers) * step_s * (spec.curvature.batch or run.batch) / run.batch
        if spec.hessian
        else 0.0
    )
    samples_s = 0.0 if spec.generate is None else generation_steps(run, spec.generate) * step_s
    return Timing(
        step_s, run.steps * step_s + validations * validation_s, curvature_s + samples_s, peak_memory_mb(trainer.device)
    )


def _step_s(trainer: Trainer) -> float:
    """Return the median of a few steps' seconds, since a machine that does something else for a moment makes one step
    look long."""
    seconds: list[float] = []
    while len(seconds) < TIMED_STEPS and sum(seconds) < TIMED_S:
        started = time.perf_counter()
        trainer.update(2 + len(seconds))
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
    """Return the multiply-adds of all mixing layers per position in one forward pass, cross mechanisms included."""
    from stability.mechanisms import MixerShape
    from stability.registry import Registry

    size, mechanism = run.model, Registry("mechanisms").load(run.mechanism.name)
    shapes = [MixerShape(size.width, size.heads, direction, layer, size.layers) for layer in range(size.layers)]
    mixing = sum(mechanism.cost(run.mechanism.settings, shape, size.positions) for shape in shapes)
    if run.cross is not None:
        cross, objective = Registry("mechanisms").load(run.cross.name), Registry("objectives").load(run.objective.name)
        contexts, num_context = (
            objective.contexts_of(run.objective.settings),
            objective.num_context(run.objective.settings),
        )
        if contexts:  # once before the blocks, counted as if each were as long as the source
            num_context, shapes = size.positions, shapes[:1] * len(contexts)
        mixing += sum(cross.cost(run.cross.settings, shape, size.positions, num_context) for shape in shapes)
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


def describe(
    spec: SweepSpec, corpus: AbstractCorpus, slots: float, trials: Sequence[Trial] | None, search: Search | None = None
) -> str:
    """Return the plan as text: a line a kind of run, then totals. ``slots``: trials that run side by side. ``trials``:
    the runs of the plan in their order, what is finished of them is left out of what it costs; None where ``corpus``
    only stands for data that was not read. ``search``: what chooses further runs once these have ended."""
    points, costs = spec.points(corpus.fingerprint), measure_costs(spec, corpus)
    rates = sorted({run.lr_peak for _, run in points})
    left = [left_of(trial, spec.retry) for trial in trials] if trials is not None else [Left(1.0, True)] * len(points)
    kinds = [kind_of(run, variant) for variant, run in points]
    numbers, missing = (
        Counter(kinds),
        Counter(kind for kind, each in zip(kinds, left, strict=True) if each.steps or each.after),
    )
    wide = max(34, *(len(kind) + 2 for kind in costs))
    lines = [
        f"study {spec.name}: "
        f"{runs(len(points))}{'' if trials is None else f' ({len(points) - missing.total()} of them finished)'}, "
        f"{_rates_text(rates)}, {spec.seeds} seed{'s' if spec.seeds > 1 else ''}",
        _data_line(spec, corpus, trials is not None),
        f"{'kind of run':{wide}}{'runs':>6}{'left':>6}{'parameters':>13}{f'mixing/{_unit(spec, 1)}':>14}"
        f"{'step':>10}{'run':>10}{'memory':>10}",
    ]
    for kind, cost in costs.items():
        lines.append(
            f"{kind:{wide}}{numbers[kind]:>6}{missing[kind]:>6}{cost.num_params:>13,}{cost.mixing:>14,.0f}{_timing_columns(cost.timing)}"
        )
    lines.append(_total(spec, [costs[kind] for kind in kinds], left, slots))
    if search is not None:
        lines.append(search.plan() + _at_most(costs, search.most_runs, slots))
    lines.append("mixing: multiply-adds of the mechanism in one forward pass, all layers")
    if any(cost.timing for cost in costs.values()):
        listed = ", ".join("α_max" if name == "alpha_max" else name for name in spec.curvature.measure)
        included = [
            *([listed] if spec.hessian else []),
            *(["samples (not their oracle)"] if spec.generate is not None else []),
        ]
        lines.append(
            ", ".join(["estimated from measured steps of each kind", *included])
            + f"{' included' if included else ''}; nothing was trained"
        )
    return "\n".join(lines)


def _rates_text(rates: Sequence[float]) -> str:
    return (
        f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}"
        if len(rates) > 1
        else f"learning rate {rates[0]:g}"
    )


def _data_line(spec: SweepSpec, corpus: AbstractCorpus, is_read: bool) -> str:
    if is_read:
        from stability.build import described

        return f"data: {described(spec, corpus)}; fingerprint {corpus.fingerprint[:12]}"
    return f"data: {corpus.description}; not downloaded for a plan, which takes random tokens instead"


def _unit(spec: SweepSpec, number: int = 2) -> str:
    """Return what a model's positions are called: tokens, or an objective's own word."""
    from stability.registry import Registry

    one, many = Registry("objectives").load(spec.objective.name).unit
    return one if number == 1 else many


def _timing_columns(timing: Timing | None) -> str:
    if timing is None:
        return f"{'--':>10}{'--':>10}{'--':>10}"
    return f"{timing.step_s * 1e3:>8.1f}ms{timing.run_s:>9.0f}s{timing.memory_mb:>8.0f}MB"


def _total(spec: SweepSpec, costs: Sequence[Cost], left: Sequence[Left], slots: float) -> str:
    """Return the totals as text. ``costs`` and ``left`` are of each run."""
    a_run = spec.steps * spec.batch * spec.model.positions
    missing, tokens = (
        sum(bool(each.steps or each.after) for each in left),
        round(sum(each.steps for each in left) * a_run),
    )
    text = f"in all: {len(left) * a_run:,} {_unit(spec)}; left to do: {runs(missing)}, {tokens:,} {_unit(spec)}"
    timings = [cost.timing for cost in costs if cost.timing is not None]
    if len(timings) < len(costs):
        operations = sum(
            OPERATIONS * cost.num_params * each.steps * a_run for cost, each in zip(costs, left, strict=True)
        )
        reason = "split over devices, which is not timed" if spec.shard_parameters else "too large to be timed on a CPU"
        return (
            f"{text}; --: {reason} by a plan, nothing was built\ntraining: about {operations:.1e} operations "
            f"({OPERATIONS} per parameter and {_unit(spec, 1)}), {operations / REFERENCE_SPEED / 86_400:,.0f} days "
            "at 1e13 a second; α_max and validation aside"
        )
    total_s = sum(each.seconds(timing) for timing, each in zip(timings, left, strict=True))
    memory_gb = slots * max(timing.memory_mb for timing in timings) / 1024
    return (
        f"{text}, {duration(total_s)} of work, about {duration(total_s / slots)} and {memory_gb:.1f} GiB with "
        f"{_at_a_time(spec, slots)}"
    )


def _at_a_time(spec: SweepSpec, slots: float) -> str:
    """Say how many trials run side by side. How many share a GPU is not known to a plan: what α_max and the allocator
    take is measured by the sweep itself."""
    from stability.build import resolve_device

    shares = (
        spec.launcher == "ray"
        and spec.gpus_per_trial == "auto"
        and spec.devices_per_trial == 1
        and resolve_device(spec.device).type == "cuda"
    )
    return f"{slots:g} at a time" + (
        ", one a GPU: how many share one the sweep measures when it starts (gpus_per_trial=auto)" if shares else ""
    )


def _at_most(costs: dict[str, Cost], most_runs: int, slots: float) -> str:
    """Return the most that all rounds of a search cost, each kind of run in the same number."""
    timings = [cost.timing.run_s for cost in costs.values() if cost.timing is not None]
    if len(timings) < len(costs):
        return f", at most {runs(most_runs)} in all"
    total_s = most_runs * sum(timings) / len(timings)
    return (
        f", at most {runs(most_runs)} in all: {duration(total_s)} of work, about {duration(total_s / slots)} with "
        f"{slots:g} at a time"
    )
