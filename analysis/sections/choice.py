"""Say which mechanism to choose, by the claims' own verdicts, and what breaks first as the rate grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.claims.claim import Claim
from analysis.claims.judging import judge
from analysis.claims.reference import BEST, OWN, against_reference
from analysis.numbers.first_failure import Failure, first_failure, highest_exploded, share_lost, worse_failures
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.window_ends import End, window_ends
from analysis.numbers.windows import VALIDATION, Window, windows
from analysis.study.load import Study
from analysis.study.reference import compares_losses, references
from analysis.words import join_words, lr_text, plural, power
from stability.runs.words import EXPLODED

BEST_NLL = f"{BEST} NLL"
UNDECIDED = "undecided against {}"
MOST_NAMED = 36  # characters of names in a list


def choose(study: Study) -> list[str]:
    """Return which mechanism has the lowest NLL at its best rate, and which the widest own window.

    The verdicts are those of the comparisons with the reference (`claims.reference`). [] if the series have more than
    one reference, or fewer than two of them learned.
    """
    lacking, plain = reasons_untrained(study), references(study)
    names = [name for name in study.series if not lacking[name] and (name in plain or name in plain.values())]
    found = {name: each.median for name, each in windows(study).items() if name in names}
    known = {name: each for name, each in found.items() if each is not None}
    if len(set(plain.values())) != 1 or len(known) < 2 or compares_losses(study):
        return []
    reference = next(iter(plain.values()))
    judged = judge(study)
    compared = against_reference(judged)
    nlls, widths = (
        {name: compared[name][quantity] for name in known if quantity in compared.get(name, {})}
        for quantity in (BEST_NLL, OWN)
    )
    if reference not in known or not nlls:
        return []
    direct = _compare_directly(judged, "best")
    lowest = _lead(reference, nlls, lambda name: known[name].best_nll, ("lower", "higher"), direct)
    lowest = lowest.replace(" (", f" at {lr_text(known[lowest.partition(' (')[0]].best_lr)} (", 1)
    if study.runs["lr"].nunique() == 1 or not widths:
        return [f"Lowest NLL: {lowest}."]
    direct = _compare_directly(judged, "own")
    widest = _lead(reference, widths, lambda name: -known[name].width, ("wider", "narrower"), direct)
    return [f"Lowest NLL: {lowest}.", f"Widest own window: {widest}."]


def _compare_directly(claims: Sequence[Claim], kind: str) -> dict[frozenset[str], Claim]:
    """Return the claims that compare two series by validation NLL, by both names.

    Args:
        claims: all claims of the study.
        kind: first word of their test: "best" or "own".
    """
    return {
        frozenset(claim.test[2:]): claim
        for claim in claims
        if claim.test[:2] == (kind, VALIDATION) and claim.verdict not in ("no claim", "not judged")
    }


def _lead(
    reference: str,
    claims: Mapping[str, Claim],
    order: Callable[[str], float],
    words: tuple[str, str],
    direct: Mapping[frozenset[str], Claim],
) -> str:
    """Return the series in front with the verdicts that put it there, e.g. "sa (undecided against sw; sc higher)".

    Args:
        reference: the series that all others are compared with.
        claims: for each other series the claim that it is better than the reference.
        order: sorts the series, the best one first.
        words: "better" and "worse" for this quantity.
        direct: claims on two series other than the reference, by both names.
    """
    better, worse = (
        {name: claim for name, claim in claims.items() if claim.verdict == verdict}
        for verdict in ("holds", "contradicted")
    )
    undecided = [name for name in claims if name not in better and name not in worse]
    front = min(better or [reference, *undecided], key=order)
    told = []
    if front in better:
        told.append(f"{words[0]} than {reference}: {_word(better[front])}")
    elif others := [reference] if front != reference else undecided:
        told.append(UNDECIDED.format(_list(others)))
    if front not in better:
        for kind in ("supported", "indicated"):
            if beaten := [name for name, claim in worse.items() if _word(claim) == kind]:
                told.append(f"{_list(beaten)} {words[1]}: {kind}")
    apart = [name for name in claims if name != front and name not in worse] if front != reference else []
    ahead = [name for name in apart if order(name) < order(front)]
    if ahead:
        told.append(f"{_list(ahead)} {words[0]} in the median: undecided against {reference}")
    beside = {name: claim for name in apart if name not in ahead and (claim := direct.get(frozenset({front, name})))}
    groups: dict[str, list[str]] = {}
    for name, claim in beside.items():
        groups.setdefault(_order_pair(claim, front, words), []).append(name)
    if told and told[0] == UNDECIDED.format(reference):  # one clause for both
        told[0] = UNDECIDED.format(_list([reference, *groups.pop(UNDECIDED, [])]))
    told += [text.format(_list(names)) for text, names in groups.items()]
    if rest := [name for name in apart if name not in ahead and name not in beside]:
        told.append(f"not compared with {_list(rest)}")
    return f"{front} ({'; '.join(told)})"


def _order_pair(claim: Claim, front: str, words: tuple[str, str]) -> str:
    """Return what a claim on two series says of the one that is not in front, with a field for its name."""
    if claim.verdict not in ("holds", "contradicted"):
        return UNDECIDED
    is_behind = (claim.test[2] == front) is (claim.verdict == "holds")
    return f"{{}} {words[is_behind]}: {_word(claim)}"


def _word(claim: Claim) -> str:
    return "supported" if claim.n > 2 else "indicated"


def _list(names: Sequence[str]) -> str:
    return join_words(names) if len(" ".join(names)) <= MOST_NAMED else f"{len(names)} series"


def breaks(study: Study, series: Sequence[str]) -> str:
    """Return what ends each own window at its upper side, and the first rate at which a run fails.

    Args:
        study: the study.
        series: the series to name.
    """
    ends, found = window_ends(study), windows(study)
    known = {name: each for name in series if name in ends and (each := found[name].median) is not None}
    if study.runs["lr"].nunique() == 1 or not known:
        return ""
    said = [f"where {what} ({', '.join(parts)})" for what, parts in _by_outcome(ends, list(known)).items()]
    opened = [name for name in known if ends[name][1].reason == "end of the grid"]
    beyond = f"within the rates swept ({_list(opened)})"
    said += [f"not {beyond}"] if opened and said else []
    parts = [f"Own windows end {'; '.join(said)}."] if said else [f"No own window ends {beyond}."] if opened else []
    failed: dict[str, list[str]] = {}
    for name, each in known.items():
        failed.setdefault(", ".join(_failures(study, name, each)), []).append(name)
    never = [_unfailed(study, name, known[name]) for name in failed.pop("", [])]
    first = [f"{_list(names)} at {text}" for text, names in failed.items()]
    parts += [f"First to fail: {'; '.join(first)}."] if first else []
    parts += [f"Without a failure: {', '.join(never)}."] if never else []
    return " ".join(parts)


def _by_outcome(ends: Mapping[str, tuple[End, End]], names: Sequence[str]) -> dict[str, list[str]]:
    """Return by the runs' outcome at the first rates above the windows these rates, each with its series."""
    found: dict[str, dict[float, list[str]]] = {}
    for end, name in ((ends[name][1], name) for name in names):
        if end.of:
            is_or_are = "is" if end.runs == 1 else "are"
            what = f"{is_or_are} stable with a higher NLL" if end.reason == "slow" else end.reason
            outcome = f"{end.runs} of {plural(end.of, 'run')} {what}"
            found.setdefault(outcome, {}).setdefault(end.lr, []).append(name)
    return {
        outcome: [f"{_list(group)} at {lr_text(lr)}" for lr, group in sorted(rates.items())]
        for outcome, rates in found.items()
    }


def _failures(study: Study, series: str, found: Window) -> list[str]:
    """Return the first failure above the best rate, then each more severe one; [] if no run fails."""
    first = first_failure(study, series, found)
    if first is None:
        return []
    return [_failure_text(study, series, each) for each in (first, *worse_failures(study, series, found))]


def _failure_text(study: Study, series: str, failure: Failure) -> str:
    """Return a failure's rate and runs; of exploded ones the series' highest NLL, too."""
    highest = highest_exploded(study, series) if EXPLODED in failure.kind else None
    level = "" if highest is None else f", NLL up to {_short(highest[1])} at {lr_text(highest[0])}"
    return f"{lr_text(failure.lr)} ({failure.runs} of {failure.of} {failure.kind}{level})"


def _short(nll: float) -> str:
    return f"{nll:.3g}" if nll < 1000 else power(nll)


def _unfailed(study: Study, series: str, found: Window) -> str:
    lost = share_lost(study, series, found)
    return series if lost is None else f"{series} ({100 * lost[1]:.0f} % of the learning lost at {lr_text(lost[0])})"
