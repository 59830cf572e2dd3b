"""Measure what a mechanism learned beyond token frequencies, and whether that is enough to speak about it.

Data differ in what there is to learn: a byte of English holds 3.2 nats under its frequencies and a small model soon
spares 1 of them; a nucleotide holds 1.386, and good models spare 0.03 to 0.16. A margin in nats fits one of the two. So
a mechanism counts as trained where its gain, the nats by which its best NLL lies below the token-frequency NLL, is

- certain: the seeds' interval at its best learning rate lies below the token-frequency NLL;
- at least 1 % of the token-frequency NLL: less is no model of anything, however certain;
- at least a quarter of the largest gain of its setting: a mechanism that stayed behind where others learned from the
  same data in the same steps.

A gain below 5 % of the token-frequency NLL is said to be little, whatever is claimed besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.numbers.spread import Spread
from analysis.numbers.windows import SeriesWindows, outcomes, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import listed
from stability.runs.words import Words

LEAST_SHARE = 0.01
SHARE_OF_MOST = 0.25
LITTLE_SHARE = 0.05


@dataclass(frozen=True)
class Learned:
    """The learning of one series, in nats: its best NLL (median over seeds; ∞: none), the token-frequency NLL, and the
    worst that its seeds' interval leaves possible; ``words``: what its objective calls these."""

    best_nll: float
    unigram_nll: float
    worst_nll: float
    words: Words

    @staticmethod
    def of(study: Study, found: SeriesWindows) -> Learned:
        unigram, words = float(study.of(found.series)["unigram_nll"].median()), wording.words(study)
        if found.median is None:
            return Learned(math.inf, unigram, math.inf, words)
        worst = Spread.of(outcomes(study, found.series).loc[found.median.best_lr]).high
        return Learned(found.median.best_nll, unigram, worst, words)

    @property
    def gain(self) -> float:
        """The nats between the token-frequency NLL and the best NLL; NaN where the former is not known."""
        return self.unigram_nll - self.best_nll

    @property
    def share(self) -> float:
        return self.gain / self.unigram_nll

    @property
    def is_little(self) -> bool:
        return self.share < LITTLE_SHARE

    def shortfall(self, most: float) -> str:
        """Say why what was learned is too little to speak about, "" where it is not. ``most``: the largest gain of the
        setting."""
        if math.isinf(self.best_nll):
            return "has no learning rate at which most of its runs finished"
        if math.isnan(self.unigram_nll):
            return f"cannot be said to have learned, the {self.words.baseline_nll} was not recorded"
        if not self.gain > 0:
            return f"is untrained: {self._place()}"
        if not self.worst_nll < self.unigram_nll:
            return (
                f"is untrained: {self._place()}, and its seeds do not rule out that this is chance (NLLs up to "
                f"{self.worst_nll:.3f})"
            )
        if self.share < LEAST_SHARE:
            return (
                f"is untrained: {self._place()}, where at least {LEAST_SHARE * self.unigram_nll:.3f} below is asked "
                "for (1 %)"
            )
        if self.gain < SHARE_OF_MOST * most:
            return (
                f"is untrained: {self._place()}, less than a quarter of the {most:.3f} that another mechanism learned"
            )
        return ""

    def _place(self) -> str:
        where = f"{self.gain:.3f} nats below" if self.gain >= 0 else f"{-self.gain:.3f} nats above"
        return (
            f"its best validation NLL, {self.best_nll:.3f}, lies {where} the {self.words.baseline_nll} of "
            f"{self.unigram_nll:.3f}"
        )


def most_learned(all_of_setting: list[Learned]) -> float:
    """Return the largest gain; NaN where none is known."""
    return max((each.gain for each in all_of_setting if math.isfinite(each.gain)), default=math.nan)


def why_untrained(study: Study) -> dict[str, str]:
    """Return by series of a study why it learned too little to speak about, "" where it did not."""
    learned = {name: Learned.of(study, each) for name, each in windows(study).items()}
    most = most_learned(list(learned.values()))
    return {name: each.shortfall(most) for name, each in learned.items()}


def little(named: dict[str, Learned]) -> str:
    """Return a sentence on the mechanisms that learned little, "" where there is none."""
    found = {name: each for name, each in named.items() if each.is_little}
    if not found:
        return ""
    gains = listed(f"{name} {each.gain:.3f} nats ({100 * each.share:.1f} %)" for name, each in found.items())
    words = next(iter(found.values())).words
    return (
        f"Little was learned beyond {words.baseline}: {gains} below the {words.baseline_nll}. What is said of "
        "windows is said of models at that stage."
    )
