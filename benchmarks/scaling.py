"""Measure the growth of a mixer layer's time and memory with N, d, w, r and ξ: ``python -m benchmarks.scaling``.

The consensus paper's Table 1: O(N²d) of self-attention, O(Ndwr(ξ + 1)) of self-consensus.

Lengths: layers of width 64 with 4 heads, float32, one CPU thread, one sequence of N = 256 … 8,192. At each N the
mechanisms take turns; times are the thread's own CPU seconds, medians over the turns: of the forward pass without a
graph, and of forward and backward (gradients of the input and all weights). Memory is the allocator's peak beyond input
and weights, from torch.profiler's record of every allocation. The exponents are least-squares slopes in log-log from
N = 1,024 on: 1 is linear, 2 quadratic. `sa` is torch's own attention, which on a CPU never stores its N × N matrix: its
time is quadratic, its memory is not.

Factors (``--factors``): one head, one factor at a time from the paper's defaults (`DEFAULTS`), values in turns, every
second turn in reverse. Multiply-adds are counted on the meta device: those of matrix products, and one for each element
of an elementwise product. Table 1 is asymptotic: its exponents are judged by the counts alone, from 8 to 16 times the
largest timed value. Exponents of time are of each turn, with Student's 95 % interval of their mean.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._measuring import Call, Promise, interleaved, peak_bytes  # isort: skip (before torch, see there)

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from analysis.numbers.spread import mean_interval
from benchmarks._machine import machine
from stability.mechanisms import build

WIDTH, HEADS = 64, 4
LENGTHS, FITTED_FROM = (256, 512, 1024, 2048, 4096, 8192), 1024
MECHANISMS: dict[str, dict[str, Any]] = {"sa": {}, "sw": {"window": 2}, "sc": {"window": 2, "rank": 4}}
LINEAR, QUADRATIC = 1.1, 1.7  # exponents: at most and, for sa, whose projections stay linear, at least
QUANTITIES = {"forward": "ms", "forward and backward": "ms", "peak memory": "MiB"}
DEFAULTS = {"N": 256, "d": 64, "w": 2, "r": 4, "ξ": 256}  # the paper's, but for N
VALUES = {"N": (256, 512, 1024), "d": (64, 128, 256), "w": (2, 4, 8), "r": (4, 8, 16), "ξ": (64, 128, 256)}
# exponents of Table 1: O(N²d), O(Ndwr(ξ + 1))
PRINTED = {"sa": {"N": 2, "d": 1}, "sc": dict.fromkeys(VALUES, 1)}
FAR = (8, 16)  # times the largest timed value, for the counted exponent
FAR_LENGTH = 16384  # N of far windows, whose edges are then rarely cut at the ends
PROJECTIONS = {"sa": 4, "sc": 2}  # d × d products for each position
ROUNDING = 0.02  # of a counted exponent: edges cut at the ends of a sequence

Table = dict[str, dict[str, list[float]]]  # quantity -> mechanism -> a number for each length


def calls_of(
    mechanism: str, settings: dict[str, Any], positions: int, *, width: int = WIDTH, heads: int = HEADS
) -> tuple[Call, Call]:
    """Return two calls: the forward pass alone, and forward with backward.

    Args:
        mechanism: the mechanism's name.
        settings: its settings.
        positions: sequence length N.
        width: d.
        heads: number of heads.
    """
    torch.manual_seed(0)
    layer = build(mechanism, width=width, heads=heads, **settings)
    x_BND, y_BND = torch.randn(1, positions, width, requires_grad=True), torch.randn(1, positions, width)
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
    return slope(*zip(*fitted, strict=True))


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


class MultiplyAdds(TorchDispatchMode):
    """Count multiply-adds: of matrix products, and one for each element of an elementwise product."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, packet = func(*args, **(kwargs or {})), func._overloadpacket
        if packet in flop_registry:
            self.count += flop_registry[packet](*args, **(kwargs or {}), out_val=found) // 2
        elif packet is torch.ops.aten.mul:
            self.count += found.numel()
        return found


def settings_of(mechanism: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return a mechanism's settings for sizes N, d, w, r, ξ."""
    return {"window": sizes["w"], "rank": sizes["r"], "edge_hidden": sizes["ξ"]} if mechanism == "sc" else {}


def count_multiply_adds(mechanism: str, sizes: dict[str, int]) -> int:
    """Return the multiply-adds of one forward pass of a layer of one head, traced on the meta device."""
    with torch.device("meta"):
        layer = build(mechanism, width=sizes["d"], heads=1, **settings_of(mechanism, sizes))
        x_BND = torch.empty(1, sizes["N"], sizes["d"])
    with torch.no_grad(), MultiplyAdds() as counted:
        layer(x_BND)
    return counted.count


def slope(values: Sequence[float], measured: Sequence[float]) -> float:
    """Return the exponent of the growth: the least-squares slope in log-log."""
    return float(np.polyfit(np.log(values), np.log(measured), 1)[0])


class Growth(NamedTuple):
    """The growth with one factor: exponents, and the numbers behind them.

    Attributes:
        counts: multiply-adds of one forward pass at each timed value.
        far: exponent of the counts from `FAR` times the largest value.
        bare: the same without the projections.
        milliseconds: median of forward and backward at each value.
        turns: exponent of time in each turn.
        memory: exponent of peak memory.
    """

    counts: list[int]
    far: float
    bare: float
    milliseconds: list[float]
    turns: list[float]
    memory: float


def far_exponents(mechanism: str, factor: str) -> tuple[float, float]:
    """Return the exponents of far multiply-adds: of all, and of those besides the projections."""
    values = tuple(times * VALUES[factor][-1] for times in FAR)
    base = DEFAULTS | ({"N": FAR_LENGTH} if factor == "w" else {})
    sizes = [base | {factor: value} for value in values]
    counts = [count_multiply_adds(mechanism, own) for own in sizes]
    projections = [PROJECTIONS[mechanism] * own["N"] * own["d"] ** 2 for own in sizes]
    bare = [count - of_these for count, of_these in zip(counts, projections, strict=True)]
    return slope(values, counts), slope(values, bare)


def grow(mechanism: str, factor: str, repeats: int) -> Growth:
    """Measure the growth of a mechanism's cost with one factor, the others at `DEFAULTS`.

    Args:
        mechanism: sa or sc.
        factor: N, d, w, r or ξ.
        repeats: turns.
    """
    values, sizes = VALUES[factor], {value: DEFAULTS | {factor: value} for value in VALUES[factor]}
    calls = {
        str(value): calls_of(mechanism, settings_of(mechanism, own), own["N"], width=own["d"], heads=1)[1]
        for value, own in sizes.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        ordered = dict(reversed(calls.items())) if turn % 2 else calls
        for name, seconds in interleaved(ordered, 1).items():
            times[name] += seconds
    return Growth(
        [count_multiply_adds(mechanism, own) for own in sizes.values()],
        *far_exponents(mechanism, factor),
        [statistics.median(seconds) * 1e3 for seconds in times.values()],
        [slope(values, turn) for turn in zip(*times.values(), strict=True)],
        slope(values, [peak_bytes(call) for call in calls.values()]),
    )


def verdict(growth: Growth, printed: int) -> str:
    """Return whether the counted exponent is at most the paper's, up to `ROUNDING`."""
    return "supported" if growth.far <= printed + ROUNDING else "not supported"


def report_factors(found: dict[tuple[str, str], Growth]) -> None:
    """Print the growth with each factor beside the exponent of Table 1."""
    form = "{:8s}{:>16s}{:>22s}{:>18s}{:>9s}{:>9s}{:>7s}{:>7s}{:>22s}{:>8s}  {}"
    heads = ("values", "million multiply-adds", "ms", "Table 1", "counted", "far", "bare", "time (95 %)", "memory", "")
    print("\none head, forward and backward; multiply-adds of one forward pass; the other sizes at", DEFAULTS)
    print(
        "exponents: of the counts, of those far beyond (they decide), the same without projections, of time, of memory"
    )
    print(form.format("", *heads))
    for (mechanism, factor), each in found.items():
        low, high = mean_interval(each.turns)
        cells = [
            ", ".join(map(str, VALUES[factor])),
            ", ".join(f"{count / 1e6:.1f}" for count in each.counts),
            ", ".join(f"{milliseconds:.1f}" for milliseconds in each.milliseconds),
            str(PRINTED[mechanism][factor]),
            *(f"{power:.2f}" for power in (slope(VALUES[factor], each.counts), each.far, each.bare)),
            f"{statistics.fmean(each.turns):.2f} ({low:.2f} to {high:.2f})",
            f"{each.memory:.2f}",
        ]
        print(form.format(f"{mechanism}, {factor}", *cells, verdict(each, PRINTED[mechanism][factor])))


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
    parser.add_argument("--factors", action="store_true", help="only the growth with N, d, w, r and ξ")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    report_factors(
        {(name, factor): grow(name, factor, options.repeats) for name, each in PRINTED.items() for factor in each}
    )
    if options.factors:
        return
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
