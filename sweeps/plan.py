"""What a sweep would do and what it would cost, from one measured step per kind of run; trains nothing, and writes nothing but the prepared data."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stability.config import CurvatureSpec, RunSpec, SweepSpec
from stability.data._base import Corpus
from stability.protocol import SpectraSpec
from stability.runs.directory import RunDirectory
from stability.sampling import GenerationSpec
from stability.training.loop import Trainer, peak_memory_mb

# In units of a training step, roughly. A recorded step: a gradient with its graph, a product along the direction and a forward pass. A Hessian-vector
# product goes twice through the graph; one curvature takes a forward pass of three terms; the paper's difference takes gradients at θ ± εu, and at θ once more.
RECORDED_STEP, PRODUCT, ALONG, FORWARD, DIFFERENCE = 4.0, 3.3, 2.0, 1 / 3, 3.0
BRACKETING = 6  # loss values that the critical learning rate takes until it is bracketed


# On a CPU, what a step may take to be measured; a training step takes 6 operations per parameter and token, and 16 bytes per parameter stand.
MOST_OPERATIONS, MOST_PARAMETERS = 2e12, 1e8
OPERATIONS, REFERENCE_SPEED = 6, 1e13  # the speed of one large GPU in float32, roughly


@dataclass(frozen=True)
class Timing:
    """Of one run: seconds of a training step and of everything, α_max included, and the peak memory of the process that measured it."""

    step_s: float
    run_s: float
    memory_mb: float


@dataclass(frozen=True)
class Cost:
    """Of one run: its parameters, multiply-adds of the mechanism per token in one forward pass, its timing (None: too large to be timed)."""

    num_params: int
    mixing: float
    timing: Timing | None


def measure_costs(spec: SweepSpec, corpus: Corpus) -> dict[str, Cost]:
    """Of each kind of run: parameters counted without building the model, a warmed-up training step and a validation in a temporary folder."""
    kinds = {kind_of(run, variant): run for variant, run in spec.points(corpus.fingerprint)}
    return {kind: _cost(run, corpus, spec) for kind, run in kinds.items()}


def kind_of(run: RunSpec, variant: str) -> str:
    """``mechanism/residual/norm/optimizer`` (``sa+ca`` with a cross mechanism), and what an ablation changes."""
    mechanism = run.mechanism.name + ("" if run.cross is None else f"+{run.cross.name}")
    return " ".join(filter(None, ("/".join((mechanism, run.residual.name, run.norm, run.optimizer.name)), variant)))


def _cost(run: RunSpec, corpus: Corpus, spec: SweepSpec) -> Cost:
    from stability.build import build_objective, count_parameters, resolve_device

    num_params, device = count_parameters(run, corpus.vocab_size), resolve_device(spec.device)
    too_large = num_params > MOST_PARAMETERS or OPERATIONS * num_params * run.batch * run.model.positions > MOST_OPERATIONS
    timing = None if too_large and device.type == "cpu" else _timing(run, corpus, spec, device)
    return Cost(num_params, _mixing(run, build_objective(run, corpus.vocab_size).direction), timing)


def _timing(run: RunSpec, corpus: Corpus, spec: SweepSpec, device: Any) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run, RunDirectory(folder, "plan"), corpus, device)
        trainer.update(1)
        started = time.perf_counter()
        trainer.update(2)
        step_s = time.perf_counter() - started
        started = time.perf_counter()
        trainer.validation.nll(trainer.model)
        validation_s = time.perf_counter() - started
    validations = 2 + run.steps // run.evaluation.every_steps
    curvature_s = curvature_steps(spec.curvature, run.model.layers) * step_s * (spec.curvature.batch or run.batch) / run.batch if spec.hessian else 0.0
    samples_s = 0.0 if spec.generate is None else generation_steps(run, spec.generate) * step_s
    return Timing(step_s, run.steps * step_s + validations * validation_s + curvature_s + samples_s, peak_memory_mb(trainer.device))


def _mixing(run: RunSpec, direction: str) -> float:
    from stability.mechanisms._base import MixerShape
    from stability.registry import Registry

    size, mechanism = run.model, Registry("mechanisms").load(run.mechanism.name)
    shapes = [MixerShape(size.width, size.heads, direction, layer, size.layers) for layer in range(size.layers)]
    mixing = sum(mechanism.cost(run.mechanism.settings, shape, size.positions) for shape in shapes)
    if run.cross is not None:
        cross, num_context = Registry("mechanisms").load(run.cross.name), Registry("objectives").load(run.objective.name).num_context(run.objective.settings)
        mixing += sum(cross.cost(run.cross.settings, shape, size.positions, num_context) for shape in shapes)
    return mixing / size.positions


def curvature_steps(curvature: CurvatureSpec, layers: int) -> float:
    """Cost of the protocol, and of what `measure` adds to it, in training steps."""
    warm_up = curvature.warmup_steps * len(curvature.state) + (curvature.warmup_batches if "paper" in curvature.state else 0)
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
    """Cost of sampling in training steps: a forward pass of a batch of samples for each step of the sampler. An oracle's own cost is not in it."""
    from stability.probes.generation import steps_of_a_phase

    return FORWARD * steps_of_a_phase(run, generation) * min(generation.batch, generation.num) / run.batch


def _recorded(curvature: CurvatureSpec) -> float:
    """The recorded steps of one state, in training steps."""
    critical = _critical(curvature.spectra) if "critical_lr" in curvature.measure else 0.0
    return (RECORDED_STEP + critical) * curvature.recorded_steps + DIFFERENCE * min(curvature.parity_steps, curvature.recorded_steps)


def _critical(spectra: SpectraSpec) -> float:
    return FORWARD * (BRACKETING - math.log2(spectra.critical_resolution))


def _tables(spectra: SpectraSpec, layers: int) -> dict[str, float]:
    """What each table costs at one step of one state, in training steps. Lanczos is charged with all the products that it may take."""
    return {
        "profile": _critical(spectra) + FORWARD * 2 * (spectra.profile_points + 1),
        "sharpness": PRODUCT * (2 * spectra.eigenvalue_products + spectra.trace_products + 2) + spectra.noise_batches,
        "density": PRODUCT * spectra.density_probes * spectra.density_products,
        "blocks": PRODUCT + ALONG * (4 * layers + 3),
    }


def describe(spec: SweepSpec, corpus: Corpus, slots: float, num_finished: int | None) -> str:
    """The plan as text: a line a kind of run, then totals. ``slots``: trials that run side by side. ``num_finished``: None where ``corpus`` only stands
    for data that was not read."""
    points, costs = spec.points(corpus.fingerprint), measure_costs(spec, corpus)
    rates = sorted({run.lr_peak for _, run in points})
    numbers = Counter(kind_of(run, variant) for variant, run in points)
    wide = max(34, *(len(kind) + 2 for kind in costs))
    lines = [
        f"study {spec.name}: {len(points)} runs{'' if num_finished is None else f' ({num_finished} of them finished)'}, "
        f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, {spec.seeds} seeds",
        _data_line(spec, corpus, num_finished is not None),
        f"{'kind of run':{wide}}{'runs':>6}{'parameters':>13}{'mixing/token':>14}{'step':>10}{'run':>10}{'memory':>10}",
    ]
    for kind, cost in costs.items():
        lines.append(f"{kind:{wide}}{numbers[kind]:>6}{cost.num_params:>13,}{cost.mixing:>14,.0f}{_timing_columns(cost.timing)}")
    lines.append(_total(costs, numbers, [run for _, run in points], slots))
    lines.append("mixing: multiply-adds of the mechanism in one forward pass, all layers")
    if any(cost.timing for cost in costs.values()):
        listed = ", ".join("α_max" if name == "alpha_max" else name for name in spec.curvature.measure)
        included = [*([listed] if spec.hessian else []), *(["samples (not their oracle)"] if spec.generate is not None else [])]
        lines.append(", ".join(["estimated from one measured step of each kind", *included]) + f"{' included' if included else ''}; nothing was trained")
    return "\n".join(lines)


def _data_line(spec: SweepSpec, corpus: Corpus, is_read: bool) -> str:
    if is_read:
        return f"data: {corpus.described(spec.model.positions)}; fingerprint {corpus.fingerprint[:12]}"
    return f"data: {corpus.description}; not downloaded for a plan, which takes random tokens instead"


def _timing_columns(timing: Timing | None) -> str:
    if timing is None:
        return f"{'--':>10}{'--':>10}{'--':>10}"
    return f"{timing.step_s * 1e3:>8.1f}ms{timing.run_s:>9.0f}s{timing.memory_mb:>8.0f}MB"


def _total(costs: dict[str, Cost], numbers: Counter[str], runs: Sequence[RunSpec], slots: float) -> str:
    tokens = sum(run.steps * run.batch * run.model.positions for run in runs)
    timings = {kind: cost.timing for kind, cost in costs.items() if cost.timing is not None}
    if len(timings) < len(costs):
        operations = sum(OPERATIONS * costs[kind].num_params * number for kind, number in numbers.items()) * tokens / len(runs)
        days = operations / REFERENCE_SPEED / 86_400
        return (
            f"in all: {tokens:,} tokens; --: too large to be timed on a CPU by a plan, nothing was built\n"
            f"training: about {operations:.1e} operations ({OPERATIONS} per parameter and token), {days:,.0f} days at 1e13 a second; α_max and validation aside"
        )
    total_s = sum(timing.run_s * numbers[kind] for kind, timing in timings.items())
    return f"in all: {tokens:,} tokens, {_clock(total_s)} of work, about {_clock(total_s / slots)} with {slots:g} at a time"


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
