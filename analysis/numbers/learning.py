"""Measure learning beyond token frequencies, and judge whether a mechanism is trained.

Data differ in learnable nats. English bytes have 3.2 nats under their frequencies, and a small model soon gains 1. A
nucleotide has 1.386, and good models gain 0.03 to 0.16. No margin in nats fits both. The gain is the token-frequency
NLL minus the best NLL. A mechanism is trained if its gain is

- certain: at the best learning rate, the seeds' interval lies below the token-frequency NLL;
- at least 1 % of the token-frequency NLL: less is no model, however certain;
- at least a quarter of its setting's largest gain: less means staying behind others with the same data and steps.

Gains below 5 % of the token-frequency NLL are reported as little, besides any claim.

A loss that is no NLL (sentence pairs) is measured from `unlearned`, the lower one of baseline and untrained model. All
criteria are shares, and the last one compares only series with the same loss: a mean squared error of cosines and a
cross entropy have no common unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.numbers.spread import Mean
from analysis.numbers.windows import NOT_RUN, SeriesWindows, explain_absence, outcomes, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.study.reference import Unlearned, name_loss, unlearned
from analysis.words import join_words
from stability.runs.words import LEARNED_NOTHING, Words

LEAST_SHARE = 0.01
SHARE_OF_MOST = 0.25
LITTLE_SHARE = 0.05
MOST_NAMED = 3  # series with little learning in one short sentence
LEARNED_LITTLE = "learned too little"


@dataclass(frozen=True)
class Learned:
    """One series' learning, in the unit of its loss.

    Attributes:
        best_nll: median over seeds; ∞ if none.
        start: the loss without learning.
        worst_nll: upper end of the seeds' interval.
        words: the objective's terms.
    """

    best_nll: float
    start: Unlearned
    worst_nll: float
    words: Words

    @staticmethod
    def of(study: Study, found: SeriesWindows) -> Learned:
        start, words = unlearned(study, found.series), wording.words(study)
        if found.median is None:
            return Learned(math.inf, start, math.inf, words)
        at_best = outcomes(study, found.series).loc[found.median.best_lr]
        worst = Mean.of(at_best).high
        return Learned(found.median.best_nll, start, worst, words)

    @property
    def gain(self) -> float:
        """Loss without learning minus best NLL; NaN if the former is unknown."""
        return self.start.nll - self.best_nll

    @property
    def unit(self) -> str:
        """The unit of a gain, after a number; "" for a loss that is no NLL."""
        return " nats" if self.words.in_nats else ""

    @property
    def share(self) -> float:
        return self.gain / self.start.nll

    @property
    def is_little(self) -> bool:
        return self.share < LITTLE_SHARE

    def shortfall(self, most: float) -> str:
        """Say why too little was learned, "" if trained; ``most``: largest gain in the setting."""
        if math.isinf(self.best_nll):
            return "has no learning rate at which most of its runs finished"
        if math.isnan(self.start.nll):
            return f"cannot be said to have learned, the {self.start.nll_name} was not recorded"
        if not self.gain > 0:
            return f"is untrained: {self._place()}"
        if not self.worst_nll < self.start.nll:
            return (
                f"is untrained: {self._place()}, and its seeds do not rule out that this is chance "
                f"({'NLLs' if self.words.in_nats else 'losses'} up to {self.worst_nll:.3f})"
            )
        if self.share < LEAST_SHARE:
            return (
                f"is untrained: {self._place()}, where at least {LEAST_SHARE * self.start.nll:.3f} below is asked "
                "for (1 %)"
            )
        if self.gain < SHARE_OF_MOST * most:
            return (
                f"is untrained: {self._place()}, less than a quarter of the {most:.3f} that another mechanism learned"
            )
        return ""

    def _place(self) -> str:
        what = "validation NLL" if self.words.in_nats else self.words.nll
        where = f"{abs(self.gain):.3f}{self.unit} {'below' if self.gain >= 0 else 'above'}"
        return f"its best {what}, {self.best_nll:.3f}, lies {where} the {self.start.nll_name} of {self.start.nll:.3f}"


def most_learned(all_of_setting: list[Learned]) -> float:
    """Return the largest gain of series with the same loss; NaN if none is known."""
    return max((each.gain for each in all_of_setting if math.isfinite(each.gain)), default=math.nan)


def reasons_untrained(study: Study) -> dict[str, str]:
    """Return the reason for too little learning by series, "" if trained."""
    learned = {name: Learned.of(study, each) for name, each in windows(study).items()}
    losses = {name: name_loss(study, name) for name in learned}
    most = {loss: most_learned([learned[name] for name in learned if losses[name] == loss]) for loss in losses.values()}
    return {name: each.shortfall(most[losses[name]]) for name, each in learned.items()}


@once_per_study
def unlearned_words(study: Study) -> dict[str, str]:
    """Return by series "learned nothing" or "learned too little" in place of a window, "" for all others.

    Nothing: no better than the loss without learning at any rate. Too little: `reasons_untrained`, but better than
    that. A loss that is no NLL may be better by chance alone. "" also without a median NLL (`explain_absence`) or if
    the loss without learning is unknown.
    """
    found = {}
    for name, reason in reasons_untrained(study).items():
        median, start = windows(study)[name].median, unlearned(study, name).nll
        if not reason or median is None or math.isnan(start):
            found[name] = ""
        else:
            is_nothing = median.best_nll >= start or not wording.words(study).in_nats
            found[name] = LEARNED_NOTHING if is_nothing else LEARNED_LITTLE
    return found


def say_lacking(study: Study, lacking: Mapping[str, str] | Sequence[str]) -> str:
    """Say why series are not compared, e.g. "sa learned too little and sc is not run yet".

    Args:
        study: the study.
        lacking: series that learned too little or have no result; as a mapping, with their names in the sentence.
    """
    names = lacking if isinstance(lacking, Mapping) else {series: series for series in lacking}
    reasons: dict[str, list[str]] = {}
    for series, name in names.items():
        if windows(study)[series].median is None:
            reason = explain_absence(study.of(series))
        elif math.isnan((start := unlearned(study, series)).nll):
            reason = f"the {start.nll_name} was not recorded"
        else:
            reason = LEARNED_LITTLE
        reasons.setdefault(reason, []).append(name)
    said = []
    for reason, those in reasons.items():
        if reason == LEARNED_LITTLE:
            said.append(f"{join_words(those)} {reason}")
        elif reason == NOT_RUN:
            said.append(f"{join_words(those)} {'is' if len(those) == 1 else 'are'} {reason}")
        else:
            said.append(f"of {join_words(those)} {reason}")
    return join_words(said)


def say_little(study: Study) -> str:
    """Return a short sentence on the trained series with little learning, for the first page; "" if none."""
    lacking = reasons_untrained(study)
    trained = {name: Learned.of(study, each) for name, each in windows(study).items() if not lacking[name]}
    found = {name: each for name, each in trained.items() if each.is_little}
    if not found:
        return ""
    ends = dict.fromkeys(f"{100 * end(each.share for each in found.values()):.1f}" for end in (min, max))
    names = join_words(found) if len(found) <= MOST_NAMED else f"{len(found)} series"
    by, start = "" if len(found) == len(trained) else f" by {names}", next(iter(found.values())).start
    whole = "NLL" if wording.words(study).in_nats else "loss"
    return f"Little was learned beyond {start.name}{by}: {' to '.join(ends)} % of their {whole}."


def little(named: dict[str, Learned]) -> str:
    """Return a sentence on mechanisms with little learning, "" if none."""
    found = {name: each for name, each in named.items() if each.is_little}
    if not found:
        return ""
    gains = join_words(f"{name} {each.gain:.3f}{each.unit} ({100 * each.share:.1f} %)" for name, each in found.items())
    start = next(iter(found.values())).start
    return (
        f"Little was learned beyond {start.name}: {gains} below the {start.nll_name}. What is said of "
        "windows is said of models at that stage."
    )
