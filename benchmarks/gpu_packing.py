"""Measure how many training steps a second one GPU takes for small models, by each way to fill it: ``python -m
benchmarks.gpu_packing [--sizes nano,1M,10M,50M] [--device cuda] [--seconds 3]``.

Each way is timed in processes of its own, which all wait until the last is ready, for some seconds of the clock after a
warm-up. A row is printed as it is measured: models trained at once, steps a second of all together, their ratio to one
plain run alone, and runs of 200 steps an hour.

- plain: the product's step (batch, forward, backward, clipping, AdamW, norms of the log row), k processes sharing the
  GPU by time slices; "unfilled": new memory is not filled, as deterministic algorithms do to catch unwritten reads;
- MPS: the same processes under NVIDIA's Multi-Process Service, with a daemon of this run's own;
- cuda_graphs, compile, reduce-overhead: forward and backward pass as a graph, by torch.compile, by both;
- stacked: K models of other rates in one step, by torch.func.vmap, on a fixed batch; "bare" is one model's step
  on that batch, stacked's own unit. Attention takes what vmap of SDPA has, on CUDA possibly a loop over the models.

Below the rows of a size: launches a step and the share of its time in which the GPU computed, by the profiler, for each
way in one process. No GPU has been seen by this file yet: MPS, graphs and the counts of launches are untested.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.func import grad_and_value, vmap
from torch.profiler import ProfilerActivity, profile

from benchmarks._machine import machine
from benchmarks._training import Size, replica, training

SIZES = {
    "nano": Size(4, 64, 4, 64, 16),
    "1M": Size(5, 128, 4, 128, 32),
    "10M": Size(6, 384, 6, 256, 32),
    "50M": Size(12, 576, 9, 512, 32),
    "smoke": Size(1, 16, 2, 8, 2),
}
PARTS = {"mechanism": "sa", "objective": "ar"}
PLAIN, BARE, STACKED = "plain", "bare", "stacked"
# (way, models at once, whether under MPS)
WAYS = (
    (PLAIN, 1, False),
    ("unfilled", 1, False),
    ("cuda_graphs", 1, False),
    ("compile", 1, False),
    ("reduce-overhead", 1, False),
    (BARE, 1, False),
    (STACKED, 8, False),
    (STACKED, 32, False),
    (PLAIN, 4, False),
    (PLAIN, 16, False),
    (PLAIN, 4, True),
    (PLAIN, 16, True),
    ("cuda_graphs", 16, True),
)
SMOKE_WAYS = ((PLAIN, 1, False), (BARE, 1, False), (STACKED, 3, False), (PLAIN, 2, False), (PLAIN, 2, True))
STEPS_OF_A_RUN, WARM_UP = 200, 5
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MPS = "nvidia-cuda-mps-control"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


class Job(NamedTuple):
    """One row's measurement.

    Attributes:
        way: name of the way.
        models: models at once.
        size: name of the size.
        device: "cpu" or "cuda".
        seconds: measured time.
        pool: folder of the prepared data.
    """

    way: str
    models: int
    size: str
    device: str
    seconds: float
    pool: Path

    @property
    def processes(self) -> int:
        return 1 if self.way == STACKED else self.models


def step_of(job: Job) -> Callable[[], object]:
    """Return the step that a process of this way repeats."""
    size, way = SIZES[job.size], job.way
    if way == BARE:
        return training(PARTS, size, job.device).step
    if way == STACKED:
        return stacked(size, torch.logspace(-4, -2, job.models), job.device)
    changes = {"cuda_graphs": {"cuda_graphs": True}, "compile": {"compile": True}}.get(way, {})
    run, number = replica(PARTS | changes, size, 10**6, job.device, job.pool), 0
    if way == "unfilled":
        torch.utils.deterministic.fill_uninitialized_memory = False
    if way == "reduce-overhead":
        run.forward = torch.compile(run.model, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def step() -> None:
        nonlocal number
        number += 1
        run.train_step(number)

    return step


def stacked(size: Size, rates: Tensor, device: str) -> Callable[[], list[float]]:
    """Return a step of K models at once: gradients by vmap, each clipped by its own norm, AdamW; it returns losses.

    Args:
        size: model and batch.
        rates: learning rates (K).
        device: "cpu" or "cuda".
    """
    alone = training(PARTS, size, device)
    params = {name: each.detach().repeat(len(rates), *[1] * each.ndim) for name, each in alone.net.named_parameters()}
    values, rates = list(params.values()), rates.to(device)
    firsts, seconds = ([torch.zeros_like(each) for each in values] for _ in range(2))
    (beta1, beta2), eps, decay = ADAM["betas"], ADAM["eps"], ADAM["weight_decay"]
    gradients_of, number = vmap(grad_and_value(alone.loss)), 0

    def along(values_K: Tensor, like: Tensor) -> Tensor:
        return values_K.reshape(-1, *[1] * (like.ndim - 1))

    def step() -> list[float]:
        nonlocal number
        number += 1
        found, losses_K = gradients_of(params)
        gradients = [found[name] for name in params]
        norms_K = torch.stack([each.flatten(1).square().sum(1) for each in gradients]).sum(0).sqrt()
        scale_K = (1.0 / (norms_K + 1e-6)).clamp(max=1.0)
        for each in gradients:
            each.mul_(along(scale_K, each))
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(torch._foreach_div(seconds, 1 - beta2**number))
        torch._foreach_add_(roots, eps)
        for value, first, root in zip(values, firsts, roots, strict=True):
            rate = along(rates, value)
            value.mul_(1 - rate * decay)
            value.sub_(rate / (1 - beta1**number) * first / root)
        return losses_K.tolist()

    return step


def work(job: Job) -> None:
    """Repeat a step for some seconds after a line on standard input; print steps and seconds as JSON."""
    step = step_of(job)
    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < job.seconds:
        step()
        count += 1
    if job.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    launched = launches(step, seconds / max(count, 1)) if job.device == "cuda" and job.processes == 1 else ""
    print(json.dumps({"steps": count, "seconds": seconds, "launches": launched}), flush=True)


def launches(step: Callable[[], object], step_s: float) -> str:
    """Return the launches of a step, and the GPU's seconds in it as a share of a step without profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    events = record.key_averages()
    count = sum(each.count for each in events if each.key.startswith(LAUNCHES))
    busy_s = sum(each.self_device_time_total for each in events if each.device_type == DeviceType.CUDA) / 1e6
    return f"{count} launches, GPU busy {100 * busy_s / step_s:.0f} %, {torch.cuda.get_device_name()}"


def measure(job: Job, environment: dict[str, str]) -> tuple[float, str]:
    """Return a job's steps a second over all its models, and the first process's launches.

    Args:
        job: the job.
        environment: the workers' variables.

    Raises:
        RuntimeError: a worker ended early; its last line.
    """
    words = ["--worker", job.way, "--models", str(job.models), "--sizes", job.size, "--device", job.device]
    words += ["--seconds", str(job.seconds), "--pool", str(job.pool)]
    with tempfile.TemporaryFile("w+") as errors:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_packing", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            for _ in range(job.processes)
        ]
        try:
            found = _together(workers)
        except RuntimeError:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else "a process ended without a word") from None
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    each = job.models // job.processes
    return sum(each * one["steps"] / one["seconds"] for one in found), found[0]["launches"]


def _together(workers: list[subprocess.Popen[str]]) -> list[dict]:
    """Start all workers' measurements once all are ready, and return their results."""
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            raise RuntimeError
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    lines = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
    if not all(lines):
        raise RuntimeError
    return [json.loads(line) for line in lines]


@contextmanager
def mps(device: str) -> Iterator[dict[str, str]]:
    """Start an MPS daemon; yield its clients' variables.

    Raises:
        RuntimeError: this machine has none, or it does not start.
    """
    if device != "cuda":
        raise RuntimeError("MPS needs device=cuda")
    if shutil.which(MPS) is None:
        raise RuntimeError(f"no {MPS} on this machine")
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        environment = {**os.environ, **own}
        for place in own.values():
            Path(place).mkdir()
        begun = subprocess.run([MPS, "-d"], env=environment, capture_output=True, text=True, timeout=30)
        if begun.returncode:
            raise RuntimeError(f"{MPS} -d: {(begun.stderr or begun.stdout).strip()}")
        try:
            yield own
            log = Path(own["CUDA_MPS_LOG_DIRECTORY"], "control.log")
            if not log.exists() or "new server" not in log.read_text(errors="replace").lower():
                raise RuntimeError("the processes ran beside the MPS daemon, not through it")
        finally:
            subprocess.run([MPS], input="quit\n", env=environment, text=True, capture_output=True, timeout=60)


def rate_of(job: Job, under_mps: bool) -> tuple[float, str]:
    """Return what `measure` does, if wanted under MPS.

    Raises:
        RuntimeError: as `measure` and `mps`.
    """
    usual = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not under_mps:
        return measure(job, usual)
    with mps(job.device) as own:
        return measure(job, usual | own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="nano,1M,10M,50M", help="which, with commas between them")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of each row (default 3)")
    parser.add_argument("--pool", type=Path, help="folder of prepared data (default: a temporary one)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        parser.error(f"--sizes: no {', '.join(unknown)}; choices: {', '.join(SIZES)}")
    if given.worker:
        torch.set_num_threads(1)
        work(Job(given.worker, given.models, names[0], given.device, given.seconds, given.pool))
        return
    print(machine())  # this process itself leaves the GPU alone
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            _table(name, given.device, given.seconds, given.pool or Path(folder))


def _table(name: str, device: str, seconds: float, pool: Path) -> None:
    size, unit, counted = SIZES[name], 0.0, []
    print(f"\n{name}: {size.layers} layers, width {size.width}, {size.batch} × {size.positions} tokens a step")
    print(f"{'way':<24}{'models':>7}{'steps/s':>11}{'of alone':>10}{'runs/h':>10}", flush=True)
    for way, models, under_mps in SMOKE_WAYS if name == "smoke" else WAYS:
        label = f"{way}{', MPS' if under_mps else ''}"
        try:
            rate, launched = rate_of(Job(way, models, name, device, seconds, pool), under_mps)
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            print(f"{label:<24}{models:>7}  -- {error}", flush=True)
            continue
        unit = unit or rate
        hourly = 3600 * rate / STEPS_OF_A_RUN
        print(f"{label:<24}{models:>7}{rate:>11.1f}{rate / unit:>10.2f}{hourly:>10.0f}", flush=True)
        counted += [f"{label}, {models}: {launched}"] if launched else []
    print(*counted, sep="\n", flush=True)


if __name__ == "__main__":
    main()
