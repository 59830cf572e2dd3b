"""Say in three sentences what a study supports, what it leaves open, and what α_max adds."""

from __future__ import annotations

import math
from statistics import fmean

from analysis.claims import layers, quantization, signals
from analysis.claims.at_best_rate import say_best_nlls
from analysis.claims.claim import Claim, count_compared, count_corrected, sentence, verdict_words
from analysis.claims.judging import judge
from analysis.claims.reference import BEYOND, COMMON, OWN
from analysis.drawing.tables import limits
from analysis.numbers.at_best_rate import numbers_of
from analysis.numbers.common_windows import common_windows, rank_variants, shorten_variant
from analysis.numbers.early_measurements import has_early
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.recall import recalled_share
from analysis.sections.prediction import conclusion
from analysis.study.load import Study
from analysis.words import join_words, plural, power, significant

NAMED = 4  # claims in a sentence
AT_BEST = "At the best rates"  # begins the sentence on α_max, whose numbers the table has, too
UNDECIDED = "Undecided"  # begins the sentence that counts the open comparisons
OF_LOSS = (OWN, COMMON, BEYOND)  # comparisons by windows of the NLL: of recall 5 % of it are less than seeds differ by
DECIDED = {"holds": "supported", "contradicted": "not supported"}


def sentences(study: Study, most: int = NAMED) -> list[str]:
    """Return up to three sentences: what is supported, what is undecided, and what α_max adds.

    Before them the ranking of an ablation's variants, or what tells optimizers at rates of their own apart; after the
    first who is better at the rates that are too large for the reference, the verdicts on rounded weights, and which
    signals warn of a break.

    Args:
        study: the study.
        most: largest number of claims named in a sentence.
    """
    judged = [claim for claim in judge(study) if claim.statement]
    # a theorem that holds is no finding
    claims = [claim for claim in judged if claim.verdict != "not judged" and not layers.confirms_theorem(claim)]
    is_signal = {id(claim): claim.test[:1] == (signals.TEST,) for claim in claims}
    others = [claim for claim in claims if not is_signal[id(claim)] and claim.paper != quantization.PAPER]
    hidden = _count_by_loss(others) if recalled_share(study) else 0
    if share := recalled_share(study):
        others = [claim for claim in others if claim.about[0] not in OF_LOSS]
        others.sort(key=lambda claim: claim.test[1:2] != (share.column,))
    compared = _say_supported(others, most, count_corrected(claims), hidden)
    warned = _say_signals([claim for claim in claims if is_signal[id(claim)]])
    rounded = quantization.say_verdicts(judged)
    compared = compared or _say_apart(judged)
    optimizers = say_best_nlls(study) if study.is_in_multiples else ""  # at one rate for all, NLLs are read as usual
    beyond = "" if recalled_share(study) else _say_beyond(claims, compared)
    said = (
        _say_ranking(study),
        optimizers,
        compared,
        beyond,
        rounded,
        warned,
        _say_undecided(claims),
        _say_alpha(study),
    )
    return list(filter(None, said))


def _say_ranking(study: Study) -> str:
    """Return the variants of an ablation with the largest upper edges of the common window; "" for few."""
    ranked, found, lacking = rank_variants(study), common_windows(study), reasons_untrained(study)
    if len(ranked) <= NAMED:
        return ""
    medians = {name: found[name].median for name in ranked if not lacking[name]}
    edges = [(name, each) for name, each in medians.items() if each is not None and not each.is_empty]
    named = [f"{shorten_variant(study, name)} {'≥ ' * each.open_high}{power(each.high.lr)}" for name, each in edges]
    return f"{sentence(limits(study, study.series, '')[1])} up to {', '.join(named)}."


def _count_by_loss(claims: list[Claim]) -> int:
    return _number([claim for claim in claims if claim.about[0] in OF_LOSS and _is_decided(claim)])


def _is_decided(claim: Claim) -> bool:
    return claim.verdict in ("holds", "contradicted") and claim.n > 2


def _say_supported(claims: list[Claim], most: int, number: int, hidden: int = 0) -> str:
    """Say which comparisons are decided, at most ``most``; if none is, name the one nearest to a decision.

    Args:
        claims: the claims but those on signals.
        most: largest number of claims named.
        number: of comparisons that Holm's correction is for, those on signals included.
        hidden: number of decided ones that the appendix alone has.
    """
    apart = {claim.test or claim.statement: claim for claim in reversed(claims)}  # one for each comparison
    compared = [claim for claim in reversed(apart.values()) if claim.finding]
    decided = [claim for claim in compared if _is_decided(claim)]
    if decided:
        named = [_say_measured(claim) for claim in decided[:most]]
        left = len(decided) - len(named) + hidden
        more = f"; {left} more: appendix" if left else ""
        counts = sorted({claim.n for claim in decided[:most]})
        return f"Established (n = {join_words(map(str, counts))}): {'; '.join(named)}{more}."
    near = [claim for claim in compared if claim.about[1]]
    if not near:
        return ""
    nearest = min(near, key=_distance)
    corrected = f" after correction for {number} comparisons" if number > 1 else ""
    found = f"{_say_measured(nearest)}; {_lower(nearest)}"
    seeds = "With two seeds no" if nearest.n == 2 else "No"
    besides = " is established besides those of the NLL's windows" if hidden else " is established"
    return f"{seeds} difference between the mechanisms{besides}{corrected}. Nearest to it: {found}."


def _say_beyond(claims: list[Claim], compared: str) -> str:
    """Say which series learns most at the rates above its reference's window; "" if none learns more than that one.

    Args:
        claims: a study's judged claims.
        compared: the sentence before; "" is returned if it has the comparison.
    """
    lower = {fmean(claim.differences): claim for claim in claims if claim.about[0] == BEYOND and claim.n > 2}
    if not lower or min(lower) >= 0 or lower[min(lower)].finding in compared:
        return ""
    claim = lower[min(lower)]
    return sentence(f"{_say_measured(claim)}: {_lower(claim)}.")


def is_in_a_table(text: str) -> bool:
    """Return whether a sentence says no more than a table: α_max at the best rates, or an open comparison."""
    return text.startswith(AT_BEST) or (text.startswith("Above ") and ": undecided: " in text)


def _say_apart(claims: list[Claim]) -> str:
    """Say why series are not compared with their reference, of which one learned too little; "" if none is."""
    apart = [claim.text for claim in claims if claim.verdict == "not judged" and claim.about[1] and not claim.about[0]]
    more = f" {len(apart) - 1} more: appendix." if len(apart) > 1 else ""
    return f"{apart[0]}{more}" if apart else ""


def _say_signals(claims: list[Claim]) -> str:
    """Say which signals' leads before a break differ from the training loss's; "" without a decided one."""
    decided = [claim for claim in claims if claim.verdict in ("holds", "contradicted") and claim.n > 2]
    if not decided:
        return ""
    longer, shorter = (
        join_words(f"{claim.test[1]} ({claim.effect})" for claim in decided if claim.verdict == verdict)
        for verdict in ("holds", "contradicted")
    )
    first = f"Longer lead before a break than the training loss: {longer or 'no signal'}"
    last = f"; shorter: {shorter}" if shorter else ""
    counts = join_words(map(str, sorted({claim.n for claim in decided})))
    return f"{first}{last}. A break without warning counts as a lead of 0; all less the lead by chance (n = {counts})."


def _distance(claim: Claim) -> tuple[bool, float]:
    """Return a sort key: claims indicated by two seeds first, then by p-value."""
    return claim.verdict not in ("holds", "contradicted"), claim.p if math.isfinite(claim.p) else 2.0


def _say_measured(claim: Claim) -> str:
    """Return what was measured, the mean over seeds, with its interval before any correction.

    A finding against what a paper says is marked: the table of its claims has it as "Not supported".
    """
    is_against = claim.paper and claim.verdict == "contradicted"
    known = "; ".join(filter(None, (claim.interval, "against the paper's claim" if is_against else "")))
    return f"{claim.finding} ({known})" if known else claim.finding


def _lower(claim: Claim) -> str:
    words = verdict_words(claim)
    return words[0].lower() + words[1:]


def _say_undecided(claims: list[Claim]) -> str:
    """Count the open comparisons, and say what would decide them."""
    if not claims:
        return ""
    waiting = [claim for claim in claims if claim.test and claim.verdict in ("undecided", "unresolved", "no claim")]
    if not waiting:
        return ""
    apart = [claim for claim in claims if claim.paper and claim.n > 2 and not claim.finding]  # in no other sentence
    counts = {words: _number([claim for claim in apart if claim.verdict == each]) for each, words in DECIDED.items()}
    of_papers = join_words(f"{number} {words}" for words, number in counts.items() if number)
    last = f" Claims of papers: {of_papers}." if of_papers else ""
    coarse = [claim for claim in waiting if claim.verdict == "unresolved"]
    text = f"{UNDECIDED}: {count_compared(waiting)} of {plural(count_compared(claims), 'comparison')} (appendix)"
    if coarse:
        known = [claim.more_runs for claim in coarse if claim.more_runs is not None]
        runs = f": about {max(known)} more runs" if known else " searches between"
        text += f"; for {_number(coarse)} of them rates lie too far apart (lr=edge{runs})"
    # exact widths have differences by seed; without them no number of seeds decides
    bounded = [
        each for each in waiting if each.verdict == "undecided" and _is_of_windows(each) and not each.differences
    ]
    if bounded:
        text += f"; for {_number(bounded)} a window is open or ends at a divergence (other rates are needed)"
    indicated = _number([each for each in claims if each.verdict in ("holds", "contradicted") and each.n == 2])
    last = (f" Indicated by two seeds alone: {indicated}." if indicated else "") + last
    if len(coarse) + len(bounded) == len(waiting):
        return f"{text}.{last}"
    return f"{text}; {'the others' if coarse or bounded else 'they'} need more seeds.{last}"


def _is_of_windows(claim: Claim) -> bool:
    return claim.n > 1 and claim.test[:1] in (("own",), ("common",))


def _number(claims: list[Claim]) -> int:
    """Count comparisons: claims on the same one count once."""
    return len({claim.test or claim.statement for claim in claims})


def _say_alpha(study: Study) -> str:
    """Say whether α_max predicted the outcomes, else how far it lies above the best rates; "" if not measured."""
    lacking = reasons_untrained(study)
    trained = {name: name for name in study.series if not lacking[name]}
    known = {name: each.ratio.median for name, each in numbers_of(study, trained, {}).items() if each.ratio.n}
    if trained and has_early(study) and study.runs["lr"].nunique() > 1:
        return f"Does α_max tell early which runs fail, which rate is best, where the edge is? {conclusion(study)}"
    if not known:
        return ""
    low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    ends = [f"{significant(known[name])} ({name})" for name in dict.fromkeys((low, high))]
    is_one = len({text.partition(" (")[0] for text in ends}) < len(ends)
    range_text = f"about {significant(known[low])}" if is_one else " to ".join(ends)
    above = (
        "above 1, so a step at the best rate still lowers its batch's loss"
        if known[low] > 1
        else ("below 1 where a step at the best rate no longer lowers its batch's loss")
    )
    return f"{AT_BEST} α_max / α is {range_text}: {above}, to second order."
