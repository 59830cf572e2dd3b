"""Back-test the predictor of best rates on 1,911 public runs: ``python -m benchmarks.step_law dense_lr_bs_loss.csv``.

The file is ``data/dense_lr_bs_loss.csv`` of github.com/step-law/steplaw (Li et al. 2025, arXiv:2503.04715): language
models of 0.2 to 1.1 B parameters, each size at several learning rates, batches and numbers of tokens. Sizes with about
as many tokens a parameter (19, 53, 93) make a ladder, at each batch and at the best of all. On each ladder, the best
rate of every size from the fourth on is predicted from all smaller ones (`analysis.numbers.size_laws`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis.numbers.best_rates import Best, find_best, find_regret
from analysis.numbers.size_laws import fit_law
from benchmarks._machine import machine
from benchmarks._measuring import Promise

LADDERS = ((0, 30), (30, 70), (70, 110))  # tokens a parameter
FEWEST_RATES, FEWEST_SIZES = 4, 3
COVERAGE, REGRET = 0.75, 0.5  # at least; at most, per cent of the loss
Curve = tuple[float, pd.DataFrame, Best]


def ladders(runs: pd.DataFrame) -> Iterator[tuple[str, list[Curve]]]:
    """Yield each ladder's name and its sizes' parameters, losses and best rates."""
    for low, high in LADDERS:
        own = runs[(low < runs["D/N"]) & (runs["D/N"] <= high)]
        name = f"{own['D/N'].median():.0f} tokens a parameter"
        for batch, part in [("best of all", own), *own.groupby("bs")]:
            curves = []
            for parameters, each in part.groupby("N"):
                table = each.groupby("lr")["smooth loss"].min().to_frame(0)
                if len(table) >= FEWEST_RATES:
                    curves.append((float(parameters), table, find_best(table)))
            yield f"{name}, batch {batch}", curves


def back_tests(name: str, curves: list[Curve]) -> Iterator[dict[str, float | str | bool]]:
    """Yield a row for each size with at least three smaller ones, all with a known best rate."""
    for place in range(FEWEST_SIZES, len(curves)):
        smaller, (parameters, table, truth) = curves[:place], curves[place]
        if truth.open or any(best.open for *_, best in smaller):
            continue
        law = fit_law(
            [(each, 1.0, 1.0, 1.0) for each, *_ in smaller],
            [best.log_lr for *_, best in smaller],
            [best.error for *_, best in smaller],
            max(best.spacing for *_, best in smaller),
        )
        assert law is not None
        value, half = law.predict((parameters, 1.0, 1.0, 1.0))
        lowest = float(table[0].min())
        rates = {"law": value, "last": smaller[-1][2].log_lr, "first": smaller[0][2].log_lr}
        regrets = {rule: 100 * find_regret(table.index, table[0], rate) / lowest for rule, rate in rates.items()}
        error = value - truth.log_lr
        yield {
            "ladder": name,
            "sizes": place + 1,
            "error": error,
            "half": half,
            "inside": abs(error) <= half,
            **regrets,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="dense_lr_bs_loss.csv")
    runs = pd.read_csv(parser.parse_args().file)
    print(machine())
    found = pd.DataFrame([row for name, curves in ladders(runs) for row in back_tests(name, curves)])
    columns = f"{'error':>8}{'80 %':>7}{'inside':>8}{'law':>8}{'last':>8}{'first':>8}"
    print(f"regret in per cent of the loss\n{'':40}{columns}")
    for row in found.itertuples():
        said = "".join(f"{'--' if math.isnan(each) else f'{each:.2f}':>8}" for each in (row.law, row.last, row.first))
        print(f"{row.ladder:40}{row.error:>+8.2f}{row.half:>7.2f}{'yes' if row.inside else 'no':>8}{said}")
    means = found[["law", "last", "first"]].mean()
    print(f"mean{'':59}" + "".join(f"{each:>8.2f}" for each in means))
    coverage = float(found["inside"].mean())
    print(f"{len(found)} back-tests, {100 * coverage:.0f} % inside their 80 % intervals")
    print(Promise("share inside", coverage, COVERAGE, at_least=True))
    print(Promise("mean regret, per cent of the loss", float(means["law"]), REGRET))


if __name__ == "__main__":
    main()
