"""Say which mechanism to choose, by the claims' own verdicts, and what breaks first as the rate grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.claims.claim import Claim
from analysis.claims.judging import judge
from analysis.claims.reference import BEST, COST, OWN, against_reference
from analysis.numbers.ablations import ablations
from analysis.numbers.first_failure import Failure, failure_at, highest_exploded, worse_failures
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.recall import Answered, answered, recalled_share
from analysis.numbers.window_ends import End, end_at, window_ends
from analysis.numbers.windows import KEPT, VALIDATION, Window, windows
from analysis.study.load import Study
from analysis.study.reference import compares_losses, references
from analysis.words import join_words, lr_text, plural, power, value_text
from stability.runs.words import EXPLODED

BEST_NLL, LOWEST, HIGHEST = f"{BEST} NLL", "Lowest NLL", "Highest"
UNDECIDED = "undecided against {}"
MOST_NAMED = 36  # characters of names in a list
MOST_REFERENCES = 2
MOST_VALUES = 5  # of one setting, in a title
PARTS = {"ffn": "feed-forward network", "position": "position encoding"}


def choose(study: Study, *, is_long: bool = False) -> list[str]:
    """Return which mechanism has the lowest NLL at its best rate, and which the widest own window.

    The verdicts are those of the comparisons with the reference (`claims.reference`). With two references, e.g. of two
    widths, each has its own sentences. [] with more, or if fewer than two series of a reference learned. Of recall, in
    place of both: which has the largest share of right answers.

    Args:
        study: the study.
        is_long: whether the rate that costs less than 5 % and, if measured side by side, the widest window's time of a
            step follow, if there is one reference.
    """
    lacking, plain = reasons_untrained(study), references(study)
    known = {name: each.median for name, each in windows(study).items() if each.median and not lacking[name]}
    of_reference = {reference: [name for name in known if plain.get(name) == reference] for reference in plain.values()}
    if len(of_reference) > MOST_REFERENCES or compares_losses(study):
        return []
    texts, is_long = [], is_long and len(of_reference) == 1
    for reference, others in of_reference.items():
        if reference in known and others:
            said = _choose_beside(study, reference, {name: known[name] for name in (reference, *others)}, is_long)
            among = f" beside {reference}"
            texts += [text.replace(":", f"{among}:", 1) for text in said] if len(of_reference) > 1 else said
    return texts


def _choose_beside(study: Study, reference: str, known: Mapping[str, Window], is_long: bool) -> list[str]:
    """Return the choice among a reference and the series compared with it.

    Args:
        study: the study.
        reference: its name.
        known: the windows of the reference and of these series.
        is_long: as of `choose`.
    """
    judged = judge(study)
    compared = against_reference(judged)
    nlls, widths = (
        {name: compared[name][quantity] for name in known if name != reference and quantity in compared.get(name, {})}
        for quantity in (BEST_NLL, OWN)
    )
    if not nlls:
        return []
    if share := recalled_share(study):
        claims = {name: claim for name in nlls if (claim := compared[name].get(f"{BEST} {share.name}"))}
        best = {name: answered(study)[name] for name in known}
        direct = _compare_directly(judged, "best", share.column)
        highest, why = _lead(reference, claims, lambda name: -best[name].best.median, ("higher", "lower"), direct)
        window = best[highest].window
        rate = lr_text(window.best_lr if window else known[highest].best_lr)
        upper = upper_edge(known[highest], best[highest]) if is_long else ""
        return [f"{HIGHEST} {share.name}: {highest} at {rate} ({why}){upper and '; ' + upper}."]
    direct = _compare_directly(judged, "best")
    lowest, why = _lead(reference, nlls, lambda name: known[name].best_nll, ("lower", "higher"), direct)
    upper = upper_edge(known[lowest]) if is_long else ""
    texts = [f"{LOWEST}: {lowest} at {lr_text(known[lowest].best_lr)} ({why}){upper and '; ' + upper}."]
    blind = set(study.runs.loc[study.runs["blind_to_order"] == 1, "series"]) - {reference}
    left_out = [name for name in widths if name in blind]  # the less a mechanism can learn, the wider its own window
    widths = {name: claim for name, claim in widths.items() if name not in blind}
    if study.runs["lr"].nunique() > 1 and widths:
        direct = _compare_directly(judged, "own")
        widest, why = _lead(reference, widths, lambda name: -known[name].width, ("wider", "narrower"), direct)
        timed = compared.get(widest, {}).get(COST)
        # by turns side by side: the runs' own clocks depend on what else the machine had to do
        cost = f"; {timed.difference} of {reference}" if is_long and timed is not None and timed.interval else ""
        texts.append(f"Widest own window: {widest} ({why}){cost}.")
    if study.runs["lr"].nunique() > 1 and left_out:
        texts.append(f"Hardly able to see order, hence not counted for the window: {_list(left_out)}.")
    return texts


def answer_setting(study: Study) -> str:
    """Return a title for a study of one named setting: whether its values lower the NLL or widen the own window.

    "" for any other study: of several settings, of numbers, of one rate, of mechanisms, or with a value that is not
    compared with the base.
    """
    groups = [(each.base, group) for each in ablations(study) for group in each.groups]
    if len(groups) != 1 or study.runs["lr"].nunique() == 1 or compares_losses(study):
        return ""
    (base, group), compared = groups[0], against_reference(judge(study))
    values = {column.series: column.text for column in group.columns if column.series != base}
    if group.numeric or {base, *values} != set(study.series) or not 0 < len(values) <= MOST_VALUES:
        return ""
    claims = [compared.get(name, {}).get(quantity) for name in values for quantity in (BEST_NLL, OWN)]
    if reasons_untrained(study)[base] or any(claim is None or claim.verdict == "not judged" for claim in claims):
        return ""
    part, before = PARTS.get(group.part or group.setting), value_text(group.base_value)
    if len(values) == 1:
        first, key = next(iter(values.values())), group.setting or group.part
        question = f"Does {f'the {part} {first}' if part else f'{key}={first}'} in place of {before}"
    else:
        question = f"Does another {part or group.heading} than {before}"
    said = [
        _say_verdicts({values[name]: compared[name][quantity] for name in values}, words)
        for quantity, words in ((BEST_NLL, ("lower", "higher")), (OWN, ("wider", "narrower")))
    ]
    is_equal = said[0] == said[1]
    answer = f"Both {said[0]}" if is_equal else f"NLL {said[0]}; own window {said[1]}"
    seeds = plural(study.runs["seed"].nunique(), "seed")
    return f"{question} lower the NLL or widen the stable window? {answer} ({seeds})"


def _say_verdicts(claims: Mapping[str, Claim], words: tuple[str, str]) -> str:
    """Return the verdicts on a setting's values, e.g. "higher with learned and none; undecided with hope".

    Args:
        claims: by value the claim that it is better than the base's.
        words: "better" and "worse" for this quantity.
    """
    found: dict[str, list[str]] = {}
    for value, claim in claims.items():
        word = {"holds": words[0], "contradicted": words[1]}.get(claim.verdict, "undecided")
        found.setdefault(word, []).append(value)
    if len(claims) == 1 or list(found) == ["undecided"]:
        return next(iter(found))
    return ", ".join(f"{word} with {join_words(found[word])}" for word in (*words, "undecided") if word in found)


def upper_edge(found: Window, answers: Answered | None = None) -> str:
    """Return the upper edge of an own window in words; "" if that is the best rate itself.

    Args:
        found: the window of the NLL.
        answers: of recall the share of right answers, whose window then counts.
    """
    what = "keeps half of the learning" if found.keeps_half else "costs < 5 %"
    if answers is not None and answers.window is not None:
        found, what = answers.window, f"keeps {100 * KEPT:g} % of the accuracy"
    if found.high.lr == found.best_lr:
        return ""
    whys = {"open": ", the largest swept,", "unmeasured": ", the last with a result,"}
    rate = power(found.high.lr) if found.high.kind == "interpolated" else lr_text(found.high.lr)
    return f"up to {rate}{whys.get(found.high.kind, '')} {what}"


def _compare_directly(claims: Sequence[Claim], kind: str, column: str = VALIDATION) -> dict[frozenset[str], Claim]:
    """Return the claims that compare two series by validation NLL or a share, by both names.

    Args:
        claims: all claims of the study.
        kind: first word of their test: "best" or "own".
        column: the compared number's.
    """
    return {
        frozenset(claim.test[2:]): claim
        for claim in claims
        if claim.test[:2] == (kind, column) and claim.verdict not in ("no claim", "not judged")
    }


def _lead(
    reference: str,
    claims: Mapping[str, Claim],
    order: Callable[[str], float],
    words: tuple[str, str],
    direct: Mapping[frozenset[str], Claim],
) -> tuple[str, str]:
    """Return the series in front and the verdicts that put it there, e.g. "undecided against sw; sc higher".

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
    elif front != reference and claims[front].verdict == "unresolved":
        told.append(f"grid too coarse against {reference}")
    elif others := [reference] if front != reference else undecided:
        told.append(UNDECIDED.format(_list(others)))
    if front not in better:
        for kind in ("supported", "indicated"):
            if beaten := [name for name, claim in worse.items() if _word(claim) == kind]:
                than = "" if front == reference else f" than {reference}"  # not compared with the one in front
                told.append(f"{_list(beaten)} {words[1]}{than}: {kind}")
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
    return front, "; ".join(told)


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
    """Return what ends each own window at its upper side, and the more severe failures beyond the first.

    The first failure is a column of the first page's table.

    Args:
        study: the study.
        series: the series to name.
    """
    ends, found = window_ends(study), windows(study)
    known = {name: each for name in series if name in ends and (each := found[name].median) is not None}
    if study.runs["lr"].nunique() == 1 or not known:
        return ""
    share, shown = recalled_share(study), {name: each.window for name, each in answered(study).items()}
    judged = {name: shown.get(name) or each for name, each in known.items()}
    which, worse_word = (
        (f"windows of {share.name}", f"a lower {share.name}") if share else ("own windows", "a higher NLL")
    )
    said = [f"{what} ({', '.join(parts)})" for what, parts in _by_outcome(study, judged, worse_word).items()]
    parts = [f"What ends the {which}, at the next rate swept: {'; '.join(said)}."] if said else []
    opened = [name for name, each in judged.items() if _upper_end(study, name, each).reason == "end of the grid"]
    parts += [f"Not ended within the rates swept: {_list(opened)}."] if opened else []
    failed: dict[str, list[str]] = {}
    for name, each in known.items():
        failed.setdefault(", ".join(_worse_failures(study, name, each)), []).append(name)
    worse = [f"{_list(names)} at {text}" for text, names in failed.items() if text]
    parts += [f"Worse at larger rates: {'; '.join(worse)}."] if worse else []
    return " ".join(parts)


def _upper_end(study: Study, series: str, found: Window) -> End:
    return end_at(study.of(series), found.high.outside_lr)


def _by_outcome(study: Study, known: Mapping[str, Window], worse: str) -> dict[str, list[str]]:
    """Return by the runs' outcome at the first rates above the windows these rates, each with its series.

    Args:
        study: the study.
        known: the windows by series.
        worse: what runs have that ended stable.
    """
    found: dict[str, dict[float, list[str]]] = {}
    for name, each in known.items():
        end = _upper_end(study, name, each)
        if end.of:
            outcome = _outcome(failure_at(study, name, each, end.lr), worse)
            found.setdefault(outcome, {}).setdefault(end.lr, []).append(name)
    return {
        outcome: [f"{_list(group)} at {lr_text(lr)}" for lr, group in sorted(rates.items())]
        for outcome, rates in found.items()
    }


def _outcome(failure: Failure, worse: str) -> str:
    """Return how runs at one rate failed, in the words of the first page's table, and how many only did ``worse``."""
    sound, of = failure.of - failure.runs, plural(failure.of, "run")
    if not failure.runs:
        return f"{sound} of {of} {'has' if sound == 1 else 'have'} {worse}"
    more = f", {sound} {'has' if sound == 1 else 'have'} {worse}" if sound else ""
    return f"{failure.runs} of {of} {failure.kind}{more}"


def _worse_failures(study: Study, series: str, found: Window) -> list[str]:
    return [_failure_text(study, series, each) for each in worse_failures(study, series, found)]


def _failure_text(study: Study, series: str, failure: Failure) -> str:
    """Return a failure's rate and runs; of exploded ones the series' highest NLL, too."""
    highest = highest_exploded(study, series) if EXPLODED in failure.kind else None
    level = "" if highest is None else f", NLL up to {_short(highest[1])} at {lr_text(highest[0])}"
    return f"{lr_text(failure.lr)} ({failure.runs} of {failure.of} {failure.kind}{level})"


def _short(nll: float) -> str:
    return f"{nll:.3g}" if nll < 1000 else power(nll)
