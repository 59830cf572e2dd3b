"""Measure learning beyond token frequencies, and judge whether a mechanism is trained.

Data differ in learnable nats. English bytes have 3.2 nats under their frequencies, and a small model soon gains 1. A
nucleotide has 1.386, and good models gain 0.03 to 0.16. No margin in nats fits both. The gain is the token-frequency
NLL minus the best NLL. A mechanism is trained if its gain is

- certain: at the best learning rate, the seeds' interval lies below the token-frequency NLL;
- at least 1 % of the token-frequency NLL: less is no model, however certain;
- at least a quarter of its setting's largest gain: less means staying behind others with the same data and steps.

Gains below 5 % of the token-frequency NLL are reported as little, besides any claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.numbers.spread import Mean
from analysis.numbers.windows import SeriesWindows, outcomes, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.words import join_words
from stability.runs.words import Words

LEAST_SHARE = 0.01
SHARE_OF_MOST = 0.25
LITTLE_SHARE = 0.05


@dataclass(frozen=True)
class Learned:
    """One series' learning, in nats.

    Attributes:
        best_nll: median over seeds; ∞ if none.
        unigram_nll: token-frequency NLL.
        worst_nll: upper end of the seeds' interval.
        words: the objective's terms.
    """

    best_nll: float
    unigram_nll: float
    worst_nll: float
    words: Words

    @staticmethod
    def of(study: Study, found: SeriesWindows) -> Learned:
        unigram, words = float(study.of(found.series)["unigram_nll"].median()), wording.words(study)
        if found.median is None:
            return Learned(math.inf, unigram, math.inf, words)
        at_best = outcomes(study, found.series).loc[found.median.best_lr]
        worst = Mean.of(at_best).high
        return Learned(found.median.best_nll, unigram, worst, words)

    @property
    def gain(self) -> float:
        """Token-frequency NLL minus best NLL, in nats; NaN if the former is unknown."""
        return self.unigram_nll - self.best_nll

    @property
    def share(self) -> float:
        return self.gain / self.unigram_nll

    @property
    def is_little(self) -> bool:
        return self.share < LITTLE_SHARE

    def shortfall(self, most: float) -> str:
        """Say why too little was learned, "" if trained; ``most``: largest gain in the setting."""
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
    """Return the largest gain; NaN if none is known."""
    return max((each.gain for each in all_of_setting if math.isfinite(each.gain)), default=math.nan)


def reasons_untrained(study: Study) -> dict[str, str]:
    """Return the reason for too little learning by series, "" if trained."""
    learned = {name: Learned.of(study, each) for name, each in windows(study).items()}
    most = most_learned(list(learned.values()))
    return {name: each.shortfall(most) for name, each in learned.items()}


def little(named: dict[str, Learned]) -> str:
    """Return a sentence on mechanisms with little learning, "" if none."""
    found = {name: each for name, each in named.items() if each.is_little}
    if not found:
        return ""
    gains = join_words(f"{name} {each.gain:.3f} nats ({100 * each.share:.1f} %)" for name, each in found.items())
    words = next(iter(found.values())).words
    return (
        f"Little was learned beyond {words.baseline}: {gains} below the {words.baseline_nll}. What is said of "
        "windows is said of models at that stage."
    )
