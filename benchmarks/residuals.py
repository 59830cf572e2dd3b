"""Measure the throughput of training with each residual scheme over that of the plain residual, side by side in one
process: ``python -m benchmarks.residuals``.

A step is forward, backward, gradient clipping and AdamW on the project's own causal model with `sa`, float32. The
schemes take turns, so that what else the machine does hits all alike; a ratio is of each turn, the table shows their
median and quartiles. ``--device cuda`` times on a GPU.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks._machine import machine
from benchmarks._training import Size, interleaved, training

SCHEMES = ("identity", "hc", "mhc", "mhc_lite")


SIZES = {
    "nano": Size(4, 64, 4, 64, 8),
    "width 256": Size(4, 256, 8, 256, 2),
    "gpt_s / 4": Size(6, 512, 8, 256, 1),
    "gpt_s": Size(6, 512, 8, 1024, 16),
}
DEFAULT = ("nano", "width 256", "gpt_s / 4")  # gpt_s itself is for a GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="turns per size (default 25)")
    parser.add_argument("--sizes", nargs="+", default=list(DEFAULT), choices=list(SIZES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} thread(s)",
        machine(),
        sep="; ",
    )
    print(
        f"{'size':<11}{'tokens/step':>12}  "
        f"{'residual':<10}{'parameters':>11}{'ms/step':>9}{'tokens/s':>10}{'/ identity':>11}{'quartiles':>12}"
    )
    for name in arguments.sizes:
        size = SIZES[name]
        trainings = {
            scheme: training({"residual": scheme, "objective": "ar"}, size, arguments.device) for scheme in SCHEMES
        }
        times = interleaved(
            {scheme: each.step for scheme, each in trainings.items()}, arguments.repeats, arguments.device
        )
        tokens = size.batch * size.positions
        for scheme in SCHEMES:
            ratios = [base / mine for mine, base in zip(times[scheme], times["identity"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            step_s = statistics.median(times[scheme])
            line = (
                f"{name:<11}{tokens:>12,}  "
                f"{scheme:<10}{trainings[scheme].num_parameters:>11,}{1e3 * step_s:>9.1f}{tokens / step_s:>10,.0f}"
            )
            print(f"{line}{middle:>11.2f}{f'{low:.2f}-{high:.2f}':>12}", flush=True)


if __name__ == "__main__":
    main()
