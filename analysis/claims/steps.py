"""Judge the consensus paper's claims on α_max (section 5.2.1).

At high learning rates sc has the largest median α_max and the largest share of stable steps among all mechanisms, at
terminal checkpoints (Tables 5 to 7) and at earliest ones (Table 8). A run with suboptimal loss has a median α_max below
its rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from analysis.claims.claim import (
    CONSENSUS,
    Claim,
    Verdict,
    interval_text,
    judge_interval,
    sentence,
    signed,
    word_claim,
)
from analysis.claims.windows import Side
from analysis.numbers.spread import p_of_share, share_interval
from analysis.numbers.step_comparison import Medians, StepShares, compare_medians, compare_stable_steps, highest_lrs
from analysis.numbers.step_shares import (
    DIVERGED,
    EARLIEST,
    MEASURED,
    PHASES,
    TERMINAL,
    count_stable_steps,
    phases_and_states,
)
from analysis.study.load import ENDED, Frame, Study
from analysis.study.protocol import state_text
from analysis.words import join_words, lr_text, plural, power

P_DIGITS = 9  # of p-values that are compared; further ones are rounding
STATE_WORDS = {"checkpoint": "from the runs' own optimizer state", "paper": "from the paper's warm-up state"}
LEADER = "sc"
Found = tuple[str, StepShares | Medians]


def steps_claims(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return two claims per phase and state, for trained or entirely diverged mechanisms.

    Entirely diverged ones count as 0 % stable. The run's own state comes first, because it describes the training.
    """
    pairs = [pair for pair in phases_and_states(study) if pair[0] in (TERMINAL, EARLIEST)]
    others = [side for name, side in sides.items() if name != LEADER and (side.trained or side.only_diverged)]
    if not pairs:
        why = "No α_max was measured at terminal checkpoints: the share of stable steps cannot be judged."
        return [Claim("stable steps", "not judged", why, paper=CONSENSUS)]
    pairs.sort(key=lambda pair: (pair[0] != TERMINAL, pair[1] != "checkpoint", pair[1]))
    return [claim for phase, state in pairs for claim in _judge_state(study, phase, state, sides[LEADER], others)]


def _judge_state(study: Study, phase: str, state: str, leader: Side, others: Sequence[Side]) -> list[Claim]:
    """Return the claims on sc's % stable and median α_max in one phase and state.

    "not judged" if some mechanism has nothing to compare.
    """
    where = f"at {PHASES[phase]}s, {STATE_WORDS.get(state, f'in state {state}')}"
    tail = f"{state}{'' if phase == TERMINAL else f' {phase}'}"
    lrs = highest_lrs(study, [side.series for side in (leader, *others)], state, phase)
    claims = []
    for kind, compare in (("stable steps", compare_stable_steps), ("median α_max", compare_medians)):
        what = "share of stable steps" if kind == "stable steps" else kind
        largest = "% stable" if kind == "stable steps" else kind
        statement = f"{LEADER} has the largest {largest} of all ({phase}, {state_text(state)})"
        results = {
            side.name: compare(study, leader.series, side.series, state, phase, lrs) if lrs else None for side in others
        }
        found = [(name, result) for name, result in results.items() if result is not None]
        if len(found) < len(others) or not found:
            lacking = [side for side in others if results[side.name] is None]
            text = (
                f"{sentence(where)}, {_explain_absence(study, leader, lacking, lrs, state, phase)}: who has the "
                f"largest {what} cannot be judged."
            )
            claims.append(Claim(f"{kind} {tail}", "not judged", text, statement, paper=CONSENSUS))
        else:
            claims.append(_largest(f"{kind} {tail}", what, where, lrs, found, statement, leader.series))
    return claims


def _explain_absence(
    study: Study, leader: Side, lacking: Sequence[Side], lrs: Sequence[float], state: str, phase: str
) -> str:
    """Say why no comparison exists: no common rate, no complete seed, or divergences alone."""
    names = f"{leader.name} and {join_words(side.name for side in lacking)}"
    if not lrs:
        return f"{names} share no learning rate with results of a seed of both"
    rates = f"at the highest learning rate{'s' * (len(lrs) > 1)} that all have ({join_words(map(lr_text, lrs))})"
    count = count_stable_steps(study, phase, state)
    there = count[count["series"].isin([leader.series, *(side.series for side in lacking)]) & count["run_lr"].isin(lrs)]
    if (there["outcome"] == DIVERGED).all():
        return f"every run of {names} diverged {rates}, which leaves no α_max to compare"
    return (
        f"no seed of {names} has results that can be compared at each "
        f"{rates.removeprefix('at ').replace('the highest', 'of the highest', 1)}"
    )


def _largest(
    subject: str, what: str, where: str, lrs: Sequence[float], found: Sequence[Found], statement: str, series: str
) -> Claim:
    """Judge whether sc's value exceeds every other's, each by its own interval.

    All must hold, so this is as strict as a single test.
    """
    n = min(each.result.n for _, each in found)
    rates = f"at the highest learning rate{'s' * (len(lrs) > 1)} that all have ({join_words(map(lr_text, lrs))})"
    ahead = [(name, each) for name, each in found if each.result.direction < 0]
    open_ = [(name, each) for name, each in found if each.result.direction == 0]
    # the interval that decides: one ahead is enough against the claim, one open is enough to leave it undecided
    closest, nearest = _deciding(ahead or open_ or found, is_least_certain=not ahead)
    numbers = _numbers(found)
    of_n = "" if nearest.result.n == n else f" of {plural(nearest.result.n, 'seed')}"
    p_values = [each.result.p for _, each in found]
    p_value = min(1.0, len(found) * min(p_values)) if ahead else max(p_values)  # one ahead is enough against it
    verdict: Verdict = "no claim" if n < 2 else "contradicted" if ahead else "undecided" if open_ else "holds"
    finding = f"{LEADER} has the largest {what} {rates}, {where}: {numbers}"
    if ahead:
        larger = f"{'has' if len(ahead) == 1 else 'have'} a larger {what} than {LEADER}"
        finding = f"{join_words(name for name, _ in ahead)} {larger} {rates}, {where}: {numbers}"
    elif open_:
        finding = f"{what} {rates}, {where}: {numbers}; {LEADER} not apart from {join_words(name for name, _ in open_)}"
    return word_claim(
        Claim(
            subject,
            verdict,
            statement=statement,
            n=n,
            effect=numbers,
            interval=f"{_interval(nearest)} beyond {closest}{of_n}" if n > 1 else "",
            paper=CONSENSUS,
            finding=finding,
            note=_notes(found),
            difference=_difference(nearest),
            test=(subject, series),
            p=math.nan if any(map(math.isnan, p_values)) else p_value,
            differences=_hardest(open_ or found),
        )
    )


def _deciding(found: Sequence[Found], *, is_least_certain: bool) -> Found:
    """Return the comparison on which the verdict depends: the largest p-value, else the smallest one.

    Without p-values, of fewer than three seeds, or where they are equal, it is the one with the smallest lead.
    """
    p_values = [round(each.result.p, P_DIGITS) for _, each in found]
    if not any(map(math.isnan, p_values)):
        place = max if is_least_certain else min
        found = [pair for pair, p in zip(found, p_values, strict=True) if p == place(p_values)]
    return min(found, key=lambda pair: (_effect(pair[1]), pair[1].result.interval[0]))


def _effect(each: StepShares | Medians) -> float:
    """Return the leader's lead, in points or decades. ∞ over a series without median or with 0.

    A series lacks a median if all its runs diverged.
    """
    if isinstance(each, StepShares):
        return each.first - each.second
    first, second = (math.log10(value) if value > 0 else -math.inf for value in (each.first, each.second))
    return 0.0 if first == second else first - second


def _difference(each: StepShares | Medians) -> str:
    """Return the mean paired lead with its unit; "" if some seed has a bound only."""
    known = each.differences
    if not known or not all(map(math.isfinite, known)):
        return ""
    mean = math.fsum(known) / len(known)
    return f"{signed(mean, 0)} points" if isinstance(each, StepShares) else f"{signed(mean, 1)} decades"


def _hardest(found: Sequence[Found]) -> tuple[float, ...]:
    """Return the differences with the mean closest to 0 in units of their spread; these need the most seeds."""
    known = [each.differences for _, each in found if each.differences and all(map(math.isfinite, each.differences))]
    return min(known, key=_distance) if len(known) == len(found) else ()


def _distance(values: Sequence[float]) -> float:
    """Return the distance of a mean from 0, in standard deviations."""
    mean, spread = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return abs(mean) / spread if spread else math.inf if mean else 0.0


def _numbers(found: Sequence[Found]) -> str:
    """Return every mechanism's number as text, e.g. ``"sc 85 %, sa 15 %, mix 40 %"``."""
    first = found[0][1]
    if isinstance(first, StepShares):
        return ", ".join([f"{LEADER} {first.first:.0f} %", *(f"{name} {each.second:.0f} %" for name, each in found)])
    return ", ".join([f"{LEADER} {power(first.first)}", *(f"{name} {power(each.second)}" for name, each in found)])


def _interval(each: StepShares | Medians) -> str:
    """Return the interval as text: paired difference in points, or ratio in decades."""
    if isinstance(each, StepShares):
        return interval_text(each.result.interval, each.result.n, "points", 0)
    return interval_text(each.result.interval, each.result.n, "decades", 1)


def _notes(found: Sequence[Found]) -> str:
    """Report the number of diverged runs and the seeds left out."""
    diverged = {LEADER: found[0][1].diverged[0]} | {name: each.diverged[1] for name, each in found}
    how = "counted as 0 %" if isinstance(found[0][1], StepShares) else "ranked below all that was recorded"
    told = [f"{plural(number, 'run')} of {name}" for name, number in diverged.items() if number]
    left_out = sorted({seed for _, each in found for seed in each.left_out})
    notes = [f"Diverged, {how}: {join_words(told)}."] if told else []
    if left_out:
        seeds = f"Seed{'s' * (len(left_out) > 1)} {join_words(map(str, left_out))} left out"
        notes.append(f"{seeds}, for lack of a result of both at each rate.")
    return " ".join(notes)


def suboptimal_claims(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return one claim per state at terminal checkpoints, over all trained mechanisms' runs."""
    states = [state for phase, state in phases_and_states(study) if phase == TERMINAL]
    return [
        _suboptimal(study, state, [side for side in sides.values() if side.trained])
        for state in sorted(states, key=lambda state: (state != "checkpoint", state))
    ]


def _suboptimal(study: Study, state: str, sides: Sequence[Side]) -> Claim:
    """Judge one state by curves (mechanism × seed), whose runs depend on each other.

    A curve counts as below if most of its runs do, and curves are independent draws. A diverged run has no terminal
    α_max and is not counted.
    """
    subject, how = f"suboptimal runs {state}", STATE_WORDS.get(state, f"in state {state}")
    statement = f"a run of suboptimal loss has a median α_max below its LR ({state_text(state)})"
    runs = _runs(study, state, sides)
    measured = runs[(runs["outcome"] == MEASURED) & runs["median"].notna()]
    bad, good = measured[measured["suboptimal"]], measured[measured["is_near"]]
    diverged = int((runs["status"] == "diverged").sum())
    rule = "above the best rate, NLL beyond the own window's limit, or learned nothing" + (
        f"; {plural(diverged, 'run')} diverged and left none" if diverged else ""
    )
    if bad.empty:
        text = (
            f"{sentence(how)}, no run of suboptimal loss ({rule}) has a median α_max: whether it lies below the "
            "learning rate cannot be judged."
        )
        return Claim(subject, "not judged", text, statement, paper=CONSENSUS)
    below, n = int(bad["below"].sum()), len(bad)
    most = bad.groupby(["series", "seed"])["below"].mean() > 0.5
    low, high = share_interval(int(most.sum()), len(most))
    curves = f"most of them in {int(most.sum())} of {plural(len(most), 'curve')}"
    verdict = judge_interval(low, high, 0.5)
    only = "only " if verdict == "contradicted" and below else ""
    by_mechanism = [
        f"{side.name} {int(part['below'].sum())} of {len(part)}"
        for side in sides
        if len(part := bad[bad["series"] == side.series])
    ]
    others = f"; of runs inside the window: {int(good['below'].sum())} of {len(good)}" if len(good) else ""
    numbers = f"{join_words(by_mechanism)}; {curves}{others}"
    count = (
        f"{only}{below} of {plural(n, 'run')} of suboptimal loss ({rule}) {'has' if below == 1 else 'have'} a median "
        "α_max below the learning rate"
    )
    claim = Claim(
        subject,
        verdict,
        statement=statement,
        n=len(most),
        effect=f"{below} of {n} runs below, {curves}",
        interval=f"{100 * low:.0f} to {100 * high:.0f} % of curves, exact 95 %",
        paper=CONSENSUS,
        finding=f"{how}, {count}",
        note=f"By mechanism: {numbers}.",
        test=(subject, *(side.series for side in sides)),
        p=p_of_share(int(most.sum()), len(most)),
    )
    return word_claim(claim)


def _runs(study: Study, state: str, sides: Sequence[Side]) -> Frame:
    """Return `count_stable_steps` at terminal checkpoints, with ``suboptimal``, ``is_near`` and ``below``.

    ``suboptimal``: overspecified, so only at rates above the mechanism's best. ``is_near``: within the tolerance of
    its best NLL. ``below``: median α_max below the learning rate; a median of 0 is included.
    """
    count = count_stable_steps(study, TERMINAL, state).merge(study.runs[["run_id", "val_nll"]], on="run_id")
    count = count[count["series"].isin([side.series for side in sides]) & count["status"].isin(ENDED)]
    found = {side.series: side.found.median for side in sides if side.found.median is not None}
    limits, best = ({name: getattr(each, key) for name, each in found.items()} for key in ("threshold_nll", "best_lr"))
    is_far = (count["val_nll"] > count["series"].map(limits)) | (count["status"] == "plateaued")
    suboptimal = is_far & (count["run_lr"] > count["series"].map(best))
    return count.assign(suboptimal=suboptimal, is_near=~is_far, below=count["median"] < count["run_lr"])
