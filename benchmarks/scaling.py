"""Measure how one mixer layer's time and memory grow with the sequence's length N (the paper's Table 1): ``python -m
benchmarks.scaling``.

Layers of width 64 with 4 heads, float32, one CPU thread, one sequence of N = 256 … 8,192. At each N the mechanisms take
turns; times are the thread's own CPU seconds, medians over the turns: of the forward pass without a graph, and of
forward and backward (gradients of the input and all weights). Memory is the allocator's peak beyond input and weights,
from torch.profiler's record of every allocation. The exponents are least-squares slopes in log-log from N = 1,024 on: 1
is linear, 2 quadratic. `sa` is torch's own attention, which on a CPU never stores its N × N matrix: its time is
quadratic, its memory is not.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks._measuring import Call, Promise, interleaved, peak_bytes  # isort: skip (before torch, see there)

import numpy as np
import torch

from benchmarks._machine import machine
from stability.mechanisms import build

WIDTH, HEADS = 64, 4
LENGTHS, FITTED_FROM = (256, 512, 1024, 2048, 4096, 8192), 1024
MECHANISMS: dict[str, dict[str, Any]] = {"sa": {}, "sw": {"window": 2}, "sc": {"window": 2, "rank": 4}}
LINEAR, QUADRATIC = 1.1, 1.7  # exponents: at most and, for sa, whose projections stay linear, at least
QUANTITIES = {"forward": "ms", "forward and backward": "ms", "peak memory": "MiB"}

Table = dict[str, dict[str, list[float]]]  # quantity -> mechanism -> a number for each length


def calls_of(mechanism: str, settings: dict[str, Any], positions: int) -> tuple[Call, Call]:
    """Return two calls: the forward pass alone, and forward with backward.

    Args:
        mechanism: the mechanism's name.
        settings: its settings.
        positions: sequence length N.
    """
    torch.manual_seed(0)
    layer = build(mechanism, width=WIDTH, heads=HEADS, **settings)
    x_BND, y_BND = torch.randn(1, positions, WIDTH, requires_grad=True), torch.randn(1, positions, WIDTH)
    leaves = [x_BND, *layer.parameters()]

    def forward() -> object:
        with torch.no_grad():
            return layer(x_BND)

    def both() -> object:
        return torch.autograd.grad((layer(x_BND) * y_BND).sum(), leaves)

    return forward, both


def measure(lengths: tuple[int, ...], settings: dict[str, dict[str, Any]], repeats: int) -> Table:
    """Measure milliseconds and MiB of every mechanism at every length.

    Args:
        lengths: sequence lengths.
        settings: settings by mechanism.
        repeats: turns.
    """
    table: Table = {quantity: {name: [] for name in settings} for quantity in QUANTITIES}
    for positions in lengths:
        calls = {name: calls_of(name, chosen, positions) for name, chosen in settings.items()}
        forward = interleaved({name: call for name, (call, _) in calls.items()}, repeats)
        both = interleaved({name: call for name, (_, call) in calls.items()}, repeats)
        for name in settings:
            table["forward"][name].append(statistics.median(forward[name]) * 1e3)
            table["forward and backward"][name].append(statistics.median(both[name]) * 1e3)
            table["peak memory"][name].append(peak_bytes(calls[name][1]) / 2**20)
    return table


def exponent(lengths: tuple[int, ...], values: list[float]) -> float:
    """Return the exponent of the values' growth with N, from `FITTED_FROM` on."""
    fitted = [(length, value) for length, value in zip(lengths, values, strict=True) if length >= FITTED_FROM]
    return float(np.polyfit(*np.log(np.array(fitted)).T, 1)[0])


def report(lengths: tuple[int, ...], table: Table) -> list[Promise]:
    """Print the numbers with their exponents; return the promises about these."""
    promises = []
    for quantity, unit in QUANTITIES.items():
        heads = [f"N={length:,}" for length in lengths]
        print("\n" + f"{quantity}, {unit}".ljust(26) + "".join(f"{head:>11s}" for head in [*heads, "exponent"]))
        for name, values in table[quantity].items():
            power = exponent(lengths, values)
            print(f"{name:26s}{''.join(f'{value:11.2f}' for value in values)}{power:11.2f}")
            if name != "sa":
                promises.append(Promise(f"{name}, {quantity}: exponent", power, LINEAR))
            elif unit == "ms":
                promises.append(Promise(f"{name}, {quantity}: exponent", power, QUADRATIC, at_least=True))
    return promises


def draw(lengths: tuple[int, ...], table: Table, path: Path) -> None:
    """Draw forward and backward, and memory, against N, both log-log.

    Args:
        lengths: sequence lengths.
        table: from `measure`.
        path: the figure's file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from analysis.drawing.style import RC, WIDTH_INCHES, mechanism_looks

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH_INCHES, 2.5), layout="constrained")
        panels = ("forward and backward", "peak memory")
        for ax, quantity in zip(figure.subplots(1, 2), panels, strict=True):
            for name, values in table[quantity].items():
                color, marker = mechanism_looks(table[quantity])[name]
                ax.loglog(
                    lengths,
                    values,
                    color=color,
                    marker=marker,
                    markersize=4,
                    label=f"{name}, N^{exponent(lengths, values):.2f}",
                )
            ax.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
            ax.minorticks_off()
            ax.set_xlabel("sequence length N")
            ax.set_ylabel(f"{quantity} ({QUANTITIES[quantity]})")
            ax.legend()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="turns at each length (default 7)")
    parser.add_argument("--edge-hidden", type=int, default=16, help="ξ of sc (default 16; the paper's own runs: 256)")
    parser.add_argument("--figure", type=Path, help="draw the numbers, too, into this .svg or .png file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    settings = MECHANISMS | {"sc": MECHANISMS["sc"] | {"edge_hidden": options.edge_hidden}}
    print(
        "one layer, one sequence, d = 64, 4 heads:",
        ", ".join(f"{name} {chosen or ''}".strip() for name, chosen in settings.items()),
    )
    table = measure(LENGTHS, settings, options.repeats)
    promises = report(LENGTHS, table)
    print(f"\nwhat was promised of the exponents between N = {FITTED_FROM:,} and {LENGTHS[-1]:,}", *promises, sep="\n")
    if options.figure is not None:
        draw(LENGTHS, table, options.figure)


if __name__ == "__main__":
    main()
