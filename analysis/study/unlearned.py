"""The loss of a model that has learned nothing: learning is measured from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study


@dataclass(frozen=True)
class Unlearned:
    """A loss without learning, and its terms.

    Attributes:
        nll: the loss, median over a series' runs; NaN if not recorded.
        name: the models that reach it, in the plural.
        nll_name: their loss.
    """

    nll: float
    name: str
    nll_name: str


def frequency_nll(runs: Frame) -> float:
    """Return the NLL of the targets' frequencies, median over runs; NaN if not recorded."""
    return float(runs["unigram_nll"].median())


@once_per_study
def unlearned(study: Study, series: str) -> Unlearned:
    """Return the loss of a series without learning.

    An NLL's is that of the targets' frequencies. A loss without a unit of nats has no such model: an untrained encoder
    of sentences is already better than equal embeddings by some losses, and worse by others. The lower one counts.
    """
    runs, words = study.of(series), wording.words(study)
    baseline = Unlearned(frequency_nll(runs), words.baseline, words.baseline_nll)
    start = float(runs["init_nll"].median())
    if words.in_nats or math.isnan(start) or start >= baseline.nll:
        return baseline
    return Unlearned(start, "the untrained models", "loss of the untrained models")
