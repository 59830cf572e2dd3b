"""What a sweep would do and what it would cost, from one measured step per kind of run; trains nothing, and writes nothing but the prepared data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stability.config import CurvatureSpec, RunSpec, SweepSpec
from stability.data._base import Corpus
from stability.runs.directory import RunDirectory
from stability.training.loop import Trainer, peak_memory_mb

# A recorded step costs a gradient with its graph, a product along the direction and a forward pass; in units of a training step.
RECORDED_STEP = 4.0


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds of training, validation and α_max, and the peak memory of the process that measured it.

    ``mixing``: multiply-adds of the mechanism per token in one forward pass through all layers.
    """

    num_params: int
    mixing: float
    step_s: float
    validation_s: float
    run_s: float
    memory_mb: float


def measure_costs(spec: SweepSpec, runs: Sequence[RunSpec], corpus: Corpus) -> dict[str, Cost]:
    """One warmed-up training step and one validation for each kind of run (mechanism × residual × norm × optimizer), in a temporary folder."""
    kinds = {kind_of(run): run for run in runs}
    return {kind: _cost(run, corpus, spec) for kind, run in kinds.items()}


def kind_of(run: RunSpec) -> str:
    return "/".join((run.mechanism.name, run.residual.name, run.norm, run.optimizer.name))


def _cost(run: RunSpec, corpus: Corpus, spec: SweepSpec) -> Cost:
    from stability.build import resolve_device

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run, RunDirectory(folder, "plan"), corpus, resolve_device(spec.device))
        trainer.update(1)
        started = time.perf_counter()
        trainer.update(2)
        step_s = time.perf_counter() - started
        started = time.perf_counter()
        trainer.validation.nll(trainer.model)
        validation_s = time.perf_counter() - started
    num_params = sum(parameter.numel() for parameter in trainer.parameters)
    validations = 2 + run.steps // run.evaluation.every_steps
    curvature_s = curvature_steps(spec.curvature) * step_s * (spec.curvature.batch or run.batch) / run.batch if spec.hessian else 0.0
    run_s = run.steps * step_s + validations * validation_s + curvature_s
    return Cost(num_params, _mixing(run, trainer.objective.direction), step_s, validation_s, run_s, peak_memory_mb(trainer.device))


def _mixing(run: RunSpec, direction: str) -> float:
    from stability.mechanisms._base import MixerShape
    from stability.registry import Registry

    size, mechanism = run.model, Registry("mechanisms").load(run.mechanism.name)
    shapes = [MixerShape(size.width, size.heads, direction, layer, size.layers) for layer in range(size.layers)]
    return sum(mechanism.cost(run.mechanism.settings, shape, size.positions) for shape in shapes) / size.positions


def curvature_steps(curvature: CurvatureSpec) -> float:
    """Cost of the protocol in training steps."""
    per_state = curvature.warmup_steps + RECORDED_STEP * curvature.recorded_steps
    phases = 2 if curvature.phase == "all" else 1
    return phases * (len(curvature.state) * per_state + (curvature.warmup_batches if "paper" in curvature.state else 0))


def describe(spec: SweepSpec, runs: Sequence[RunSpec], corpus: Corpus, slots: float, num_finished: int) -> str:
    """The plan as text: a line a kind of run, then totals. ``slots``: trials that run side by side."""
    costs = measure_costs(spec, runs, corpus)
    rates = sorted({run.lr_peak for run in runs})
    lines = [
        f"study {spec.name}: {len(runs)} runs ({num_finished} of them finished), "
        f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}, {spec.seeds} seeds",
        f"data: {corpus.described(spec.model.positions)}; fingerprint {corpus.fingerprint[:12]}",
        f"{'kind of run':34}{'runs':>6}{'parameters':>13}{'mixing/token':>14}{'step':>10}{'run':>10}{'memory':>10}",
    ]
    for kind, cost in costs.items():
        number = sum(kind_of(run) == kind for run in runs)
        lines.append(f"{kind:34}{number:>6}{cost.num_params:>13,}{cost.mixing:>14,.0f}{cost.step_s * 1e3:>8.1f}ms{cost.run_s:>9.0f}s{cost.memory_mb:>8.0f}MB")
    total_s = sum(costs[kind_of(run)].run_s for run in runs)
    tokens = sum(run.steps * run.batch * run.model.positions for run in runs)
    lines.append(f"in all: {tokens:,} tokens, {_clock(total_s)} of work, about {_clock(total_s / slots)} with {slots:g} at a time")
    lines.append("mixing: multiply-adds of the mechanism in one forward pass, all layers")
    lines.append(f"estimated from one measured step of each kind{', α_max included' if spec.hessian else ''}; nothing was trained")
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
