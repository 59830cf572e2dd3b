"""Measure what a parametrization's factors add to a training step: ``python -m benchmarks.parametrizations``.

For each size three models take turns in one process, on the same batch: the standard one, the same under another
parametrization, and a second standard one, whose ratio to the first is the noise. A ratio is of the same turn. On a CPU
the seconds are those that the process computed, so that a machine that others use may be timed on.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks._machine import machine
from benchmarks._training import Size, interleaved, training

MOST = 1.02
SIZES = {"nano": Size(4, 64, 4, 64, 8), "1M": Size(5, 128, 4, 64, 8), "20M": Size(6, 512, 8, 64, 8)}
TURNS = {"nano": 400, "1M": 200, "20M": 20}


def measure(name: str, part: str, device: str) -> None:
    """Print one size's row.

    Args:
        name: the size's name.
        part: the parametrization.
        device: "cpu" or "cuda".
    """
    size = SIZES[name]
    base = {"base_width": size.width // size.heads} | ({"base_depth": 2} if part == "complete_p" else {})
    own = {"objective": "ar", "parametrization": {"name": part, **base}}
    trainings = {
        "standard": training({"objective": "ar"}, size, device),
        part: training(own, size, device),
        "again": training({"objective": "ar"}, size, device),
    }
    seconds = interleaved({key: each.step for key, each in trainings.items()}, TURNS[name], device)
    ratios = {
        key: statistics.quantiles([own / plain for own, plain in zip(seconds[key], seconds["standard"], strict=True)])
        for key in (part, "again")
    }
    cells = [f"{middle:>9.4f}{f'{low:.3f}-{high:.3f}':>14}" for low, middle, high in ratios.values()]
    milliseconds = 1e3 * statistics.median(seconds["standard"])
    met = "met" if ratios[part][1] <= MOST else "MISSED"
    print(f"{name:<6}{trainings[part].num_parameters:>12,}{milliseconds:>10.2f}{''.join(cells)}   {met}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parametrization", default="mup", choices=["layerwise", "mup", "complete_p"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    print(machine())
    titles = f"{'ms':>10}{arguments.parametrization:>9}{'quartiles':>14}{'again':>9}{'quartiles':>14}"
    print(f"{'size':<6}{'parameters':>12}{titles}   at most {MOST:g} × the standard step")
    for name in arguments.sizes:
        measure(name, arguments.parametrization, arguments.device)


if __name__ == "__main__":
    main()
