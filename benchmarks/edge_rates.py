"""Draw learning rates around each curve's edge: ``python -m benchmarks.edge_rates STUDY… --name NAME --words WORDS``.

A study that asks whether a measurement foretells which runs break must not be answered by the rate alone. So each
curve (mechanism × optimizer) gets rates of its own, drawn log-uniformly within ``--decades`` of its edge. The edge is
the geometric mean of the two neighbouring rates between which its runs begin to break
(`analysis.numbers.early_measurements.breaks`, the report's own rule). The given studies are coarse ranges over the same
curves.

Prints one ``python -m stability.sweep`` command per curve, all of one study ``NAME``, each with ``WORDS``.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.numbers.early_measurements import breaks
from analysis.study.load import Study, load


def list_edges(study: Study) -> Iterator[tuple[str, str, float, float]]:
    """Yield each curve's mechanism, optimizer, largest unbroken rate and the broken rate above it.

    Raises:
        ValueError: a curve has no edge inside the rates swept.
    """
    runs = study.runs.merge(breaks(study), left_on="run_id", right_index=True)
    for (mechanism, optimizer), curve in runs.groupby(["mechanism", "optimizer"], sort=False):
        share = curve.groupby("lr")["broke"].mean()
        broken = share.index[share >= 0.5]
        below = share.index[share.index < broken.min()] if len(broken) else pd.Index([])
        if not len(below):
            raise ValueError(f"{study.name}: {mechanism} with {optimizer} has no edge between two of its rates")
        yield str(mechanism), str(optimizer), float(below.max()), float(broken.min())


def draw_rates(edge: float, decades: float, num: int, generator: np.random.Generator) -> list[float]:
    """Return ``num`` distinct rates of three digits, ascending, log-uniform within ``decades`` of ``edge``.

    Raises:
        ValueError: 100 draws a rate do not yield as many distinct ones.
    """
    draws = edge * 10 ** generator.uniform(-decades, decades, 100 * num)
    found = list(dict.fromkeys(float(f"{each:.3g}") for each in draws))[:num]
    if len(found) < num:
        raise ValueError(f"{num} distinct rates of three digits do not lie within {decades:g} decades of {edge:g}")
    return sorted(found)


def main() -> None:
    """Print the commands of the study around the edges of the given studies' curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="+", help="folders of finished coarse studies")
    parser.add_argument("--name", required=True, help="name of the new study")
    parser.add_argument("--decades", type=float, default=0.3, help="how far from its edge a curve's rates lie")
    parser.add_argument("--num", type=int, default=6, help="rates of each curve")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--words", default="", help="further words of each command, e.g. 'study=edge_prediction'")
    asked = parser.parse_args()
    generator = np.random.default_rng(asked.seed)
    for mechanism, optimizer, low, high in (edge for folder in asked.studies for edge in list_edges(load(folder))):
        rates = draw_rates((low * high) ** 0.5, asked.decades, asked.num, generator)
        print(f"# {mechanism} {optimizer}: breaks between {low:g} and {high:g}")
        words = [*shlex.split(asked.words), f"mechanism={mechanism}", f"optimizer={optimizer}", "lr=values"]
        words += [f"lr.values=[{','.join(f'{rate:g}' for rate in rates)}]", f"name={asked.name}"]
        print(shlex.join(["python", "-m", "stability.sweep", *words]))


if __name__ == "__main__":
    main()
