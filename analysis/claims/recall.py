"""Judge associative recall (`objective=recall`): whether one mechanism succeeds and another fails.

The measure is the share answered correctly at each mechanism's best learning rate, seed by seed. A mechanism recalls if
its median share over seeds is at least `RECALLS`. If both or neither recall, the claim is undecided at any difference:
the task was too easy, or too hard for this training. Other rules as in `analysis.claims.judging`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from analysis.claims.claim import Claim, word_claim
from analysis.claims.pairs import Measure, Pair
from analysis.claims.rivals import best_claim
from analysis.numbers.windows import compares_recall, shortfalls
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.naming import SETTING_AXES
from stability.runs.words import ShareWords

RECALLS = 0.9
# (mechanism, variant) expected to recall, (mechanism, variant) expected to fail, statement, paper
RIVALS = (
    (("deltanet", ""), ("gla", ""), "deltanet recalls where gla does not", "Yang et al. 2024, arXiv:2406.06484"),
    (
        ("gated_deltanet", ""),
        ("gla", ""),
        "gated_deltanet recalls where gla does not",
        "Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464",
    ),
    (
        ("sa", ""),
        ("sw", ""),
        "Sliding-window attention fails past its window: sa recalls where sw does not",
        "Arora et al. 2023",
    ),
    (
        ("titans", ""),
        ("titans", "memory=none"),
        "Titans gains from its memory: it recalls where it does not without",
        "Behrouz et al. 2024, arXiv:2501.00663",
    ),
)


def claims(study: Study) -> list[Claim]:
    """Return the claims on every pair in `RIVALS` present in the study.

    [] for other objectives.
    """
    share = wording.words(study).share
    if not compares_recall(study) or share is None or share.column not in study.runs:
        return []
    return list(_claims(study, share))


def _claims(study: Study, share: ShareWords) -> Iterator[Claim]:
    """Yield a claim for each pair of series differing in mechanism or its memory alone."""
    measure = Measure(share.column, 1, share.name, ".1f", limit=1.0, is_share=True)
    alike = [axis for axis in SETTING_AXES if axis != "variant"]
    for _, group in study.runs.drop_duplicates("series").groupby(alike, sort=False, dropna=False):
        of = {
            (str(mechanism), str(variant)): str(series)
            for mechanism, variant, series in zip(group["mechanism"], group["variant"], group["series"], strict=True)
        }
        for other, plain, statement, paper in RIVALS:
            if other in of and plain in of:
                pair = Pair(of[plain], of[other], (other[0], plain[0]))
                subject = f"recall {pair.other} beside {pair.plain}"
                judged = best_claim(study, subject, measure, pair, statement, paper=paper)
                yield _add_shares(judged, pair, {each: _best(study, each, share) for each in (of[other], of[plain])})


def _best(study: Study, series: str, share: ShareWords) -> float:
    """Return the median over seeds of each seed's best share. A seed with diverged runs only has 0."""
    best = -shortfalls(study, series, share.column).min(axis=0)
    return float(np.median(np.maximum(best.dropna(), 0.0))) if best.notna().any() else float("nan")


def _add_shares(claim: Claim, pair: Pair, best: Mapping[str, float]) -> Claim:
    """Return a claim with both recalled shares. "holds" only if one recalls and the other does not."""
    does = {name: value >= RECALLS for name, value in best.items()}
    if claim.verdict != "holds" or does[pair.other] and not does[pair.plain]:
        return claim
    both = "Both recall" if does[pair.plain] else "Neither recalls"
    shares = " and ".join(f"{100 * best[name]:.1f} % of {name}" for name in (pair.other, pair.plain))
    note = f"{claim.note} {both} {100 * RECALLS:.0f} % of the answers ({shares}): the task does not separate them."
    return word_claim(replace(claim, verdict="undecided", note=note, differences=()))
