"""Plan a sweep's runs and their cost from one measured step per kind.

A plan trains nothing and writes only the prepared data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stability.config.parts import kernels_of
from stability.config.sweep import SweepSpec
from stability.corpora.base import AbstractCorpus
from stability.plan.plan import Plan, data_line, name_kind, objective_line
from stability.registry import Registry
from stability.runs.directory import step_of
from stability.runs.study import StudyFolder
from sweeps import earlier
from sweeps.costs import OPERATIONS, REFERENCE_SPEED, Cost, Timing, gpu_of, measure_costs
from sweeps.estimated import Gpu
from sweeps.requirements import require_for_plan, runs_here, slots
from sweeps.search.rounds import make_search
from sweeps.trial import Trial, is_done
from sweeps.view.board import count_runs, duration


@dataclass(frozen=True)
class Left:
    """Remaining work of a run: the fraction of its steps, and whether α_max or samples are missing."""

    steps: float
    after: bool

    def seconds(self, timing: Timing) -> float:
        return self.steps * timing.train_s + self.after * timing.after_s


def find_remaining(trial: Trial, retry: str) -> Left:
    """Return a run's remaining work according to its folder.

    Nothing remains of a completed run, or of a failed one under ``retry=none``. A trained run lacks only measurements.
    An interrupted run continues at its last checkpoint.
    """
    if is_done(trial) or (retry == "none" and trial.directory.status()["state"] == "failed"):
        return Left(0.0, False)
    if trial.directory.finished:
        return Left(0.0, True)
    checkpoints = trial.directory.checkpoints()
    done = step_of(checkpoints[-1]) if checkpoints else 0
    return Left(1 - done / trial.spec["steps"], True)


def describe(plan: Plan, trials: Sequence[Trial]) -> str:
    """Return a dry run's text: a line per kind of run, totals, earlier runs of the study.

    Args:
        plan: the sweep.
        trials: its runs, in the order of ``plan.points``. The costs exclude finished runs; if the data were not read,
            no run counts as finished.

    Raises:
        ValueError: the runs are for this machine, but their kernels cannot run here.
    """
    spec, corpus, is_read = plan.spec, plan.corpus, plan.is_read
    require_for_plan(spec, trials)
    gpu, num_slots = gpu_of(plan), slots(spec)
    costs = measure_costs(plan, gpu)
    left = [find_remaining(trial, spec.retry) if is_read else Left(1.0, True) for trial in trials]
    kinds = [name_kind(run, variant) for variant, run in plan.points]
    numbers = Counter(kinds)
    missing = Counter(kind for kind, each in zip(kinds, left, strict=True) if each.steps or each.after)
    wide = max(34, *(len(kind) + 2 for kind in costs))
    lines = [
        *spec.choices,
        f"study {spec.name}: "
        f"{count_runs(len(kinds))}{f' ({len(kinds) - missing.total()} of them finished)' if is_read else ''}, "
        f"{_rates_text(spec)}, {spec.seeds} seed{'s' if spec.seeds > 1 else ''}"
        f"{f' from {spec.first_seed} on' if spec.first_seed else ''}",
        objective_line(spec),
        data_line(spec, corpus) if is_read else _stand_in_line(corpus),
        _training_line(plan),
        f"{'kind of run':{wide}}{'runs':>6}{'left':>6}{'parameters':>13}{f'mixing/{_unit(spec, 1)}':>17}"
        f"{'state':>13}{'step':>10}{'run':>10}{'memory':>10}",
    ]
    for kind, cost in costs.items():
        lines.append(
            f"{kind:{wide}}{numbers[kind]:>6}{missing[kind]:>6}{cost.num_params:>13,}{_mixing_column(cost.mixing)}"
            f"{_state_column(cost.state_bytes)}{_timing_columns(cost.timing, gpu)}"
        )
    lines += [
        f"{kind.name}: {kind.num_active_params:,} of its {kind.num_params:,} parameters are active at a position"
        for kind in plan.kinds
        if kind.num_active_params < kind.num_params
    ]
    tokens = [run.steps * run.batch * run.model.positions for _, run in plan.points]
    lines.append(_total(spec, [costs[kind] for kind in kinds], tokens, left, num_slots, gpu))
    if gpu is not None:
        lines += _room(costs, gpu) + _faster(plan, gpu)
    search = make_search(spec, corpus.fingerprint, {})
    if search is not None:
        lines.append(search.plan() + _describe_maximum(costs, search.most_runs, num_slots, gpu))
    uncounted = "; --: the mechanism has no `cost`" if any(cost.mixing is None for cost in costs.values()) else ""
    lines.append(f"mixing: multiply-adds of the mechanism in one forward pass, all layers{uncounted}")
    lines.append(
        f"state: memory for generation (KV cache or recurrent state) after {spec.model.positions} {_unit(spec)}, all "
        "layers, in float32; --: reads both sides, or its state is unknown"
    )
    if any(cost.timing for cost in costs.values()):
        lines.append(_basis(plan, gpu, any(cost.timing and cost.timing.is_stored for cost in costs.values())))
    study = StudyFolder.of(plan.pool, spec.name)
    if is_read and search is None and study.file.exists():
        record = study.read()
        why = "" if spec.replace else earlier.describe_refusal(study, record, trials)
        lines += [why] if why else earlier.describe_changes(study, record, trials, replace=spec.replace)
    return "\n".join(lines)


def _basis(plan: Plan, gpu: Gpu | None, is_stored: bool) -> str:
    """Return the source of the times and memory, and the included measurements."""
    spec, precisions = plan.spec, {run.precision for _, run in plan.points}
    listed = ", ".join("α_max" if name == "alpha_max" else name for name in spec.curvature.measure)
    included = [
        *([listed] if spec.hessian else []),
        *(["samples (not their oracle)"] if spec.generate is not None else []),
    ]
    what = f"estimated from measured steps of each kind{' (up to a day ago)' if is_stored else ''}"
    if gpu is not None:
        what = (
            f"at least, estimated for one {gpu.describe(precisions)}: each operation of a step takes its bytes or its "
            "matrix products at these peaks, one after another, every item as long as the model reads; memory: all "
            "tensors of a step"
        )
    return ", ".join([what, *included]) + f"{' included' if included else ''}; nothing was trained"


def _training_line(plan: Plan) -> str:
    """Return a line with the steps of a run, its sequences a step and their length."""
    shapes = sorted({(run.steps, run.batch, run.model.positions) for _, run in plan.points})
    steps, batches, lengths = (sorted({shape[axis] for shape in shapes}) for axis in range(3))
    number, batch, length = (" or ".join(f"{each:,}" for each in values) for values in (steps, batches, lengths))
    return f"training: {number} steps a run, each of {batch} sequences of {length} {_unit(plan.spec)} (batch={batch})"


def _faster(plan: Plan, gpu: Gpu) -> list[str]:
    """Return a line on the faster precisions if every run trains in float32."""
    if {run.precision for _, run in plan.points} != {"float32"}:
        return []
    tf32, bf16 = (gpu.device.peaks[name] / gpu.device.peaks["float32"] for name in ("tf32", "bf16"))
    return [
        f"float32: matrix products of precision=tf32 are up to {tf32:.0f} times as fast, of precision=bf16 up to "
        f"{bf16:.0f} times; a plan estimates both"
    ]


def _room(costs: dict[str, Cost], gpu: Gpu) -> list[str]:
    """Return a line for each kind of run too large for the GPU's memory."""
    return [
        f"{kind}: no room in {gpu.memory / 1e9:.0f} GB; a smaller microbatch needs less"
        for kind, cost in costs.items()
        if cost.timing is not None and cost.timing.memory_mb * 2**20 > gpu.memory
    ]


def _rates_text(spec: SweepSpec) -> str:
    """Describe the learning rates, or their multiples of each optimizer's reference rate."""
    own = spec.lr.scaled
    rates = list(spec.lr.rates()) if own else sorted({lr for each in spec.rates() for lr in each})
    text = (
        f"{len(rates)} learning rates from {rates[0]:g} to {rates[-1]:g}"
        if len(rates) > 1
        else f"learning rate {rates[0]:g}"
    )
    if not own:
        return text
    references = {item.name: Registry("optimizers").load(item.name).lr_reference for item in spec.optimizer}
    return f"{text} times each optimizer's own ({', '.join(f'{name} {lr:g}' for name, lr in references.items())})"


def _stand_in_line(corpus: AbstractCorpus) -> str:
    return f"data: {corpus.description}; not prepared for a plan, which takes random {corpus.kind} instead"


def _unit(spec: SweepSpec, number: int = 2) -> str:
    """Return the name of a model's positions: tokens, or the objective's own word."""
    one, many = Registry("objectives").load(spec.objective.name).words.position
    return one if number == 1 else many


def _mixing_column(mixing: float | None) -> str:
    return f"{'--':>17}" if mixing is None else f"{mixing:>17,.0f}"


def _state_column(state_bytes: int | None) -> str:
    if state_bytes is None:
        return f"{'--':>13}"
    return f"{state_bytes / 1024:>10.1f}KiB" if state_bytes < 10 * 2**20 else f"{state_bytes / 2**20:>10.1f}MiB"


def _timing_columns(timing: Timing | None, gpu: Gpu | None) -> str:
    if timing is None:
        return f"{'--':>10}{'--':>10}{'--':>10}"
    if gpu is not None:
        run = f"{timing.run_s / 3600:.1f}h" if timing.run_s >= 360 else f"{timing.run_s:.0f}s"
        return f"{timing.step_s * 1e3:>8.0f}ms{run:>10}{timing.memory_mb * 2**20 / 1e9:>8.1f}GB"
    return f"{timing.step_s * 1e3:>8.1f}ms{timing.run_s:>9.0f}s{timing.memory_mb:>8.0f}MB"


def _total(
    spec: SweepSpec,
    costs: Sequence[Cost],
    tokens: Sequence[int],
    left: Sequence[Left],
    slots: float,
    gpu: Gpu | None = None,
) -> str:
    """Return the totals as text."""
    missing = sum(bool(each.steps or each.after) for each in left)
    of_the_left = [each.steps * number for each, number in zip(left, tokens, strict=True)]
    text = (
        f"in all: {sum(tokens):,} {_unit(spec)}; left to do: {count_runs(missing)}, {round(sum(of_the_left)):,} "
        f"{_unit(spec)}"
    )
    timings = [cost.timing for cost in costs if cost.timing is not None]
    if len(timings) < len(costs):
        operations = sum(OPERATIONS * cost.num_params * number for cost, number in zip(costs, of_the_left, strict=True))
        reason = "split over devices, which is not timed" if spec.shard_parameters else "too large to be timed on a CPU"
        if gpu is not None:
            reason += ", and of no kind that can be estimated"
        if not runs_here(spec) and any(kernels_of({**kind, "objective": spec.objective}) for _, kind in spec.curves()):
            reason = "too large for a CPU, or on kernels that are not here, to be timed"
        return (
            f"{text}; --: {reason} by a plan, nothing was built\ntraining: about {operations:.1e} operations "
            f"({OPERATIONS} per parameter and {_unit(spec, 1)}), {operations / REFERENCE_SPEED / 86_400:,.0f} days "
            "at 1e13 a second; α_max and validation aside"
        )
    total_s = sum(each.seconds(timing) for timing, each in zip(timings, left, strict=True))
    if gpu is not None:
        return f"{text}, at least {duration(total_s)} on one {gpu.device.name}"
    slots = max(1.0, min(slots, missing))  # at most the missing runs
    memory_gb = slots * max(timing.memory_mb for timing in timings) / 1024
    return (
        f"{text}, {duration(total_s)} of work, about {duration(total_s / slots)} and {memory_gb:.1f} GiB with "
        f"{_describe_concurrency(spec, slots)}"
    )


def _describe_concurrency(spec: SweepSpec, slots: float) -> str:
    """Describe the number of runs at a time.

    A plan cannot predict how many share a GPU: the sweep measures their memory when it starts.
    """
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


def _describe_maximum(costs: dict[str, Cost], most_runs: int, slots: float, gpu: Gpu | None = None) -> str:
    """Return the maximum cost of all rounds of a search.

    Every kind counts with the same number of runs.
    """
    timings = [cost.timing.run_s for cost in costs.values() if cost.timing is not None]
    if len(timings) < len(costs):
        return f", at most {count_runs(most_runs)} in all"
    total_s = most_runs * sum(timings) / len(timings)
    if gpu is not None:
        return f", at most {count_runs(most_runs)} in all: {duration(total_s)} on one {gpu.device.name}"
    return (
        f", at most {count_runs(most_runs)} in all: {duration(total_s)} of work, "
        f"about {duration(total_s / slots)} with {slots:g} at a time"
    )
