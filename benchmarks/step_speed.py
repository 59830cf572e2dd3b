"""Measure what a step of the training loop costs beside a bare PyTorch loop: ``python -m benchmarks.step_speed``.

For each size two models are trained side by side in one process, by the same optimizer on the same batches:

* bare: draw the batch, forward, backward, `clip_grad_norm_`, the optimizer's step. Nothing is looked at or logged;
* ours: a step of `loop.train`: the same, with the norm of the update, the guards' looks at loss and gradient, a row of
  metrics.jsonl and one of timing.jsonl. No validation and no checkpoint falls into the steps that are measured.

Then, at nano and at N = 256, d = 128, a step with `sc` beside one with `sa`, masked language modelling, a step a turn.
"usual" is sc's step without `models.first_order`, as second derivatives need it; the three have the same batches.
``--sizes`` and ``--consensus`` choose; give no word after one of them to leave it out. ``--compiled nano`` prints the
same two mechanisms with and without ``compile=true``, and the seconds of processor, this process's and the compiler's,
of the first compiled step: with an empty cache, and again with the compiler's cache on disk. ``--recorded sa sc``
prints nano steps of mechanisms with and without the recording of their operations (`stability.training.captured`), and
from how many steps on it pays.

They take turns of a few steps, and a ratio is of the same turn, bare over ours: tokens per second of ours over those of
bare. On a CPU the seconds are those that the process computed, so that a machine that others use may be timed on. The
parts that ours has beside bare are measured alone after that, as shares of a bare step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks import _training
from benchmarks._machine import machine
from stability.build import build_model, build_objective, build_optimizer
from stability.cli.compose import read
from stability.cli.words import Invocation
from stability.config.identity import run_id
from stability.config.run import RunSpec
from stability.config.sweep import SweepSpec
from stability.corpora.base import AbstractCorpus
from stability.corpora.cache import prepare
from stability.models.backbone import num_parameters
from stability.objectives import training_examples
from stability.runs.directory import RunDirectory
from stability.runs.log import RunLog
from stability.training import step as step_module
from stability.training.loop import train
from stability.training.run import Trainer

LEAST = 0.95


class Size(NamedTuple):
    """A model's layers, width, heads; its batch's positions and sequences; steps per turn."""

    layers: int
    width: int
    heads: int
    positions: int
    batch: int
    steps: int


SIZES = {
    "nano": Size(4, 64, 4, 64, 8, 10),  # conf/model/nano.yaml, and the sweep's own batch
    "1M": Size(5, 128, 4, 64, 8, 5),
    "20M": Size(6, 512, 8, 64, 8, 1),
}

CONSENSUS = {"nano": (_training.Size(4, 64, 4, 64, 8), 1.5), "N=256 d=128": (_training.Size(4, 128, 4, 256, 8), 1.35)}


def words(size: Size, folder: Path, device: str) -> list[str]:
    """Return the command line of a single run.

    Args:
        size: model and batch.
        folder: the pool.
        device: "cpu" or "cuda".
    """
    model = {"name": "measured", **dict(zip(("layers", "width", "heads", "positions"), size, strict=False))}
    how = ["evaluation.every_steps=1000000", "evaluation.sequences=1", f"device={device}", f"runs_dir={folder}"]
    what = ["mechanism=sa", "objective=ar", "lr=[1e-3]", "seeds=1", "steps=1000000", f"batch={size.batch}"]
    return [*what, *how, *(f"model.{key}={value}" for key, value in model.items())]


def bare(spec: RunSpec, corpus: AbstractCorpus, device: torch.device) -> Callable[[], None]:
    """Return one step of a plain loop; each call advances by one.

    Args:
        spec: the run's spec.
        corpus: its data.
        device: its device.
    """
    model, objective = build_model(spec, corpus.format).to(device), build_objective(spec, corpus.format)
    optimizer, number = build_optimizer(spec, model), 0
    parameters = list(model.parameters())

    def step() -> None:
        nonlocal number
        number += 1
        examples = training_examples(spec, corpus, objective, "train", number, seed=spec.seed, batch=spec.batch)
        total, count = objective.loss(model, examples.to(device))
        optimizer.zero_grad(set_to_none=True)
        (total / count).backward()
        nn.utils.clip_grad_norm_(parameters, spec.clip_limit)
        optimizer.step()

    return step


def timed(step: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of some calls: wall time on a GPU, this process's CPU time on a CPU.

    Args:
        step: the call.
        times: calls.
        device: its device.
    """
    now = time.perf_counter if device.type == "cuda" else time.process_time
    started = now()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return now() - started


def parts(trainer: Trainer) -> dict[str, Callable[[], object]]:
    """Return the parts of our step missing in the bare one, each alone."""
    own = [part.detach() for part in trainer.parameters]
    before = [part.clone() for part in own]
    row = {"step": 1, "loss": 1.2345678901234567, "grad_norm": 0.12345678901234567, "update_norm": 0.1, "lr": 1e-3}

    log = RunLog(RunDirectory(trainer.directory.path.parent, "log"), resume_after=-1)

    def write() -> None:
        log.write_metrics(row)
        log.write_timing({"step": 1, "wall_s": 1.234567890, "tokens_per_s": 12345.67890, "memory_mb": 123.456})

    def difference() -> None:
        torch._foreach_copy_(before, own)
        torch._foreach_sub_(before, own)

    return {
        "copy of the parameters and difference": difference,
        "norm of the update": lambda: trainer.devices.norm(before),
        "two rows of logs": write,
    }


def measure(name: str, size: Size, repeats: int, device: torch.device) -> float:
    """Print one size's row and its parts; return the median ratio.

    Args:
        name: the size's name.
        size: the size.
        repeats: turns.
        device: the device.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        sweep = read(SweepSpec, Invocation.of(words(size, folder, device.type)))
        corpus = prepare(sweep.data, folder / "cache")
        spec = sweep.points(corpus.fingerprint)[0][1]
        trainer = Trainer(spec, RunDirectory(folder, run_id(spec)), corpus, device)
        trainer.directory.write_spec(spec.model_dump(mode="json"))
        steps = train(trainer.directory, nullcontext(trainer))
        loops = {"bare": bare(spec, corpus, device), "ours": partial(next, steps)}
        seconds: dict[str, list[float]] = {loop: [] for loop in loops}
        for turn in range(-2, repeats):
            for loop in sorted(loops, reverse=turn % 2 == 0):
                spent = timed(loops[loop], size.steps, device) / size.steps
                if turn >= 0:
                    seconds[loop].append(spent)
        ratios = [plain / own for plain, own in zip(seconds["bare"], seconds["ours"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        best, own = min(seconds["bare"]), min(seconds["ours"])
        tokens, num = size.batch * size.positions, num_parameters(trainer.model)
        bare_ms, ours_ms = (1e3 * statistics.median(seconds[loop]) for loop in ("bare", "ours"))
        print(
            f"{name:<6}{num:>12,}{tokens:>8,}{bare_ms:>10.2f}{ours_ms:>10.2f}{middle:>9.3f}{f'{low:.3f}-{high:.3f}':>14}"
            f"{best / own:>9.3f}   {'met' if middle >= LEAST else 'MISSED'}",
            flush=True,
        )
        alone = {part: min(timed(call, 5, device) / 5 for _ in range(5)) for part, call in parts(trainer).items()}
        print("      " + "; ".join(f"{part} {100 * spent / best:.2f} %" for part, spent in alone.items()), flush=True)
        steps.close()
        trainer.telemetry.close()
    return middle


def compare_consensus(name: str, repeats: int, device: torch.device) -> float:
    """Print the times of a step with sa and with sc; return the median ratio.

    Args:
        name: a key of `CONSENSUS`.
        repeats: turns.
        device: the device.
    """
    size, limit = CONSENSUS[name]
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            loop: _training.replica(
                {"mechanism": loop.split()[0], "objective": "mlm"},
                size,
                max(repeats + 2, step_module.RECORDED_FROM),  # as long runs, whose steps are recorded
                device.type,
                Path(folder),
            )
            for loop in ("sa", "sc", "sc usual")
        }
        taken = dict.fromkeys(loops, 0)

        def advance(loop: str) -> None:
            taken[loop] += 1
            loops[loop].train_step(taken[loop])

        def advance_usual() -> None:
            with mock.patch.object(step_module, "differentiated_once", lambda promised: nullcontext()):
                advance("sc usual")

        calls = {"sa": partial(advance, "sa"), "sc": partial(advance, "sc"), "sc usual": advance_usual}
        times = _training.interleaved(calls, repeats, device.type)
    ms = "".join(f"{1e3 * statistics.median(times[loop]):>10.1f}" for loop in loops)
    low, middle, high = statistics.quantiles([b / a for a, b in zip(times["sa"], times["sc"], strict=True)], n=4)
    best = min(times["sc"]) / min(times["sa"])
    usual = statistics.median(b / a for a, b in zip(times["sc usual"], times["sc"], strict=True))
    print(
        f"{name:<14}{ms}{middle:>10.2f}{f'{low:.2f}-{high:.2f}':>13}{best:>9.2f}{usual:>10.2f}   "
        f"{'met' if middle <= limit else 'MISSED'}: at most {limit:g}",
        flush=True,
    )
    return middle


def compare_compiled(name: str, repeats: int, device: torch.device) -> None:
    """Print the times of a step with sa and with sc, with and without ``compile=true``, and those of compiling.

    Args:
        name: a key of `CONSENSUS`.
        repeats: turns.
        device: the device.
    """
    import torch._dynamo  # imported late: a second of imports that the other measurements do without
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    config.compile_threads = 1  # in this process, so that its seconds are counted
    size, _ = CONSENSUS[name]
    compiled = {loop: loop.endswith("compiled") for loop in ("sa", "sc", "sa compiled", "sc compiled")}
    first: dict[str, list[float]] = {loop: [] for loop in compiled}
    with tempfile.TemporaryDirectory() as folder, fresh_cache():
        for _ in ("empty cache", "cache on disk"):
            torch._dynamo.reset()
            loops = {
                loop: _training.replica(
                    {"mechanism": loop.split()[0], "objective": "mlm", "compile": is_compiled},
                    size, max(repeats + 3, step_module.RECORDED_FROM), device.type, Path(folder),
                )
                for loop, is_compiled in compiled.items()
            }  # fmt: skip
            for loop, own in loops.items():
                start = _processor_seconds()
                own.train_step(1)
                first[loop].append(_processor_seconds() - start)
        taken = dict.fromkeys(loops, 1)

        def advance(loop: str) -> None:
            taken[loop] += 1
            loops[loop].train_step(taken[loop])

        times = _training.interleaved({loop: partial(advance, loop) for loop in loops}, repeats, device.type)
    print(f"{name:<14}{'ms a step':>12}{'of best':>10}{'first step, s: empty cache, cache on disk':>44}")
    for loop in loops:
        ms = 1e3 * statistics.median(times[loop])
        print(f"{loop:<14}{ms:>12.1f}{1e3 * min(times[loop]):>10.1f}{'{:.1f}, {:.1f}'.format(*first[loop]):>44}")
    for below, above in (("sa", "sc"), ("sa compiled", "sc compiled"), ("sa", "sa compiled"), ("sc", "sc compiled")):
        ratios = [b / a for a, b in zip(times[below], times[above], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        best = min(times[above]) / min(times[below])
        print(f"{above} / {below}: {middle:.2f} ({low:.2f}-{high:.2f}), of best {best:.2f}")


def compare_recorded(mechanism: str, repeats: int) -> None:
    """Print the times of a nano step on a CPU, with and without recorded operations, and from which step on it pays.

    Raises:
        RuntimeError: a recorded step's row differs from the plain one's, or the step cannot be recorded.
    """
    objective = "mlm" if mechanism in ("sc", "mix") else "ar"
    size, steps = CONSENSUS["nano"][0], max(repeats + 2, step_module.RECORDED_FROM)
    loops, rows = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for loop, least in (("plain", steps + 1), ("recorded", 0)):
            with mock.patch.object(step_module, "RECORDED_FROM", least):
                parts = {"mechanism": mechanism, "objective": objective}
                loops[loop] = _training.replica(parts, size, steps, "cpu", Path(folder))
            rows[loop] = []

        def advance(loop: str) -> None:
            rows[loop].append(loops[loop].train_step(len(rows[loop]) + 1))

        first: dict[str, list[float]] = {loop: [] for loop in loops}
        for _ in range(2):  # steps of the recorded loop that are computed twice
            for loop, seconds in first.items():
                seconds.append(timed(partial(advance, loop), 1, torch.device("cpu")))
        times = _training.interleaved({loop: partial(advance, loop) for loop in loops}, repeats - 2, "cpu")
    if rows["plain"] != rows["recorded"] or loops["recorded"]._captured is None:
        raise RuntimeError(f"{mechanism} is not recorded, or its recorded steps are not the plain ones")
    plain, recorded = (1e3 * statistics.median(times[loop]) for loop in ("plain", "recorded"))
    low, middle, high = statistics.quantiles(
        [own / other for own, other in zip(times["recorded"], times["plain"], strict=True)], n=4
    )
    extra = 1e3 * sum(first["recorded"]) - 2 * recorded
    print(
        f"{mechanism:<16}{plain:>10.1f}{recorded:>10.1f}{middle:>10.2f}{f'{low:.2f}-{high:.2f}':>13}{extra:>12.0f}"
        f"{extra / (plain - recorded) if plain > recorded else float('inf'):>12.0f}",
        flush=True,
    )


def _processor_seconds() -> float:
    return sum(os.times()[:4])  # with those of children that have ended, such as the C++ compiler's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40, help="turns per size (default 40)")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--consensus", nargs="*", default=list(CONSENSUS), choices=list(CONSENSUS))
    parser.add_argument("--compiled", nargs="*", default=[], choices=list(CONSENSUS))
    parser.add_argument("--recorded", nargs="*", default=[], metavar="MECHANISM")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "1 thread, seconds that the process computed"
    print(f"{where}; {machine()}")
    if arguments.sizes:
        print(
            f"{'size':<6}{'parameters':>12}{'tokens':>8}{'bare ms':>10}{'ours ms':>10}{'ratio':>9}{'quartiles':>14}"
            f"{'of best':>9}   at least {LEAST:g}"
        )
    for name in arguments.sizes:
        measure(name, SIZES[name], arguments.repeats, device)
    if arguments.consensus:
        heads = "".join(f"{head:>10}" for head in ("sa", "sc", "usual", "sc/sa"))
        print(f"{'ms a step':<14}{heads}{'quartiles':>13}{'of best':>9}{'sc/usual':>10}")
    for name in arguments.consensus:
        compare_consensus(name, arguments.repeats, device)
    for name in arguments.compiled:
        compare_compiled(name, arguments.repeats, device)
    if arguments.recorded:
        heads = "".join(f"{head:>10}" for head in ("plain", "recorded", "ratio"))
        print(f"{'ms a step':<16}{heads}{'quartiles':>13}{'first, ms':>12}{'pays from':>12}")
    for name in arguments.recorded:
        compare_recorded(name, arguments.repeats)


if __name__ == "__main__":
    main()
