"""Find the first learning rate above a mechanism's best one at which a run fails, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.numbers.windows import Window
from analysis.study.load import FINISHED, Frame, Study
from analysis.words import lr_text

# Ways to fail, by severity: of one run, of several
FAILURES = {
    "diverged": ("diverges", "diverge"),
    "exploded": ("explodes", "explode"),
    "idle": ("learns nothing", "learn nothing"),
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
        """The failure in a sentence, e.g. "from 1e-1 on it diverges", "at 1e-1 2 of 3 runs diverge"."""
        rate = lr_text(self.lr)
        one, several = _say(self.kind)
        if self.runs == self.of:
            if self.beyond == self.kind:
                return f"from {rate} on it {one}"
            return f"at {rate} it {one}{f', beyond it {_say(self.beyond)[0]}' if self.beyond else ''}"
        return f"at {rate} {self.runs} of {self.of} runs {one if self.runs == 1 else several}"


def first_failure(study: Study, series: str, found: Window) -> Failure | None:
    """Return a series' first failing rate above its best one; None within the grid.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL.
    """
    runs = study.of(series)
    ended = runs[runs["status"].isin((*FINISHED, "diverged")) & (runs["lr"] > found.best_lr)]
    failed = {lr: _failures(part) for lr, part in ended.groupby("lr")}
    first = next((lr for lr in failed if sum(failed[lr].values())), None)
    if first is None:
        return None
    sizes = {lr: len(part) for lr, part in ended.groupby("lr") if lr >= first}
    is_all = len(sizes) > 1 and all(sum(failed[lr].values()) == size for lr, size in sizes.items())
    beyond = "" if not is_all else _kind([failed[lr] for lr in sizes if lr > first])
    return Failure(float(first), _kind([failed[first]]), sum(failed[first].values()), sizes[first], beyond)


def _kind(counts: Sequence[dict[str, int]]) -> str:
    """Return the kinds of failure, e.g. "exploded or idle"."""
    return OR.join(kind for kind in FAILURES if any(each[kind] for each in counts))


def _say(kind: str) -> tuple[str, str]:
    """Return the verbs of a failure, of one run and of several."""
    one, several = zip(*(FAILURES[each] for each in kind.split(OR)), strict=True)
    return OR.join(one), OR.join(several)


def _failures(runs: Frame) -> dict[str, int]:
    """Count failed runs by kind: not finite, above the untrained model's NLL, no better than token frequencies."""
    diverged = (runs["status"] == "diverged") | ~np.isfinite(runs["val_nll"])
    exploded = ~diverged & (runs["val_nll"] > runs["init_nll"])
    idle = ~diverged & ~exploded & ((runs["status"] == "plateaued") | (runs["val_nll"] >= runs["unigram_nll"]))
    return {"diverged": int(diverged.sum()), "exploded": int(exploded.sum()), "idle": int(idle.sum())}
