"""Measure what each reading of the paper's C.3 costs `sc` and `cc` (``rope``): ``python -m benchmarks.readings``.

The flagship study's size (conf/study/flagship.yaml): model nano, 16 sequences of 64 bytes, masked language modelling,
float32, one CPU thread, seconds that the process computed. A training step is forward, backward, gradient clipping and
AdamW on a fixed batch; the pass for α_max is one of Taylor's over the same batch, along a random direction. `cc` is
one layer of the same width on random numbers, forward and backward. The readings take turns, and a ratio is of the same
turn, over ``absolute``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._machine import machine
from benchmarks._measuring import Promise
from benchmarks._training import Size, Training, interleaved, training
from stability.curvature import directional
from stability.mechanisms import build

FLAGSHIP = Size(4, 64, 4, 64, 16)
READINGS = ("absolute", "relative", "gradient", "none")
UNIT = "absolute"
MOST = 1.1  # of the time with `UNIT`


def alpha_max_of(trained: Training) -> Any:
    """Return the call that computes the batch loss's curvature along a random direction."""
    parameters = {name: each.detach() for name, each in trained.net.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(each.shape, generator=generator) for name, each in parameters.items()}
    return lambda: directional(trained.loss, parameters, direction, "taylor")


def cross_layer(reading: str, size: Size) -> Callable[[], None]:
    """Return the forward and backward pass of one layer of `cc` with a context as long as the text."""
    torch.manual_seed(0)
    layer = build("cc", width=size.width, heads=size.heads, rope=reading)
    x_BND, context_BND = torch.randn(2, size.batch, size.positions, size.width)
    x_BND.requires_grad_()
    return lambda: layer(x_BND, context_BND).square().sum().backward()


def report(what: str, seconds: dict[str, list[float]]) -> list[Promise]:
    """Print a line for each reading: median milliseconds, median and quartiles of the ratio."""
    print(f"{what + ', ms':24}{'median':>10}{'ratio':>9}{'quartiles':>16}")
    promises = []
    for reading, own in seconds.items():
        ratios = [mine / unit for mine, unit in zip(own, seconds[UNIT], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{reading:24}{1e3 * statistics.median(own):>10.2f}{middle:>9.3f}{f'{low:.3f}-{high:.3f}':>16}")
        promises.append(Promise(f"{reading}, {what}: ratio", middle, MOST))
    return promises


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="turns (default 60)")
    parser.add_argument("--iterations", type=int, default=1, help="mechanism.sc.iterations (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    settings = {"name": "sc", "iterations": options.iterations}
    trained = {
        reading: training({"mechanism": settings | {"rope": reading}, "objective": "mlm"}, FLAGSHIP, "cpu")
        for reading in READINGS
    }
    steps = {reading: each.step for reading, each in trained.items()}
    promises = report("training step", interleaved(steps, options.repeats, "cpu"))
    passes = {reading: alpha_max_of(each) for reading, each in trained.items()}
    promises += report("pass for α_max", interleaved(passes, options.repeats, "cpu"))
    layers = {reading: cross_layer(reading, FLAGSHIP) for reading in READINGS}
    promises += report("layer of cc", interleaved(layers, options.repeats, "cpu"))
    print(*promises, sep="\n")


if __name__ == "__main__":
    main()
