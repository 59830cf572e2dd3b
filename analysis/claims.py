"""From the numbers to sentences: does the paper's claim hold in this study?

The claims of papers/000 (5.1, 5.2): sc's stable window is wider than sa's, mix's lies between, and at high learning rates more of sc's
recorded steps are stable. Rules that keep the sentences honest:

- A mechanism that did not learn is "untrained" (`learning` says what that takes); nothing is claimed about it. One that learned little is named.
- One seed: no claim. Two: "indications", and only where both seeds agree. Three or more: "results", and only where the Student-t 95 %
  interval of the paired differences excludes 0.
- An open window is a lower bound; see `compare` for what that leaves undecided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from analysis import recipe, rivals
from analysis.claim import Claim, Verdict
from analysis.compare import Comparison, compare_stable_steps, compare_windows
from analysis.learning import Learned, little, most_learned
from analysis.load import FINISHED, Study
from analysis.spread import count_range, listed, lr_text, plural
from analysis.stability_window import TOLERANCE, SeriesWindows, windows
from analysis.tables import width_text

WINDOW_CLAIM = "the paper's claim, a wider stable window of sc than of sa,"
STATE_WORDS = {"checkpoint": "from the runs' own optimizer state", "paper": "in the paper's literal protocol"}


@dataclass(frozen=True)
class Side:
    """One mechanism of one setting: its windows, what it learned, and why that is too little to speak about ("" where it is not)."""

    mechanism: str
    series: str
    found: SeriesWindows
    learned: Learned
    shortfall: str

    @property
    def trained(self) -> bool:
        return not self.shortfall


def paragraph(study: Study) -> str:
    """All sentences in one."""
    return " ".join(claim.text for claim in judge(study))


def judge(study: Study) -> tuple[Claim, ...]:
    """The claims of every setting (optimizer, residual, … where they vary; of an ablation the base), then what limits them: missing runs, and the scale."""
    found, claims = windows(study), []
    for setting in sorted(set(study.runs.loc[study.runs["variant"] == "", "setting"])):
        names = set(study.runs.loc[study.runs["setting"] == setting, "series"])
        sides = _sides(study, [found[name] for name in study.series if name in names])
        if rivals.another_question(study):
            continue  # than the consensus paper's
        prefix = f"Setting {setting}: " if setting else ""
        claims += [replace(claim, text=prefix + claim.text) for claim in _judge_setting(study, sides)]
    claims += _rival_claims(study, found)
    return tuple(replace(claim, text=recipe.worded(study, claim.text)) for claim in (*claims, *_coverage(study), _scale(study)))


def _rival_claims(study: Study, found: dict[str, SeriesWindows]) -> list[Claim]:
    """Of schemes beside the plain one, in a study that has both; a scheme's seeds are judged as a mechanism's are."""
    if not (rivals.compares_residuals(study) or rivals.compares_mechanisms(study)):
        return []
    learned = {name: Learned.of(study, each) for name, each in found.items()}
    most = most_learned(list(learned.values()))
    shortfalls = {name: each.shortfall(most) for name, each in learned.items()}
    return [Claim(subject, cast(Verdict, verdict), text) for subject, verdict, text in rivals.sentences(study, found, shortfalls)]


def _sides(study: Study, found: list[SeriesWindows]) -> dict[str, Side]:
    learned = [Learned.of(study, each) for each in found]
    most = most_learned(learned)
    sides = [Side(str(study.of(a.series)["mechanism"].iloc[0]), a.series, a, b, b.shortfall(most)) for a, b in zip(found, learned, strict=True)]
    return {side.mechanism: side for side in sides}


def _judge_setting(study: Study, sides: dict[str, Side]) -> list[Claim]:
    claims = [Claim(f"trained {name}", "not judged", f"{name} {side.shortfall}: no claim is made about it.") for name, side in sides.items() if side.shortfall]
    absent = [name for name in ("sa", "sc") if name not in sides]
    if absent:
        return [*claims, Claim("window", "not judged", f"The study has no {listed(absent)} runs: {WINDOW_CLAIM} cannot be judged.")]
    if not (sides["sa"].trained and sides["sc"].trained):
        return [*claims, Claim("window", "not judged", f"{_sentence(WINDOW_CLAIM)} cannot be judged here.")]
    claims.append(_window_claim(sides["sc"], sides["sa"]))
    if "mix" not in sides:
        claims.append(Claim("mix", "not judged", "The study has no mix runs: whether its window lies between cannot be judged."))
    elif sides["mix"].trained:
        claims.append(_mix_claim(sides["mix"], sides["sa"], sides["sc"]))
    return [*claims, *_limits({name: side for name, side in sides.items() if side.trained}), *_steps_claims(study, sides["sc"], sides["sa"])]


def _limits(trained: dict[str, Side]) -> list[Claim]:
    """What a reader must know of windows of mechanisms that learned little."""
    claims = [Claim("little learned", "no claim", text)] if (text := little({name: side.learned for name, side in trained.items()})) else []
    lenient = {name: side.found.median for name, side in trained.items() if side.found.median is not None and side.found.median.is_lenient}
    if lenient:
        places = listed(f"{name}'s admits NLLs up to {each.threshold_nll:.3f}, half is lost at {each.half_nll:.3f}" for name, each in lenient.items())
        text = (
            f"Within {100 * TOLERANCE:.0f} % of the best NLL there are rates that lost more than half of what was learned beyond token frequencies ({places}): "
            "part of such a window's width comes from how little there was to lose."
        )
        claims.append(Claim("lenient windows", "no claim", text))
    return claims


def _window_claim(sc: Side, sa: Side) -> Claim:
    result = compare_windows(sc.found, sa.found)
    numbers = _widths(sc, sa)
    if result.n < 2:
        return Claim("window", "no claim", f"{_too_few(result.n)} on {WINDOW_CLAIM} is made; {numbers}.")
    if result.n >= 3:
        numbers += f"; 95 % interval of the paired difference {_bounds(result)} decades"
    if result.direction == 0:
        text = f"Whether sc's stable window is wider than sa's stays undecided: {result.why_undecided} ({numbers})."
        return Claim("window", "undecided", text)
    relation, verdict, stance = ("wider", "holds", "as") if result.direction > 0 else ("narrower", "contradicted", "unlike what")
    text = f"{_weight(result.n)} that sc's stable window is {relation} than sa's{_within(result)}, {stance} the paper claims ({numbers})."
    return Claim("window", verdict, text + _open_note(result, sc, sa))


def _mix_claim(mix: Side, sa: Side, sc: Side) -> Claim:
    above = {"sa": compare_windows(mix.found, sa.found), "sc": compare_windows(mix.found, sc.found)}
    n, numbers = min(result.n for result in above.values()), _widths(mix)
    if n < 2:
        return Claim("mix", "no claim", f"{_too_few(n)} on whether mix's window lies between is made; {numbers}.")
    directions = {result.direction for result in above.values()}
    if 0 in directions:
        return Claim("mix", "undecided", f"Whether mix's window lies between stays undecided: {_half_known(above)} ({numbers}).")
    within = _within(*above.values())
    if directions == {1, -1}:
        return Claim("mix", "holds", f"{_weight(n)} that mix's window lies between the two{within} ({numbers}).")
    relation = "wider" if directions == {1} else "narrower"
    return Claim("mix", "contradicted", f"{_weight(n)} that mix's window is {relation} than both{within}, not between them ({numbers}).")


def _half_known(above: dict[str, Comparison]) -> str:
    known = {name: "wider" if result.direction > 0 else "narrower" for name, result in above.items() if result.direction}
    if not known:
        return "it cannot be told from either"
    [(name, relation)] = known.items()
    return f"it is {relation} than {name}'s but cannot be told from {'sc' if name == 'sa' else 'sa'}'s"


def _steps_claims(study: Study, sc: Side, sa: Side) -> list[Claim]:
    """% stable at the highest rates, one claim per state: the run's own state first, it is the one that describes the training."""
    rows = study.curvature[study.curvature["phase"] == "terminal"]
    states = sorted(set(rows["state"]), key=lambda state: (state != "checkpoint", state))
    if not states:
        return [Claim("stable steps", "not judged", "No α_max was measured at terminal checkpoints: the share of stable steps cannot be judged.")]
    return [_steps_claim(study, state, sc, sa) for state in states]


def _steps_claim(study: Study, state: str, sc: Side, sa: Side) -> Claim:
    subject, how = f"stable steps {state}", STATE_WORDS.get(state, f"in state {state}")
    shares = compare_stable_steps(study, sc.series, sa.series, state)
    if shares is None:
        text = f"{_sentence(how)}, sc and sa share no learning rate with recorded steps: the share of stable steps cannot be judged."
        return Claim(subject, "not judged", text)
    result, where = shares.result, f"at the highest learning rate{'s' * (len(shares.lrs) > 1)} ({listed(map(lr_text, shares.lrs))})"
    numbers = f"sc {shares.first:.0f} %, sa {shares.second:.0f} %"
    if result.n < 2:
        return Claim(subject, "no claim", f"{_too_few(result.n)} on the share of stable steps {where}, {how}, is made; measured: {numbers}.")
    if result.n >= 3:
        numbers += f"; 95 % interval of the paired difference {_signed(result.interval[0], 0)} to {_signed(result.interval[1], 0)} points"
    if result.direction == 0:
        return Claim(subject, "undecided", f"{_sentence(how)}, the shares of stable steps {where} cannot be told apart ({numbers}).")
    relation, verdict, stance = ("more", "holds", "as") if result.direction > 0 else ("fewer", "contradicted", "unlike what")
    text = f"{_weight(result.n)} that sc has {relation} stable steps than sa {where}, {how} ({numbers}), {stance} the paper claims."
    return Claim(subject, verdict, text)


def _coverage(study: Study) -> list[Claim]:
    """What a reader must know of runs that are no results; nothing where all are."""
    counts = study.runs["status"].value_counts()
    missing = [f"{counts[status]} {status}" for status in ("failed", "running", "interrupted", "queued") if status in counts]
    if not missing:
        return []
    text = f"Of {plural(len(study.runs), 'run')}, {listed(missing)}: these are no results, and a window next to one counts as open."
    return [Claim("coverage", "not judged", text)]


def _scale(study: Study) -> Claim:
    finished = study.runs[study.runs["status"].isin(FINISHED)]
    runs = finished if len(finished) else study.runs
    text = (
        f"All this is at {count_range(runs['num_params'])} parameters, {count_range(runs['num_steps'])} steps and {count_range(runs['num_tokens'])} "
        f"tokens per run, {plural(study.runs['seed'].nunique(), 'seed')}; {rivals.scale_of_the_papers(study)}."
    )
    return Claim("scale", "not judged", text)


def _weight(n: int) -> str:
    """How firmly n ≥ 2 seeds let one speak."""
    return f"There are indications ({n} seeds)" if n < 3 else f"The results ({n} seeds) show"


def _too_few(n: int) -> str:
    return "A single run each: no claim" if n == 1 else "No seed has results of both: no claim"


def _widths(*sides: Side) -> str:
    """``measured: sc 1.32 decades, single seeds 1.25–1.40; sa …``: of the median line's window, and the range of the seeds'."""
    parts = []
    for side in sides:
        assert side.found.median is not None, "an untrained mechanism has no widths"
        widths = side.found.seed_widths
        spread = f", single seeds {min(widths):.2f}–{max(widths):.2f}" if len(widths) > 1 else ""
        parts.append(f"{side.mechanism} {width_text(side.found.median).replace('≥', 'at least')} decades{spread}")
    return f"measured: {'; '.join(parts)}"


def _within(*results: Comparison) -> str:
    return " within the swept range" if any(result.scope == "range" for result in results) else ""


def _open_note(result: Comparison, *sides: Side) -> str:
    """A window that reaches the end of the sweep was not seen to end there."""
    opened = []
    for side in sides:
        assert side.found.median is not None
        ends = [end for end, is_open in (("low", side.found.median.open_low), ("high", side.found.median.open_high)) if is_open]
        opened += [f"{side.mechanism}'s at the {listed(ends)} end{'s' * (len(ends) > 1)}"] if ends else []
    if not opened:
        return ""
    caveat = "" if result.scope == "whole" else ", and beyond the sweep the order may be another"
    return f" Open windows are lower bounds ({listed(opened)}){caveat}."


def _bounds(result: Comparison) -> str:
    low, high = result.interval
    if math.isinf(low) and math.isinf(high):
        return "unbounded"
    if math.isinf(high):
        return f"at least {_signed(low)}"
    return f"at most {_signed(high)}" if math.isinf(low) else f"{_signed(low)} to {_signed(high)}"


def _signed(value: float, digits: int = 2) -> str:
    """+0.46, −0.07: with a real minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
