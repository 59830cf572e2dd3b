"""Compute learning-rate sensitivity: what a mistuned learning rate costs on average over the sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis.numbers.spread import EXTREME, Spread
from analysis.study.load import FINISHED, Frame, Study


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of one series: ``by_seed`` in nats, ``spread`` over them, and how many learning rates it is a
    mean over (the fewest of the seeds)."""

    series: str
    by_seed: dict[int, float]
    spread: Spread
    num_rates: int


def sensitivity(study: Study, series: str) -> Sensitivity:
    """Return the mean over the swept rates of min(NLL, NLL at initialisation), less the best NLL of the sweep, in nats,
    seed by seed (Wortsman et al. 2024, arXiv:2309.14322, Section 3: E_η[min(ℓ(A(η)), ℓ₀) − ℓ*]).

    Every swept rate counts once, so that the number depends on the range that was swept: compare series of one study
    only. A diverged run counts as its initial NLL; a failed or unfinished one is no evidence and is left out. 0: every
    rate is as good as the best. A seed of which no run finished has no best, and no sensitivity.
    """
    by_seed, rates = {}, []
    for seed, runs in study.of(series).groupby("seed"):
        losses, finished = _capped(runs), runs[runs["status"].isin(FINISHED)]
        if np.isfinite(finished["val_nll"]).any():
            by_seed[int(seed)] = float(np.mean(losses) - np.min(losses))
            rates.append(len(losses))
    # Smallest and largest: no seed can lose more than its initial NLL lies above its best, and where some seeds
    # diverged at a rate and others did not there
    # are two clusters, for which an interval on logarithms ends far beyond what is possible.
    return Sensitivity(series, by_seed, Spread.of(by_seed.values(), EXTREME), min(rates, default=0))


def _capped(runs: Frame) -> list[float]:
    """Return min(NLL, initial NLL) of every run that says something."""
    known = runs[(runs["status"] == "diverged") | (runs["status"].isin(FINISHED))]
    pairs = zip(
        known["val_nll"].where(known["status"] != "diverged", math.inf).fillna(math.inf), known["init_nll"], strict=True
    )
    return [value for nll, init in pairs if math.isfinite(value := min(nll, init if math.isfinite(init) else math.inf))]
