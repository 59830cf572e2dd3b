"""Find the share answered correctly by each mechanism of a study of associative recall, and its windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.numbers.spread import Spread
from analysis.numbers.windows import Window, compares_recall, share_windows
from analysis.study import wording
from analysis.study.load import HAS_RESULT, Study
from analysis.study.once import once_per_study
from stability.runs.words import ShareWords


@dataclass(frozen=True)
class Answered:
    """One series' share of right answers.

    Attributes:
        best: at the rate of the best median, over the seeds that finished.
        window: the rates that keep `analysis.numbers.windows.KEPT` of the best median; None without a share.
    """

    best: Spread
    window: Window | None


@once_per_study
def recalled_share(study: Study) -> ShareWords | None:
    """Return the words of the share that answers a study of recall, or None.

    None of other objectives, and if no run ended with a share. A mechanism that recalls has a loss of nearly 0, and
    5 % of that are less than seeds differ by: the first page then answers by the share.
    """
    share = wording.words(study).share
    if not compares_recall(study) or share is None or share.column not in study.runs:
        return None
    ended = study.runs.loc[study.runs["status"].isin(HAS_RESULT), share.column]
    return share if np.isfinite(ended).any() else None


@once_per_study
def answered(study: Study) -> dict[str, Answered]:
    """Return each series' best share and its window, in the study's order; {} without `recalled_share`."""
    share = recalled_share(study)
    if share is None:
        return {}
    found = {}
    for name, each in share_windows(study, share.column).items():
        runs, window = study.of(name), each.median
        at_best = runs["status"].isin(HAS_RESULT) & (runs["lr"] == (window.best_lr if window else None))
        found[name] = Answered(Spread.of(runs.loc[at_best, share.column]), window)
    return found
