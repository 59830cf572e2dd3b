"""Judge the papers' claims on one study, as sentences and a table.

The consensus paper's claims are here (section 2.2, low-pass filters), in `windows` (5.1) and `steps` (5.2.1). Other
papers' claims are in `rivals` and `residuals`. Rules:

- A mechanism without learning is "untrained" (criteria: `learning`). No claim is made about untrained mechanisms.
  Little learning is named.
- One seed: no claim. Two seeds: "indications", if both agree. Three or more: "results", if the Student-t 95 % interval
  of the paired differences excludes 0. For equality the whole interval must lie within the margin. Otherwise the claim
  is undecided, and the number of seeds needed is given if the spread allows an estimate.
- An open window is a lower bound; `compare` treats the undecided cases. Diverged runs count (`step_shares`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from analysis.claims import mixers, recall, rivals
from analysis.claims.claim import Claim, Verdict
from analysis.claims.pairs import compares_mechanisms, compares_residuals
from analysis.claims.steps import steps_claims, suboptimal_claims
from analysis.claims.windows import Side, unjudged_window, window_claims
from analysis.drawing.tables import source
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.learning import Learned, little, most_learned, why_untrained
from analysis.numbers.mixers import compares_mixers
from analysis.numbers.spread import POSITIVE, Spread
from analysis.numbers.step_shares import TERMINAL
from analysis.numbers.windows import TOLERANCE, SeriesWindows, windows
from analysis.study import wording
from analysis.study.load import FINISHED, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import count_range, listed, lr_text, plural
from stability.runs.words import Words

VERDICTS = {
    "holds": "holds",
    "contradicted": "contradicted",
    "undecided": "cannot tell",
    "no claim": "too few seeds",
    "not judged": "not judged",
}
INDICATED = {"holds": "indications for", "contradicted": "indications against"}  # two seeds make no result


def paragraph(study: Study) -> str:
    """Join all claims' sentences into one paragraph."""
    return " ".join(claim.text for claim in judge(study))


@once_per_study
def judge(study: Study) -> tuple[Claim, ...]:
    """Return the claims for every setting, then remarks on missing runs and scale.

    A setting is one combination of optimizer, residual, … if they vary; in ablations only the base is judged.
    """
    found, claims = windows(study), []
    for setting in sorted(set(study.runs.loc[study.runs["variant"] == "", "setting"])):
        names = set(study.runs.loc[study.runs["setting"] == setting, "series"])
        sides = _sides(study, [found[name] for name in study.series if name in names])
        if rivals.another_question(study):
            continue  # the study does not test the consensus paper's question
        prefix = f"Setting {setting}: " if setting else ""
        claims += [
            replace(claim, text=prefix + claim.text, statement=claim.statement and prefix + claim.statement)
            for claim in _judge_setting(study, sides)
        ]
    claims += [*low_pass_claims(study), *_rival_claims(study, found), *recall.claims(study)]
    return (*claims, *_coverage(study), _scale(study))


def _rival_claims(study: Study, found: dict[str, SeriesWindows]) -> list[Claim]:
    """Return the claims on schemes and mixers against the plain one. [] if the study lacks either."""
    if not (compares_residuals(study) or compares_mechanisms(study) or compares_mixers(study)):
        return []
    lacking = why_untrained(study)
    return [*rivals.claims(study, found, lacking), *mixers.claims(study, lacking)]


def _sides(study: Study, found: list[SeriesWindows]) -> dict[str, Side]:
    """Return one setting's mechanisms by name, with windows, learning and shortfall."""
    learned = [Learned.of(study, each) for each in found]
    most = most_learned(learned)
    sides = {}
    for each, nats in zip(found, learned, strict=True):
        runs = study.of(each.series)
        mechanism, name = (str(runs[column].iloc[0]) for column in ("mechanism", "label"))
        lost = bool((runs["status"] == "diverged").all())
        sides[mechanism] = Side(mechanism, name, each.series, each, nats, nats.shortfall(most), lost)
    return sides


def _judge_setting(study: Study, sides: dict[str, Side]) -> list[Claim]:
    """Return the claims on one setting; "not judged" without trained sa and sc.

    Order: untrained mechanisms, windows and best NLLs, limits, α_max.
    """
    claims = [
        Claim(f"trained {side.name}", "not judged", f"{side.name} {_said_of(side)}.")
        for side in sides.values()
        if side.shortfall
    ]
    absent = [name for name in ("sa", "sc") if name not in sides]
    if absent:
        return [*claims, unjudged_window(f"The study has no {listed(absent)} runs:")]
    if not sides["sc"].trained or not (sides["sa"].trained or sides["sa"].only_diverged):
        return [*claims, unjudged_window("")]
    claims += [] if sides["sa"].trained else [unjudged_window("")]
    claims += window_claims(study, sides)
    if others := [name for name in ("mix", "sw") if name not in sides]:
        them = "it" if len(others) == 1 else "them"
        text = f"The study has no {listed(others)} runs: what the paper says of {them} cannot be judged."
        claims.append(Claim("absent", "not judged", text))
    claims += _limits({side.name: side for side in sides.values() if side.trained}, wording.words(study))
    return [*claims, *steps_claims(study, sides), *suboptimal_claims(study, sides)]


def _said_of(side: Side) -> str:
    """Describe the treatment of an untrained mechanism.

    If all runs diverged, its steps still count as 0 % stable.
    """
    if side.only_diverged:
        return "diverged in every run: no claim is made about its window and its NLL, and its steps count as 0 % stable"
    return f"{side.shortfall}: no claim is made about it"


@once_per_study
def claims_table(study: Study) -> Table | None:
    """Return a table with every judged statement: n, effect with interval, verdict; or None."""
    judged = [claim for claim in judge(study) if claim.statement]
    if not judged:
        return None
    short = {
        claim.interval: claim.interval.replace("95 % interval", "95 %").replace("range of 2 seeds", "range")
        for claim in judged
    }
    rows = tuple(
        (Cell(each.statement), Cell(str(each.n)), Cell(each.effect or "--", short[each.interval]), Cell(_verdict(each)))
        for each in judged
    )
    caption = (
        "The papers' statements as they make them, and what this study says of each. n: paired seeds (of runs of "
        "suboptimal loss: runs). Below the effect the interval that decides, of the paired difference: it must "
        "exclude 0, or lie within the margin where equality is claimed; of a comparison with several mechanisms "
        f"that with the closest. A run that diverged ranks below every median α_max recorded. {_elsewhere(study)} "
        f"{source(study)}"
    )
    title, header = "What the papers claim, and what was found here", ("statement", "n", "effect", "verdict")
    align, widths = ("left", "right", "left", "left"), ("2.5fr", "auto", "2.2fr", "auto")
    return Table(title, caption, header, rows, (), align, widths)


def _verdict(claim: Claim) -> str:
    """Return the verdict in words; two seeds give indications only."""
    return INDICATED.get(claim.verdict, VERDICTS[claim.verdict]) if claim.n == 2 else VERDICTS[claim.verdict]


def _elsewhere(study: Study) -> str:
    """Describe how the study's runs differ from the papers'."""
    runs = study.runs
    asked = (
        f"{listed(sorted(set(runs['objective'])))} on {listed(sorted(set(runs['data'])))} with "
        f"{listed(sorted(set(runs['optimizer'])))}"
    )
    return (
        f"Not the papers' runs: here {count_range(runs['num_params'])} parameters, {asked}; "
        f"{rivals.scale_of_the_papers(study)}."
    )


def _limits(trained: dict[str, Side], words: Words) -> list[Claim]:
    """Return remarks on mechanisms with little learning and on lenient windows."""
    few = little({name: side.learned for name, side in trained.items()})
    claims = [Claim("little learned", "no claim", few)] if few else []
    lenient = {
        name: side.found.median
        for name, side in trained.items()
        if side.found.median is not None and side.found.median.is_lenient
    }
    if lenient:
        places = listed(
            f"{name}'s admits NLLs up to {each.threshold_nll:.3f}, half is lost at {each.half_nll:.3f}"
            for name, each in lenient.items()
        )
        text = (
            f"Within {100 * TOLERANCE:.0f} % of the best NLL there are rates that lost more than half of what was "
            f"learned beyond {words.baseline} ({places}): part of such a window's width comes from how little there "
            "was to lose."
        )
        claims.append(Claim("lenient windows", "no claim", text))
    return claims


def _coverage(study: Study) -> list[Claim]:
    """Return a remark on runs without results; [] if every run has one."""
    counts = study.runs["status"].value_counts()
    missing = [
        f"{counts[status]} {status}"
        for status in ("failed", "running", "interrupted", "stopped", "queued")
        if status in counts
    ]
    if not missing:
        return []
    text = (
        f"Of {plural(len(study.runs), 'run')}, {listed(missing)}: these are no results, and a window next to one "
        "counts as open."
    )
    return [Claim("coverage", "not judged", text)]


def _scale(study: Study) -> Claim:
    """Return a remark on the runs' parameters, steps, tokens and seeds."""
    finished = study.runs[study.runs["status"].isin(FINISHED)]
    runs = finished if len(finished) else study.runs
    steps = count_range(runs["num_steps"])
    text = (
        f"All this is at {count_range(runs['num_params'])} parameters, {steps} step{'' if steps == '1' else 's'} and "
        f"{count_range(runs['num_tokens'])} {wording.words(study).counted} per run, "
        f"{plural(study.runs['seed'].nunique(), 'seed')}; {rivals.scale_of_the_papers(study)}."
    )
    return Claim("scale", "not judged", text)


LOW_PASS = (
    "{} filters without oscillation: its step η is at most 1/(2λ_max), so that higher frequencies shrink more (2.2)"
)


def low_pass_claims(study: Study) -> Iterator[Claim]:
    """Yield a claim for each series with consensus spectra probed at its best rate."""
    if "spectra" not in study.probes:
        return
    finished = study.runs.loc[study.runs["status"].isin(FINISHED), "run_id"]
    rows = study.probed("spectra")
    rows = rows[(rows["phase"] == TERMINAL) & rows["run_id"].isin(finished) & rows["step_limit"].notna()]
    found = windows(study)
    for series in study.series:
        best = found[series].median
        own = rows[(rows["series"] == series) & (rows["run_lr"] == (best.best_lr if best else None))]
        if len(own):
            yield _low_pass_claim(series, own)


def _low_pass_claim(series: str, rows: Frame) -> Claim:
    """Judge one series by 2ηλ_max at its best rate. Per seed, the median over layers, heads and sequences."""
    per_seed = (rows["step_size"] / rows["step_limit"]).groupby(rows["seed"]).median()
    spread = Spread.of(per_seed, POSITIVE)
    gain, left = rows["gain"].median(), (rows["variance_after"] / rows["variance_before"]).median()
    numbers = (
        f"2ηλ_max = {spread.median:.2g}, median over layers, heads and {plural(spread.n, 'seed')} at "
        f"{lr_text(float(rows['run_lr'].iloc[0]))}; largest factor of a frequency {gain:.2g}; the layer leaves "
        f"{100 * left:.0f} % of the variance between positions"
    )
    effect = f"2ηλ_max = {spread.median:.2g}"
    judged = partial(Claim, f"low-pass {series}", statement=LOW_PASS.format(series), n=spread.n, effect=effect)
    if spread.n < 3:
        text = f"On low-pass filtering by {series} no claim is made with {plural(spread.n, 'seed')} ({numbers})."
        return judged("no claim", text)
    verdict: Verdict = "holds" if spread.high <= 1 else "contradicted" if spread.low > 1 else "undecided"
    said = {
        "holds": "is a low-pass filter",
        "contradicted": "is no low-pass filter: its step overshoots at high frequencies",
        "undecided": "may or may not be a low-pass filter",
    }[verdict]
    interval = f"95 % interval over seeds {spread.low:.2g} to {spread.high:.2g}"
    return judged(verdict, f"The trained graph step of {series} {said} ({numbers}; {interval}).", interval=interval)
