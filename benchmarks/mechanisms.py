"""Measure time and memory of a training step of each mechanism beside softmax attention (`sa`), side by side in one
process: ``python -m benchmarks.mechanisms``.

A step is forward, backward, gradient clipping and AdamW on the project's own model of 4 layers, over bytes in float32:
masked LM where the mechanism reads both sides, next-byte prediction where it is causal, each beside `sa` of the same
direction. Every mechanism that can be trained takes part as its settings are by default (`SETTINGS` says where not).

The recurrent ones up to 4,096 positions: ``--mechanisms recurrent --sizes N=512 N=4096 --directions causal``.

- Time: the mechanisms take turns, so that what else the machine does hits all alike; a ratio is of each turn, the table
  shows their median and quartiles. On a CPU the seconds that this process computed, on a GPU those of the clock.
- Memory: the most that a step holds at once beyond parameters and the optimizer's state, as torch's allocator counts it
  (on a CPU in the profiler's record of every allocation, on a GPU by ``torch.cuda.max_memory_allocated``).
- Growth: the exponent p of N**p between two sizes of one width, for a sequence: of a step's time and memory, of the
  time of the mixers alone (forward and backward), and of the multiply-adds that `cost` declares for very long
  sequences. Below 1.75 of those a mechanism is called sub-quadratic, and its time alone must grow by less than N**1.5;
  a recurrent one's is linear, by less than N**1.2.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from benchmarks._measuring import peak_bytes  # isort: skip (before torch, see there)
import torch
from torch import nn

from benchmarks._machine import machine
from benchmarks._training import Size, interleaved, training
from stability.config.parts import validate_settings
from stability.mechanisms import AbstractRecurrent, MixerShape
from stability.models.block import split_loss
from stability.registry import Registry, add_plugin

LAYERS, HEADS = 4, 4
RECURRENT = "recurrent"
PLAIN, OBJECTIVES = "sa", {"bidirectional": "mlm", "causal": "ar"}
SIZES = {
    "N=128": Size(LAYERS, 128, HEADS, 128, 16),
    "N=512": Size(LAYERS, 128, HEADS, 512, 4),
    "N=2048": Size(LAYERS, 128, HEADS, 2048, 1),
    "N=4096": Size(LAYERS, 128, HEADS, 4096, 1),
    "N=128 d=64": Size(LAYERS, 64, HEADS, 128, 8),
    "N=256 d=128": Size(LAYERS, 128, HEADS, 256, 8),
}
DEFAULT = ("N=128", "N=512", "N=2048")
GROWTH = (("N=512", "N=2048"), ("N=512", "N=4096"))  # (from, to), if both are measured
# a step's largest time in steps of sa: for any mechanism, and for one of them
ALLOWED = {"N=512": 8.0}
ALLOWED_OF = {("N=128 d=64", "sc"): 3.0, ("N=256 d=128", "sc"): 2.5}
SUB_QUADRATIC, LEAST_GAIN, LINEAR, ENDLESS = 1.75, 1.5, 1.2, 2**20
# settings other than the defaults, and variants in separate rows
SETTINGS: dict[str, Callable[[Size], dict[str, Any]]] = {
    "sc": lambda size: {"window": 2, "rank": 4, "edge_hidden": size.width // 4},
    "mix": lambda size: {"sc": SETTINGS["sc"](size)},
    "sparse_transformer": lambda size: {"stride": math.isqrt(size.positions)},  # best near √N (Child et al. 2019)
}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "sigmoid": ({"norm": "after"},),
    "gated_softmax": ({"gate": "headwise"},),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A mechanism in one direction, with its settings."""

    label: str
    name: str
    extra: dict[str, Any]
    direction: str

    def settings(self, size: Size) -> dict[str, Any]:
        return (SETTINGS[self.name](size) if self.name in SETTINGS else {}) | self.extra

    def parts(self, size: Size) -> dict[str, Any]:
        """Return the differences of the case's model from a plain one (`training`)."""
        own = {"name": self.name, **self.settings(size)}
        return {"mechanism": own, "objective": OBJECTIVES[self.direction]}


class Measured(NamedTuple):
    """A case's measurements at one size: seconds of each turn, bytes, and seconds of the mixers alone."""

    seconds: list[float]
    memory: int
    alone: float


def cases(names: list[str], directions: list[str]) -> tuple[list[Case], list[str]]:
    """Return each mechanism in each supported direction, and the omitted ones with reasons.

    In each direction `sa` is first.
    """
    registry, found, absent = Registry("mechanisms"), [], []
    for direction in directions:
        for name in [PLAIN, *(each for each in names if each != PLAIN)]:
            mechanism = registry.load(name)
            for extra in ({}, *VARIANTS.get(name, ())):
                label = " ".join([name, *(f"{key}={value}" for key, value in extra.items())])
                case = Case(label, name, extra, direction)
                config = validate_settings("mechanisms", name, case.settings(SIZES[DEFAULT[0]]))
                if mechanism.untrained(config):
                    absent += [f"{name}: it is not trained"] * (direction == directions[0])
                elif direction in mechanism.supported_directions(config):
                    found.append(case)
    return found, absent


def alone(net: nn.Module, size: Size, device: str) -> Callable[[], None]:
    """Return forward and backward of all layers' mixers, without the rest of the model.

    All mixers get the same numbers.

    Args:
        net: the model.
        size: its size.
        device: "cpu" or "cuda".
    """
    mixers = [block.mixer for block in cast(Any, net).blocks]
    x_BND = torch.randn(size.batch, size.positions, size.width, generator=torch.Generator().manual_seed(0)).to(device)
    x_BND.requires_grad_()

    def call() -> None:
        for mixer in mixers:
            losses: list[Any] = []
            y_BND = split_loss(mixer(x_BND), losses)
            (y_BND.square().mean() + sum(each_B.mean() for each_B in losses)).backward()
            mixer.zero_grad()
            x_BND.grad = None
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def measure(chosen: list[Case], size: Size, repeats: int, device: str) -> tuple[dict[Case, Measured], list[str]]:
    """Return each case's measurements, and the reasons for cases refused by the size.

    Args:
        chosen: the cases.
        size: model and batch.
        repeats: turns.
        device: "cpu" or "cuda".
    """
    steps, mixers, refused = {}, {}, []
    for case in chosen:
        try:
            trained = training(case.parts(size), size, device)
        except ValueError as error:
            refused.append(f"{case.label} ({case.direction}): {error}")
            continue
        steps[case], mixers[case] = trained.step, alone(trained.net, size, device)
    seconds, singly = interleaved(steps, repeats, device), interleaved(mixers, repeats, device)
    found = {
        case: Measured(seconds[case], peak_bytes(step, device), statistics.median(singly[case]))
        for case, step in steps.items()
    }
    return found, refused


def size_lines(label: str, size: Size, found: dict[Case, Measured]) -> Iterator[str]:
    """Yield a line for each mechanism at one size.

    Args:
        label: the size's name.
        size: the size.
        found: measurements by case.
    """
    yield f"\n{label}: width {size.width}, {size.batch} sequences of {size.positions} a step"
    header = f"{'mechanism':<30}{'direction':<14}{'ms/step':>9}{'/ sa':>7}{'quartiles':>14}{'MB':>9}{'/ sa':>7}"
    yield f"{header}{'allowed':>16}"
    plain = {case.direction: each for case, each in found.items() if case.label == PLAIN}
    for case, each in found.items():
        base = plain[case.direction]
        ratios = [mine / other for mine, other in zip(each.seconds, base.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        limit = ALLOWED_OF.get((label, case.name), ALLOWED.get(label))
        promised = "" if limit is None else f"{limit:g} {'met' if middle <= limit else 'MISSED'}"
        yield (
            f"{case.label:<30}{case.direction:<14}{1e3 * statistics.median(each.seconds):>9.1f}{middle:>7.2f}"
            f"{f'{low:.2f}-{high:.2f}':>14}{each.memory / 2**20:>9.1f}{each.memory / base.memory:>7.2f}{promised:>16}"
        )


def exponent(small: float, large: float, sizes: tuple[Size, Size]) -> float:
    """Return p of N**p between two sizes, for one sequence.

    Args:
        small: a batch's number at the smaller size.
        large: a batch's number at the larger size.
        sizes: smaller and larger.
    """
    grown = (large / sizes[1].batch) / (small / sizes[0].batch)
    return math.log(grown) / math.log(sizes[1].positions / sizes[0].positions)


def declared(case: Case, size: Size) -> float:
    """Return the exponent of a mechanism's declared multiply-adds for very long sequences."""
    mechanism, shape = Registry("mechanisms").load(case.name), MixerShape(size.width, size.heads, case.direction)
    costs = [
        mechanism.cost(
            validate_settings("mechanisms", case.name, case.settings(size._replace(positions=num))), shape, num
        )
        for num in (ENDLESS, 4 * ENDLESS)
    ]
    return math.log2(costs[1] / costs[0]) / 2


def growth_lines(found: tuple[dict[Case, Measured], dict[Case, Measured]], sizes: tuple[Size, Size]) -> Iterator[str]:
    """Yield a line for each mechanism measured at both sizes."""
    yield f"\ngrowth from N={sizes[0].positions} to N={sizes[1].positions}: p of N**p for a sequence"
    yield f"{'mechanism':<30}{'direction':<14}{'step':>7}{'alone':>7}{'memory':>8}{'declared':>10}{'sub-quadratic':>16}"
    small, large = found
    for case in (case for case in small if case in large):
        step = exponent(statistics.median(small[case].seconds), statistics.median(large[case].seconds), sizes)
        mixer = exponent(small[case].alone, large[case].alone, sizes)
        memory, cost = exponent(small[case].memory, large[case].memory, sizes), declared(case, sizes[0])
        most = LINEAR if is_recurrent(case.name) else LEAST_GAIN
        promised = "" if cost >= SUB_QUADRATIC else "met" if mixer < most else "MISSED"
        yield f"{case.label:<30}{case.direction:<14}{step:>7.2f}{mixer:>7.2f}{memory:>8.2f}{cost:>10.2f}{promised:>16}"


def is_recurrent(name: str) -> bool:
    return issubclass(Registry("mechanisms").load(name), AbstractRecurrent)


def named(given: list[str] | None) -> list[str]:
    """Return the requested mechanisms: all by default, the recurrent ones for that word."""
    every = list(Registry("mechanisms").names(cross=False))
    asked = every if given is None else given
    return [
        name
        for word in asked
        for name in ([each for each in every if is_recurrent(each)] if word == RECURRENT else [word])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns per size (default 15)")
    which = f"beside sa, which is always measured; {RECURRENT}: those that are (default: all)"
    parser.add_argument("--mechanisms", nargs="+", help=which)
    parser.add_argument("--sizes", nargs="+", default=list(DEFAULT), choices=list(SIZES))
    parser.add_argument("--directions", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--plugins", nargs="+", default=[], help="modules of mechanisms of your own")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for plugin in arguments.plugins:
        add_plugin(plugin)
    names = named(arguments.mechanisms)
    print(torch.cuda.get_device_name() if arguments.device == "cuda" else "1 thread", machine(), sep="; ")
    chosen, absent = cases(names, arguments.directions)
    found: dict[str, dict[Case, Measured]] = {}
    for label in arguments.sizes:
        found[label], refused = measure(chosen, SIZES[label], arguments.repeats, arguments.device)
        print("\n".join(size_lines(label, SIZES[label], found[label])), flush=True)
        absent += [f"{label}: {each}" for each in refused]
    for small, large in (pair for pair in GROWTH if {*pair} <= found.keys()):
        print("\n".join(growth_lines((found[small], found[large]), (SIZES[small], SIZES[large]))))
    for each in absent:
        print(f"left out: {each}")


if __name__ == "__main__":
    main()
