"""Train the same runs by several settings and compare loss curves and time: ``python -m benchmarks.training_pairs
[--groups impl,fla,precision,compile] [--device cuda] [--steps 200] [--smoke]``.

Each case has a plain run and variants of it, from the same weights on the same batches, by the product's own training
step; one after another, since precision is a setting of the whole process. A row is printed as soon as a variant ends:

- ms: median of the steps after the first tenth (compilers and autotuners run in the first); "of plain" is its ratio.
- first: difference of the first step's loss, before any update. largest, last: of the curves, |Δ| over all steps and
  its mean over the last quarter, in nats.
- agrees: variants that only round otherwise, if "largest" is at most three times that of the row "moved", which is the
  plain run with its weights moved by one unit in the last place; those that compute in bfloat16 or TF32, if "last" is
  at most 0.05 nats.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks._machine import machine
from benchmarks._training import Size, replica

NANO, TINY = Size(4, 64, 4, 64, 16), Size(1, 16, 2, 8, 2)
FACTOR, LEAST = 3.0, 1e-4  # of the moved run's difference, and where this is smaller
ROUNDED = 0.05  # nats
MOVED = "moved"
SC = {"name": "sc", "window": 2, "rank": 4, "edge_hidden": 16}


class Case(NamedTuple):
    """A plain run and its variants.

    Attributes:
        label: name in the table.
        parts: differences from a plain model with `sa`.
        variants: further differences by name.
        rounded: names of variants with products in bfloat16 or TF32.
        objective: causal mechanisms need "ar".
    """

    label: str
    parts: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    rounded: tuple[str, ...] = ()
    objective: str = "mlm"


def _of_mechanism(label: str, settings: dict[str, Any], impls: tuple[str, ...], **more: Any) -> Case:
    variants = {f"impl={impl}": {"mechanism": settings | {"impl": impl}} for impl in impls}
    rounded = tuple(f"impl={impl}" for impl in impls if impl == "fla")
    return Case(label, {"mechanism": settings}, variants, rounded, **more)


def _of_run(label: str, parts: dict[str, Any], variants: Mapping[str, Any], **more: Any) -> Case:
    return Case(label, parts, {name: parts | changes for name, changes in variants.items()}, **more)


def _precisions(label: str, parts: dict[str, Any]) -> Case:
    names = {f"precision={name}": {"precision": name} for name in ("tf32", "bf16")}
    return _of_run(label, parts, names, rounded=tuple(names))


def _compilers(label: str, parts: dict[str, Any]) -> Case:
    return _of_run(label, parts, {"cuda_graphs=true": {"cuda_graphs": True}, "compile=true": {"compile": True}})


TRITON, RECURRENT = ("triton",), ("gla", "retnet", "gated_deltanet", "kda")
GROUPS: dict[str, tuple[Case, ...]] = {
    "impl": (
        *(
            _of_mechanism(f"sc rope={rope}", SC | {"rope": rope}, TRITON)
            for rope in ("relative", "absolute", "gradient")
        ),
        _of_mechanism("sw", {"name": "sw"}, TRITON),
        _of_mechanism("longformer", {"name": "longformer"}, TRITON),
        _of_run("mhc", {"residual": "mhc"}, {"impl=triton": {"residual": {"name": "mhc", "impl": "triton"}}}),
        _of_run("loss", {}, {"impl=triton": {"objective": {"name": "mlm", "impl": "triton"}}}),
        _of_run("adamw", {}, {"impl=triton": {"optimizer": {"name": "adamw", "impl": "triton"}}}),
        *(_of_mechanism(name, {"name": name}, TRITON, objective="ar") for name in RECURRENT),
    ),
    "fla": tuple(_of_mechanism(name, {"name": name}, ("fla",), objective="ar") for name in RECURRENT),
    "precision": (_precisions("sa", {}), _precisions("sc", {"mechanism": SC})),
    "compile": (_compilers("sa", {}), _compilers("sc", {"mechanism": SC}), _compilers("mhc", {"residual": "mhc"})),
}
SMOKE = {"impl": ("sw",), "fla": (), "precision": ("sa",), "compile": ("sa",)}  # cases that --smoke runs


class Curve(NamedTuple):
    """A trained variant: the loss of each step, and its median seconds."""

    losses: list[float]
    seconds: float


def trained(parts: Mapping[str, Any], size: Size, steps: int, device: str, pool: Path, *, moved: bool = False) -> Curve:
    """Train one variant.

    Args:
        parts: its differences from a plain model.
        size: model and batch.
        steps: optimizer steps.
        device: "cpu" or "cuda".
        pool: folder of the prepared data.
        moved: whether the initial weights are moved by one unit in the last place.
    """
    run = replica(parts, size, steps, device, pool)
    if moved:
        with torch.no_grad():
            for parameter in run.parameters:
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    losses, seconds = [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        losses.append(run.train_step(step)["loss"])
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return Curve(losses, statistics.median(seconds[steps // 10 :]))


def distances(found: Curve, plain: Curve) -> tuple[float, float, float]:
    """Return the differences of two curves: at the first step, at most, on average in the last quarter."""
    apart = [abs(mine - other) for mine, other in zip(found.losses, plain.losses, strict=True)]
    return apart[0], max(apart), statistics.fmean(apart[-max(len(apart) // 4, 1) :])


def rows(case: Case, size: Size, steps: int, device: str, pool: Path) -> Iterator[str]:
    """Yield a row for each run of a case as it ends.

    Args:
        case: the case.
        size: model and batch.
        steps: optimizer steps.
        device: "cpu" or "cuda".
        pool: folder of the prepared data.
    """
    base = {"mechanism": "sa", "objective": case.objective}
    plain = trained(base | case.parts, size, steps, device, pool)
    yield f"{case.label:<22}{'plain':<20}{1e3 * plain.seconds:>9.2f}{'1.00':>10}{'':>30}{plain.losses[-1]:>9.3f}"
    moved = trained(base | case.parts, size, steps, device, pool, moved=True)
    _, limit, _ = distances(moved, plain)
    yield _row("", MOVED, moved, plain, "")
    for name, parts in case.variants.items():
        if device == "cpu" and parts.get("compile"):
            yield f"{'':<22}{name:<20}-- left out on a CPU, for which compiling takes minutes"
            continue
        try:
            found = trained(base | case.parts | parts, size, steps, device, pool)
        except Exception as error:  # noqa: BLE001 whatever a library raises ends this variant alone
            yield f"{'':<22}{name:<20}-- {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        _, largest, last = distances(found, plain)
        agrees = last <= ROUNDED if name in case.rounded else largest <= max(FACTOR * limit, LEAST)
        yield _row("", name, found, plain, "yes" if agrees else "NO")


def _row(label: str, name: str, found: Curve, plain: Curve, agrees: str) -> str:
    apart = "".join(f"{distance:>10.1e}" for distance in distances(found, plain))
    ratio = found.seconds / plain.seconds
    return f"{label:<22}{name:<20}{1e3 * found.seconds:>9.2f}{ratio:>10.2f}{apart}{found.losses[-1]:>9.3f}  {agrees}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="which, with commas between them")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--smoke", action="store_true", help="two steps of the smallest model and fewest cases")
    given = parser.parse_args()
    groups = given.groups.split(",")
    if unknown := [name for name in groups if name not in GROUPS]:
        parser.error(f"--groups: no {', '.join(unknown)}; choices: {', '.join(GROUPS)}")
    size, steps = (TINY, 2) if given.smoke else (NANO, given.steps)
    print(f"{torch.cuda.get_device_name() if given.device == 'cuda' else 'CPU'}; {machine()}")
    print(f"{steps} steps of {size.batch} × {size.positions} bytes, {size.layers} layers, width {size.width}\n")
    head = "".join(f"{name:>10}" for name in ("of plain", "first", "largest", "last"))
    print(f"{'case':<22}{'variant':<20}{'ms':>9}{head}{'loss':>9}  agrees", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for name in groups for case in GROUPS[name] if not given.smoke or case.label in SMOKE[name]):
            for row in rows(case, size, steps, given.device, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
