"""Find the first learning rate above a mechanism's best one at which a run fails, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.window_ends import exploded
from analysis.numbers.windows import Window, median_line, outcomes
from analysis.study.load import ENDED, Frame, Study
from analysis.study.reference import unlearned
from analysis.words import lr_text
from stability.runs.words import EXPLODED

# Ways to fail, by severity: of one run, of several
FAILURES = {
    "diverged": ("diverges", "diverge"),
    EXPLODED: ("explodes", "explode"),
    "learned nothing": ("learns nothing", "learn nothing"),
    "spiked": ("spikes", "spike"),
}
OR = " or "


@dataclass(frozen=True)
class Failure:
    """The first rate above the best one at which a run fails.

    Attributes:
        lr: that rate.
        kind: of `FAILURES`; several are joined by "or".
        runs: failed runs there.
        of: all runs with a result there.
        beyond: kind of the failures at larger rates, if every run fails there and here; else "".
    """

    lr: float
    kind: str
    runs: int
    of: int
    beyond: str

    @property
    def clause(self) -> str:
        """The failure in a sentence, e.g. "from 1e-1 on it diverges", "at 1e-1, 2 of 3 diverge"."""
        rate = lr_text(self.lr)
        one, several = _say(self.kind)
        if self.runs == self.of:
            if self.beyond == self.kind:
                return f"from {rate} on it {one}"
            return f"at {rate} it {one}{f', beyond it {_say(self.beyond)[0]}' if self.beyond else ''}"
        return f"at {rate}, {self.runs} of {self.of} {one if self.runs == 1 else several}"


def first_failure(study: Study, series: str, found: Window) -> Failure | None:
    """Return a series' first failing rate above its best one; None within the grid.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL.
    """
    failed, sizes = _failures_by_rate(study, series, found)
    first = next((lr for lr in failed if sum(failed[lr].values())), None)
    if first is None:
        return None
    sizes = {lr: size for lr, size in sizes.items() if lr >= first}
    is_all = len(sizes) > 1 and all(sum(failed[lr].values()) == size for lr, size in sizes.items())
    beyond = "" if not is_all else _kind([failed[lr] for lr in sizes if lr > first])
    return Failure(float(first), _kind([failed[first]]), sum(failed[first].values()), sizes[first], beyond)


def failure_at(study: Study, series: str, found: Window, lr: float) -> Failure:
    """Return the failures at one rate above the best one; of no run (``runs`` = 0) their kind is "".

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL.
        lr: the rate; at least one run has a result there.
    """
    failed, sizes = _failures_by_rate(study, series, found)
    return Failure(lr, _kind([failed[lr]]), sum(failed[lr].values()), sizes[lr], "")


def worse_failures(study: Study, series: str, found: Window) -> list[Failure]:
    """Return the failures beyond the first that are more severe than all at smaller rates, each at its first rate.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL.
    """
    failed, sizes = _failures_by_rate(study, series, found)
    worst, worse = len(FAILURES), []
    for lr, counts in failed.items():
        kinds = [place for place, kind in enumerate(FAILURES) if counts[kind]]
        if kinds and kinds[0] < worst:
            worst, kind = kinds[0], list(FAILURES)[kinds[0]]
            worse.append(Failure(float(lr), kind, counts[kind], sizes[lr], ""))
    return worse[1:]


def highest_exploded(study: Study, series: str) -> tuple[float, float] | None:
    """Return the learning rate and final NLL of a series' highest exploded run; None without any."""
    runs = study.of(series)
    runs = runs[exploded(runs)]
    if runs.empty:
        return None
    highest = runs.loc[runs["val_nll"].idxmax()]
    return float(highest["lr"]), float(highest["val_nll"])


def share_lost(study: Study, series: str, found: Window) -> tuple[float, float] | None:
    """Return the largest rate with a result, and the share of the learning lost there, by the median over seeds.

    Learning is measured from `unlearned`.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL.

    Returns:
        None if that rate is the best one, its median is not finite, or the loss without learning is unknown.
    """
    line = median_line(outcomes(study, series)).dropna()
    learned = unlearned(study, series).nll - found.best_nll
    lr, nll = float(line.index[-1]), float(line.iloc[-1])
    if lr <= found.best_lr or not math.isfinite(nll) or not learned > 0:
        return None
    return lr, (nll - found.best_nll) / learned


def _failures_by_rate(study: Study, series: str, found: Window) -> tuple[dict[float, dict[str, int]], dict[float, int]]:
    """Return by rate above the best one the failed runs by kind, and the number of runs with a result."""
    runs = study.of(series)
    ended = runs[runs["status"].isin(ENDED) & (runs["lr"] > found.best_lr)]
    parts = {float(lr): part for lr, part in ended.groupby("lr")}
    return {lr: _failures(part) for lr, part in parts.items()}, {lr: len(part) for lr, part in parts.items()}


def _kind(counts: Sequence[dict[str, int]]) -> str:
    """Return the kinds of failure, e.g. "exploded or learned nothing"."""
    return OR.join(kind for kind in FAILURES if any(each[kind] for each in counts))


def _say(kind: str) -> tuple[str, str]:
    """Return the verbs of a failure, of one run and of several."""
    one, several = zip(*(FAILURES[each] for each in kind.split(OR)), strict=True)
    return OR.join(one), OR.join(several)


def _failures(runs: Frame) -> dict[str, int]:
    """Count failed runs by kind; a run counts once, as the most severe of its kinds."""
    kinds = {
        "diverged": (runs["status"] == "diverged") | ~np.isfinite(runs["val_nll"]),
        EXPLODED: exploded(runs),
        "learned nothing": (runs["status"] == "plateaued") | (runs["val_nll"] >= runs["unigram_nll"]),
        "spiked": runs["status"] == "spiked",
    }
    counts, is_counted = {}, runs["status"].isna()
    for kind, has_failed in kinds.items():
        counts[kind] = int((has_failed & ~is_counted).sum())
        is_counted |= has_failed
    return counts
