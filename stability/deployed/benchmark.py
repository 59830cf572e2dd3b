"""Measure a deployed model's speed and peak memory, at one batch size in a fresh process."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stability.build import build_objective, resolve_device
from stability.config.deployment import InferSpec
from stability.corpora.images.corpus import ImageBatch
from stability.corpora.proteins.batch import batch_of
from stability.corpora.proteins.chain import make_chain
from stability.deployed.folder import Deployed, load
from stability.deployed.fresh import call_fresh, print_numbers
from stability.models.passes import computing_in, generator_for
from stability.objectives import Examples
from stability.registry import add_plugins
from stability.training.devices import peak_memory_mb
from stability.training.machine import prepare_torch

BATCHES = (1, 32)
SHORTEST_S = 0.1  # of a measurement, which repeats the pass until then


def measure_anew(folder: str, batch: int, spec: InferSpec) -> dict[str, float]:
    """Return `measure`'s numbers from a fresh process.

    Args:
        folder: the deployed folder.
        batch: windows at a time.
        spec: repeats, device and plugins.

    Raises:
        ValueError: the process refused; the message is its own.
    """
    return call_fresh(__name__, [folder, str(batch), str(spec.repeats), spec.device, *spec.plugins])


@torch.no_grad()
def measure(deployed: Deployed, batch: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Return tokens a second of a forward pass over whole windows, and the process's peak memory.

    ``tokens_per_s`` is the median, beside the slowest and the fastest measurement.

    Args:
        deployed: the model.
        batch: windows at a time.
        repeats: measurements.
        device: device of the model.
    """
    run = deployed.spec
    prepare_torch(run.threads, device, run.precision)
    model, examples = deployed.model.to(device), make_examples(deployed, batch).to(device)

    def read() -> None:
        with computing_in(run.precision, device):
            examples.logits(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds, tokens = time_repeats(read, repeats), batch * run.model.positions
    speeds = {"tokens_per_s": statistics.median(seconds), "slowest": max(seconds), "fastest": min(seconds)}
    return {name: tokens / each for name, each in speeds.items()} | {"peak_mb": peak_memory_mb(device)}


def time_repeats(call: Callable[[], None], repeats: int) -> list[float]:
    """Return the seconds of a call in each of some measurements, after one call that does not count."""
    call()
    found = []
    for _ in range(repeats):
        start, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < SHORTEST_S or not calls:
            call()
            calls += 1
        found.append(passed / calls)
    return found


def make_examples(deployed: Deployed, batch: int) -> Examples:
    """Return random examples of a model's size.

    Raises:
        ValueError: the objective reads data of another kind.
    """
    objective: Any = build_objective(deployed.spec, deployed.data_format)
    positions, draws = deployed.spec.model.positions, generator_for(0, "benchmark")
    if objective.corpus_kind == "tokens":
        shape = (batch, objective.tokens_needed(positions))
        return objective.examples(torch.randint(int(deployed.data_format), shape, generator=draws), draws)
    if objective.corpus_kind == "images":
        size = objective.image
        pixels = torch.randint(256, (batch, size.height, size.width, size.channels), generator=draws)
        return objective.examples(ImageBatch(pixels.to(torch.uint8), torch.zeros(batch, dtype=torch.int64)), draws)
    if objective.corpus_kind == "proteins":
        return objective.examples(batch_of([make_chain(positions - 2)] * batch), draws)
    raise ValueError(f"benchmark=true makes no examples for objective={deployed.spec.objective.name}")


def describe_row(folder: str, manifest: dict[str, Any], found: dict[str, float]) -> str:
    """Return a line of a folder's numbers.

    Args:
        folder: the folder.
        manifest: its manifest.
        found: `measure`'s numbers with the batch size.
    """
    return (
        f"{folder}: {manifest['format']}, {manifest['bytes']:,} bytes; batch {found['batch']:.0f}: "
        f"{found['tokens_per_s']:,.0f} tokens/s ({found['slowest']:,.0f} to {found['fastest']:,.0f}), "
        f"peak {found['peak_mb']:,.0f} MB"
    )


def main(argv: Sequence[str]) -> int:
    """Print a folder's numbers as JSON; the words are folder, batch, repeats, device and plugins."""
    folder, batch, repeats, device, *plugins = argv

    def measure_folder() -> dict[str, float]:
        add_plugins(plugins)
        found = measure(load(folder), int(batch), int(repeats), resolve_device(device))
        return found | {"batch": int(batch)}

    return print_numbers(measure_folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
