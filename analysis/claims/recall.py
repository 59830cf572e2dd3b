"""Judge which mechanisms recall (`objective=recall`) where others do not, by the share of right answers at each one's
best learning rate, seed by seed.

A mechanism recalls where its share reaches `RECALLS` in the median over seeds, and does not where its median is below.
Where neither or both of a pair do, the statement does not hold, whatever their difference: a task that is too easy, or
too hard for the training that it got, tells nothing of the two. Otherwise the rules of `analysis.claims.judging`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from analysis.claims.claim import Claim
from analysis.claims.pairs import Measure, Pair
from analysis.claims.rivals import best_claim
from analysis.numbers.windows import compares_recall, shortfalls
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.naming import SETTING_AXES
from stability.runs.words import ShareWords

RECALLS = 0.9
# who recalls, and who does not; of each the name of the mechanism and of its variant in an ablation
RIVALS = (
    (("deltanet", ""), ("gla", ""), "deltanet recalls where gla does not (Yang et al. 2024, arXiv:2406.06484)"),
    (
        ("gated_deltanet", ""),
        ("gla", ""),
        "gated_deltanet recalls where gla does not (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464)",
    ),
    (("sa", ""), ("sw", ""), "Sliding-window attention fails past its window: sa recalls where sw does not"),
    (
        ("titans", ""),
        ("titans", "memory=none"),
        "Titans gains from its memory: it recalls where it does not without (Behrouz et al. 2024, arXiv:2501.00663)",
    ),
)


def claims(study: Study) -> list[Claim]:
    """Return the claims on every pair of `RIVALS` that the study holds; [] of another objective."""
    share = wording.words(study).share
    if not compares_recall(study) or share is None or share.column not in study.runs:
        return []
    return list(_claims(study, share))


def _claims(study: Study, share: ShareWords) -> Iterator[Claim]:
    """Yield the claim on every pair of series that differ in their mechanism, or its memory, alone."""
    measure = Measure(share.column, 1, share.name, ".3f", limit=1.0)
    alike = [axis for axis in SETTING_AXES if axis != "variant"]
    for _, group in study.runs.drop_duplicates("series").groupby(alike, sort=False, dropna=False):
        of = {
            (str(mechanism), str(variant)): str(series)
            for mechanism, variant, series in zip(group["mechanism"], group["variant"], group["series"], strict=True)
        }
        for other, plain, statement in RIVALS:
            if other in of and plain in of:
                pair = Pair(of[plain], of[other], (other[0], plain[0]))
                judged = best_claim(study, f"recall {pair.other} beside {pair.plain}", measure, pair, statement)
                yield _with_shares(judged, pair, {each: _best(study, each, share) for each in (of[other], of[plain])})


def _best(study: Study, series: str, share: ShareWords) -> float:
    """Return the median over seeds of each seed's best share; 0 of a seed whose runs all diverged."""
    best = -shortfalls(study, series, share.column).min(axis=0)
    return float(np.median(np.maximum(best.dropna(), 0.0))) if best.notna().any() else float("nan")


def _with_shares(claim: Claim, pair: Pair, best: Mapping[str, float]) -> Claim:
    """Return a claim with what each of the two recalls; "holds" only where the one does and the other does not."""
    does = {name: value >= RECALLS for name, value in best.items()}
    if claim.verdict != "holds" or does[pair.other] and not does[pair.plain]:
        return claim
    both = "Both recall" if does[pair.plain] else "Neither recalls"
    shares = " and ".join(f"{100 * best[name]:.1f} % of {name}" for name in (pair.other, pair.plain))
    text = (
        f"{claim.text} {both} {100 * RECALLS:.0f} % of the answers ({shares}), so that it is not told where one fails."
    )
    return replace(claim, verdict="undecided", text=text)
