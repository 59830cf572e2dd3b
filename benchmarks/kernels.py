"""Measure our Triton kernels beside torch's own operations, torch.compile and the libraries that have the same:
``python -m benchmarks.kernels [--kernels consensus,band_attention,streams,loss,recurrent,adamw_probe] [--without
compile] [--smoke]``.

Rows are printed as they are measured, so that a run may be cut at any moment. ``--without`` leaves contestants out by
name: torch.compile takes minutes for a recurrence over 4,096 positions.

A call is a forward and a backward pass. The contestants take turns, and each time is the median of its turns, by CUDA's
events. Memory is the allocator's peak beyond the bytes allocated before the call. "off": the norm of the gradients'
difference from those of torch's own operations, over their norm, for equal tensors. "bound": the least time for our
launches' bytes and operations on that device, max(bytes / bandwidth, operations / peak) (`kernels.roofline`). The
promises follow the table, each met or missed on this device.

Without a CUDA device only the bounds are printed, and nothing is measured. ``--smoke``: tiny sizes on any device, to
check that every contestant runs; its times have no meaning. On a CPU it needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from benchmarks._measuring import peak_bytes  # isort: skip (before torch, see there)
import torch

from benchmarks._machine import machine
from benchmarks.kernel_cases.case import COMPILED, EAGER, OURS, Call, Case, Promise
from kernels import availability
from kernels.roofline import DEVICES, Device, Traffic

KERNELS = ("consensus", "band_attention", "streams", "loss", "recurrent", "adamw_probe")
TURNS, SMOKE_TURNS = 20, 1
BOUND = "bound"


@dataclass(frozen=True)
class Result:
    """A contestant's median seconds, peak bytes (0: not measured) and error ``off``, or the failure.

    ``off`` is its gradients' distance from those by torch's own operations.
    """

    seconds: float = 0.0
    peak: int = 0
    off: float | None = None
    failure: str = ""


def main(argv: list[str] | None = None) -> None:
    given = _arguments(argv)
    names = given.kernels.split(",")
    if unknown := [name for name in names if name not in KERNELS]:
        _refuse(f"--kernels: no {', '.join(unknown)}; choices: {', '.join(KERNELS)}")
    modules = [importlib.import_module(f"benchmarks.kernel_cases.{name}") for name in names]
    cases = [case for module in modules for case in module.cases(given.smoke)]
    has_cuda = torch.cuda.is_available()
    print(f"{machine()}; {torch.cuda.get_device_name() if has_cuda else 'no CUDA device'}")
    if not has_cuda and not given.smoke:
        print("Nothing was measured: torch sees no CUDA device. The bounds of what our launches move and compute:\n")
        print(bounds(cases))
        return
    if not has_cuda and not availability.is_interpreted():
        _refuse(f"--smoke on a CPU needs {availability.INTERPRET}=1")
    if given.smoke:
        print("Tiny sizes, to see that all run: the times say nothing.")
    device = torch.device("cuda" if has_cuda else "cpu")
    without = {name for name in given.without.split(",") if name}
    results: dict[str, dict[str, Result]] = {}
    print("\n" + head())
    for case in cases:
        results[case.name] = measured(case, device, SMOKE_TURNS if given.smoke else TURNS, without)
        print("\n".join(rows(case, results[case.name])), flush=True)
    print("\n".join(notes(results)))
    if not given.smoke:
        print("\n".join(["", *kept(cases, results, at_hand())]))


def _refuse(line: str) -> NoReturn:
    print(f"python -m benchmarks.kernels: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which, with commas between them")
    parser.add_argument("--without", default="", help="contestants to leave out, such as compile")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on whatever there is")
    return parser.parse_args(argv)


def measured(case: Case, device: torch.device, turns: int, without: Collection[str] = ()) -> dict[str, Result]:
    """Return each contestant's result; one that cannot run has its reason, and the others continue.

    Args:
        case: the case.
        device: the device.
        turns: turns.
        without: names of contestants to leave out.
    """
    calls, results, gradients = {}, {}, {}
    with allowed(case.precision):
        for name, make in case.contestants.items():
            if name in without:
                results[name] = Result(failure="left out by --without")
                continue
            if name == COMPILED and device.type == "cpu":
                results[name] = Result(failure="left out on a CPU, for which compiling takes minutes")
                continue
            try:
                call = make(device)
                gradients[name] = call()
                calls[name] = (call, peak_bytes(call, "cuda") if device.type == "cuda" else 0)
            except Exception as error:  # noqa: BLE001 a library's own errors, whatever they are, end its part alone
                results[name] = Result(failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
                _forget(device)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(turns):
            for name, (call, _) in calls.items():
                seconds[name].append(timed(call, device))
    truth = gradients.get(EAGER)
    return results | {
        name: Result(statistics.median(seconds[name]), peak, off_by(gradients[name], truth))
        for name, (_, peak) in calls.items()
    }


def off_by(found: object, truth: object) -> float | None:
    """Return two calls' gradient difference relative to the second, as norms; None for different tensors."""
    if not (isinstance(found, tuple) and isinstance(truth, tuple)):
        return None
    if [each.shape for each in found] != [each.shape for each in truth]:
        return None
    pairs = [(mine.double(), theirs.double()) for mine, theirs in zip(found, truth, strict=True)]
    difference, size = (
        sum(float(part.square().sum()) for part in parts)
        for parts in ([mine - theirs for mine, theirs in pairs], [theirs for _, theirs in pairs])
    )
    return math.sqrt(difference / size) if size else None


class allowed:
    """A context with TF32 products in float32 if the precision is "tf32", else IEEE's."""

    def __init__(self, precision: str):
        self.wanted = "high" if precision == "tf32" else "highest"

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.wanted)

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def timed(call: Call, device: torch.device) -> float:
    """Return the seconds of one call: on CUDA between two events of its stream."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def _forget(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def at_hand() -> Device | None:
    """Return the current CUDA device's roofline; None if unknown."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((device for device in DEVICES if device.name.split()[0] in name), None)


def head() -> str:
    """Return the head of the table."""
    return f"{'':58}{'contestant':16}{'ms':>10}{'of ours':>9}{'off':>9}{'MB':>9}{_bounds_head()}"


def rows(case: Case, found: dict[str, Result]) -> list[str]:
    """Return a row for each contestant of a case, ours first."""
    lines = []
    ours = found.get(OURS, Result()).seconds
    for number, (name, result) in enumerate(sorted(found.items(), key=lambda item: item[0] != OURS)):
        label = case.name if number == 0 else ""
        ms = f"{result.seconds * 1e3:.3f}" if result.seconds else "--"
        share = f"{result.seconds / ours:.2f}" if ours and result.seconds else "--"
        off = "--" if result.off is None or name == EAGER else f"{result.off:.0e}"
        peak = f"{result.peak / 2**20:.0f}" if result.peak else "--"
        bound = _bounds(case) if number == 0 else ""
        lines.append(f"{label:58}{name:16}{ms:>10}{share:>9}{off:>9}{peak:>9}{bound}".rstrip())
    return lines


def notes(results: dict[str, dict[str, Result]]) -> list[str]:
    """Return the reasons of contestants without a number."""
    return [
        f"-- {case}, {name}: {result.failure}"
        for case, found in results.items()
        for name, result in found.items()
        if result.failure
    ]


def bounds(cases: list[Case]) -> str:
    """Return a row for each case: our launches' reads, writes, operations, and least time."""
    lines = [f"{'':58}{'MB read':>10}{'written':>10}{'GFLOP':>10}{_bounds_head()}"]
    for case in cases:
        traffic = moved(case)
        numbers = ("--",) * 3
        if traffic is not None:
            numbers = (f"{traffic.read / 1e6:.1f}", f"{traffic.written / 1e6:.1f}", f"{traffic.flops / 1e9:.1f}")
        lines.append(f"{case.name:58}{''.join(f'{number:>10}' for number in numbers)}{_bounds(case)}")
    return "\n".join(lines)


def _bounds_head() -> str:
    return "".join(f"{f'bound {device.name}':>20}" for device in DEVICES)


def moved(case: Case) -> Traffic | None:
    """Return the bytes and operations of a case's launches; None without a model or without triton."""
    try:
        return None if case.traffic is None else case.traffic()
    except ImportError:
        return None


def _bounds(case: Case) -> str:
    """Return a case's least time on each device and its bound."""
    traffic = moved(case)
    if traffic is None:
        return "".join(f"{'--':>20}" for _ in DEVICES)
    cells = []
    for device in DEVICES:
        seconds = device.seconds(traffic, case.precision)
        bound = "memory" if seconds == traffic.bytes / device.bandwidth else "compute"
        cells.append(f"{seconds * 1e3:.3f} ms {bound}")
    return "".join(f"{cell:>20}" for cell in cells)


def kept(cases: list[Case], results: dict[str, dict[str, Result]], device: Device | None) -> list[str]:
    """Return a line for each promise: met or missed with the number, or not measured.

    Args:
        cases: the cases.
        results: results by case and contestant.
        device: the current device's roofline, or None.
    """
    lines = []
    for case in cases:
        for promise in case.promises:
            number = ratio(case, promise, results.get(case.name, {}), device)
            bound = "at least" if promise.is_gain else "at most"
            what = (
                f"{case.name}: {promise.quantity} of {promise.measured} and {promise.beside}, {bound} {promise.limit:g}"
            )
            if number is None:
                lines.append(f"not measured  {what}")
            else:
                is_met = number >= promise.limit if promise.is_gain else number <= promise.limit
                lines.append(f"{'met' if is_met else 'MISSED':14}{what}: {number:.2f}")
    return lines


def ratio(case: Case, promise: Promise, results: dict[str, Result], device: Device | None) -> float | None:
    """Return a promise's ratio; None if not measured.

    Args:
        case: the case.
        promise: its promise.
        results: results by contestant.
        device: the current device's roofline, or None.
    """
    values = [_quantity(case, name, promise.quantity, results, device) for name in (promise.measured, promise.beside)]
    if not all(values):
        return None
    measured_value, beside = values
    assert measured_value is not None and beside is not None
    return beside / measured_value if promise.is_gain else measured_value / beside


def _quantity(case: Case, name: str, quantity: str, results: dict[str, Result], device: Device | None) -> float | None:
    if name == BOUND:
        traffic = moved(case)
        return None if device is None or traffic is None else device.seconds(traffic, case.precision)
    result = results.get(name, Result())
    return result.seconds if quantity == "time" else float(result.peak)


if __name__ == "__main__":
    main()
