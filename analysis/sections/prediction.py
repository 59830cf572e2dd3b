"""Test α_max's purpose: does it predict, early in training, broken runs, the best rate and the edge?

For one study, or for several together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import matplotlib

from analysis.claims import prediction as said
from analysis.claims.claim import Claim
from analysis.claims.prediction import EVENTS, TARGETS
from analysis.drawing.pieces import Picture, Pieces, box, heading, paragraph, shown
from analysis.drawing.style import RC
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.early_measurements import has_early, join_early_curves, join_early_runs, list_untrained
from analysis.numbers.learning import reasons_untrained
from analysis.numbers.prediction import (
    FEWEST_CURVES,
    GROUPS,
    POOLED,
    SAME_RATE,
    Scored,
    best_baseline,
    score_curves,
    score_runs,
    select_judged,
    select_ranked,
    telling,
    verdict,
)
from analysis.numbers.ranking import Estimate
from analysis.sections.prediction_figures import RANKS_CAPTION, ROC_CAPTION, rank_figure, roc_figure
from analysis.sections.section import Captioned, Drawn, Figures, Section, has_data, is_of_rates, pictures
from analysis.study.load import Frame, Study
from analysis.study.once import once_per_study
from analysis.words import join_words, plural

TITLE = "Does α_max predict the edge?"
MOST_COLUMNS = 4  # mechanisms beside the three columns over all
NO_VALUE = "--"
OWN_RATES = 0.9  # share of distinct rates in a study whose series have rates of their own


class Evidence:
    """The evidence of studies: runs, curves, and each predictor's scores by event and target.

    ``untrained`` names the series that are left out.
    """

    def __init__(self, studies: Sequence[Study]):
        self.studies = [study for study in studies if has_early(study)]
        self.untrained = [
            name if len(self.studies) == 1 else f"{name} of {study.name}"
            for study in self.studies
            for name in list_untrained(study)
        ]
        self.runs, self.curves = join_early_runs(self.studies), join_early_curves(self.studies)
        events = [event for event in EVENTS if event == "broke" or self._differs(event)]
        self.of_runs = {event: score_runs(self.runs, event) for event in events}
        self.of_curves = {target: score_curves(self.curves, target) for target in TARGETS}

    def told(self) -> str:
        """Return the explanation of the results: the counts, the comparisons, the intervals' units."""
        runs, number = self.runs, self.runs["stratum"].nunique()
        asked = {f"which runs {EVENTS[event]}": telling(runs, event) for event, each in self.of_runs.items() if each}
        asked |= {
            TARGETS[target]: select_ranked(self.curves, target) for target, each in self.of_curves.items() if each
        }
        judged_of = [said.name_units(frame, what, number) for what, frame in asked.items()]
        units = [said.UNITS] if judged_of else []
        sentences = [*said.count_runs(runs), self.left_out(), said.describe_sets(runs), *judged_of, *units]
        sentences.append(said.scale(self.studies))
        return " ".join(filter(None, sentences))

    def left_out(self) -> str:
        """Return a sentence on the series that are left out; "" without any."""
        return f"Not here, since too little was learned: {join_words(self.untrained)}." if self.untrained else ""

    def _differs(self, event: str) -> bool:
        """Return whether an event happened to other runs than "broke" did."""
        frame = select_judged(self.runs)
        return bool((frame[event] != frame["broke"]).any())

    def claims(self) -> list[Claim]:
        """Return the claims on runs, event by event, then those on curves."""
        on_runs = (said.claims_on_runs(self.runs, scored, event) for event, scored in self.of_runs.items())
        on_curves = (said.claims_on_curves(self.curves, scored, target) for target, scored in self.of_curves.items())
        return [claim for claims in (*on_runs, *on_curves) for claim in claims]


@once_per_study
def evidence(study: Study) -> Evidence:
    """Return one study's evidence, computed once for tables, figures and sentences."""
    return Evidence([study])


def _describe_comparisons(found: Evidence) -> str:
    """Return the end of a caption, on the groups that are compared; "" without a comparison."""
    sets = said.describe_sets(found.runs)
    return f" {sets}" if sets else ""


def tables_of(found: Evidence) -> list[Table]:
    """Return a table for each event and target with scores."""
    told = _describe_comparisons(found)
    on_runs = (_run_tables(found.runs, scored, event, told) for event, scored in found.of_runs.items())
    on_curves = (_curve_tables(found.curves, scored, target, told) for target, scored in found.of_curves.items())
    return [table for tables in (*on_runs, *on_curves) for table in tables]


def _run_tables(runs: Frame, scored: Sequence[Scored], event: str, told: str) -> Iterator[Table]:
    """Yield one event's table, and another one for every four more mechanisms."""
    if not scored:
        return
    frame = telling(runs, event)
    names, sets = list(dict.fromkeys(frame["mechanism"])), list(dict.fromkeys(frame["stratum"]))
    head = {name: _share(frame[frame["mechanism"] == name], event) for name in names}
    head |= {POOLED: _share(frame, event), SAME_RATE: _pairs(scored[0])}
    caption = (
        "After the horizon; a spike counts whatever the verdict. AUC: how often, of a run that does and one that does "
        "not, the first has the more alarming value (Mann and Whitney's U over the pairs; 0.5 is chance, below it the "
        "value alarms the wrong way); which way alarms was fixed beforehand. Same rate: over pairs of runs whose rates "
        f"lie {said.WITHIN} of each other, both orders of the rates weighing the same: the rate’s own row is the "
        "control. Below: 95 % interval. Last column: all, less the best baseline’s, on the same draws; “cannot tell”: "
        "0 lies inside. Medians of the recorded steps (own optimizer state unless said); loss and gradient norm: of as "
        "many training steps, up to k "
        f"and from k to the horizon. Baselines below the α_max rows.{told}"
    )
    title = f"Which runs {EVENTS[event]}"
    yield from _tables(title, caption, scored, names, head, (POOLED, SAME_RATE))
    if len(sets) > 1:
        head = {name: _share(frame[frame["stratum"] == name], event) for name in sets}
        yield from _tables(f"{title}, set by set", "As above.", _replace_by_sets(scored), sets, head, ())


def _pairs(scored: Scored) -> str:
    return f"{plural(scored.numbers[SAME_RATE], 'pair')}, {plural(scored.numbers[GROUPS], 'group')}"


def _curve_tables(curves: Frame, scored: Sequence[Scored], target: str, told: str) -> Iterator[Table]:
    """Yield one target's table, and another one for every four more mechanisms."""
    if not scored:
        return
    frame, left = select_ranked(curves, target), int(curves[target].isna().sum())
    names, sets = list(dict.fromkeys(frame["mechanism"])), list(dict.fromkeys(frame["stratum"]))
    head = {name: f"n={int((frame['mechanism'] == name).sum())}" for name in names} | {POOLED: f"n={len(frame)}"}
    caption = (
        f"Ranks of the curves (all rates of a series and seed). ρ: Spearman's; of fewer than {FEWEST_CURVES} curves, "
        "or where all have the same value, none. Off: median distance from the truth in decades, of what is a rate "
        "itself, but for bounds (α_max or critical LR meets the rate nowhere between the smallest and the largest). "
        "Below: 95 % interval. Last column: all, less the best baseline’s, on the same draws; “cannot tell”: 0 lies "
        f"inside. {_truth(curves, target)}"
        + (f" {left} of {len(curves)} curves have none and are left out. " if left else " ")
        + "One decade below divergence uses the outcome, the smallest rate that diverged in the end, and no predictor "
        "is compared with it. What broke by the horizon is left out of no curve: where α_max = α is read off the runs "
        "that could still be measured, as the largest unbroken rate is." + told
    )
    title = f"What tells {TARGETS[target]}"
    yield from _tables(title, caption, scored, names, head, (POOLED,), is_of_curves=True)
    if len(sets) > 1:
        head = {name: f"n={int((frame['stratum'] == name).sum())}" for name in sets}
        yield from _tables(
            f"{title}, set by set", "As above.", _replace_by_sets(scored), sets, head, (), is_of_curves=True
        )


def _replace_by_sets(scored: Sequence[Scored]) -> list[Scored]:
    """Return the scores with each set's values in place of each mechanism's."""
    return [replace(each, scopes=each.sets) for each in scored]


def _truth(curves: Frame, target: str) -> str:
    if target == "best_lr":
        bounds = int((curves["is_bound"] & curves["best_lr"].notna()).sum())
        at_end = f"; of {plural(bounds, 'curve')} the smallest or largest that was swept, a bound" if bounds else ""
        return f"Best: the rate of the lowest final validation NLL{at_end}."
    kinds = curves["edge_kind"].value_counts()
    found = join_words(f"{kind} ({number})" for kind, number in kinds.items())
    return f"Edge: the largest stable rate, from lr=edge, else the upper end of the stable window: {found}."


def _tables(
    title: str,
    caption: str,
    scored: Sequence[Scored],
    names: Sequence[str],
    head: dict[str, str],
    over_all: Sequence[str],
    is_of_curves: bool = False,
) -> Iterator[Table]:
    """Yield one row per predictor under a row of counts; the columns over all runs are in the first table."""
    best = best_baseline(scored) if over_all else None
    for number, part in enumerate(chunks(names, MOST_COLUMNS)):
        scopes = [*part, *(over_all if number == 0 else ())]
        more = [*(["off"] if is_of_curves else []), f"less {best.predictor.name}" if best else "less the best"]
        more = more if number == 0 and over_all else []
        first = ("curves" if is_of_curves else "runs that do, of all", *(head[each] for each in scopes))
        rows = [(*map(Cell, first), *(Cell("") for _ in more))]
        for each in scored:
            cells = [_estimate(each.scopes[name]) for name in scopes]
            off = NO_VALUE if each.decades != each.decades else f"{each.decades:.2f}"
            ends = [Cell(off)] if is_of_curves and more else []
            ends += [_beyond(each, best)] if more else []
            rows.append((Cell(each.predictor.name, _number(each)), *cells, *ends))
        kind = "ρ" if is_of_curves else "AUC"
        header = (kind, *scopes, *more)
        widths = ("1.7fr", *("1fr" for _ in scopes), *("0.6fr" if name == "off" else "1.2fr" for name in more))
        yield Table(title if number == 0 else f"{title}, continued", caption if number == 0 else "As above.",
                    header, tuple(rows), widths=widths)  # fmt: skip


def _number(each: Scored) -> str:
    """Return the number of rows with a known predictor, and of bounds among them."""
    return f"n={each.numbers[POOLED]}" + (f", {plural(each.num_bounds, 'bound')}" if each.num_bounds else "")


def _share(frame: Frame, event: str) -> str:
    return f"{int(frame[event].sum())} of {len(frame)}"


def _estimate(found: Estimate) -> Cell:
    if found.value != found.value:
        return Cell(NO_VALUE)
    return Cell(said.number_text(found.value), said.interval_text(found).replace(" to ", "–"))


def _beyond(each: Scored, best: Scored | None) -> Cell:
    """Return the pooled difference to the best baseline, its interval and the verdict."""
    difference = each.beyond.get(best.predictor.column) if best else None
    if difference is None or difference.value != difference.value:
        return Cell("")
    value, _, within = said.difference_text(difference).partition(", ")
    return Cell(value, "\n".join(filter(None, (within, verdict(difference)))), verdict(difference) == "better")


def figures_of(found: Evidence) -> dict[str, Captioned]:
    """Draw the ROC curves and the ranks, if there are any."""
    told = _describe_comparisons(found)
    drawn = {}
    if (roc := roc_figure(found.runs, found.of_runs)) is not None:
        drawn["prediction-roc"] = Captioned(roc, f"{ROC_CAPTION}{told}")
    if (ranks := rank_figure(found.curves, found.of_curves)) is not None:
        drawn["prediction-ranks"] = Captioned(ranks, f"{RANKS_CAPTION}{told}")
    return drawn


def _opening(found: Evidence) -> str:
    best = [
        said.best_of_baselines(scored, f"which runs {EVENTS[event]}", "AUC") for event, scored in found.of_runs.items()
    ]
    best += [said.best_of_baselines(scored, TARGETS[target], "ρ") for target, scored in found.of_curves.items()]
    return " ".join(filter(None, [said.conclusion(found.claims()), *best]))


def conclusion(study: Study) -> str:
    """Return the predictors better than every baseline, and α_max / α beside the best baseline and at one rate."""
    found = evidence(study)
    compared = said.compare_with_baseline(found.of_runs["broke"], "broke")
    return " ".join(filter(None, (said.conclusion(found.claims()), compared, found.left_out())))


def leads(study: Study) -> bool:
    """Return whether a study tells what early measurements foretell: its series hardly share rates, as windows must."""
    rates = [set(study.of(name)["lr"]) for name in study.series]
    if len(rates) < 2 or not is_of_rates(study) or study.is_in_multiples or not has_early(study):
        return False
    are_own = len(set.union(*rates)) >= OWN_RATES * sum(map(len, rates))
    return are_own and bool(said.answer(evidence(study).of_runs["broke"]))


def title(study: Study) -> str:
    """Return the question with its answer on broken runs: α_max / α beside the best baseline, and at one rate."""
    return f"{TITLE} {said.answer(evidence(study).of_runs['broke'])}"


def figures(study: Study) -> Figures:
    return figures_of(evidence(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    found = evidence(study)
    return [*tables_of(found), _opening(found), *(claim.text for claim in found.claims())]


def body(study: Study, drawn: Drawn) -> Pieces:
    return body_of(evidence(study), pictures(drawn))


def body_of(found: Evidence, drawn: Pieces) -> Pieces:
    """Return the section's pieces: conclusion and claims, counts, figures, tables."""
    claims = found.claims()
    first = [claim.text for claim in claims if said.is_on_alpha_max(claim)]
    others = [claim.text for claim in claims if not said.is_on_alpha_max(claim)]
    read = box([_opening(found), *first]) + tuple(piece for text in others for piece in paragraph(text))
    return heading(TITLE) + read + paragraph(found.told()) + drawn + shown(tables_of(found))


def together(studies: Sequence[Study], prefix: str = "") -> Pieces:
    """Return the section over several studies; () if fewer than two trained ones measured α_max early.

    It names the others. ``prefix`` begins its figures' file names.
    """
    measured = [study for study in studies if has_early(study)]
    trained = [study for study in measured if has_learned(study)]
    untrained = [study for study in measured if study not in trained]
    if len(trained) < 2:
        return ()
    found = Evidence(trained)
    with matplotlib.rc_context(RC):
        drawn = tuple(
            Picture(name, each.figure, each.caption, f"{prefix}{name}.pdf") for name, each in figures_of(found).items()
        )
    without = [study.name for study in studies if study not in measured and is_of_rates(study)]
    lacking = paragraph(
        f"Without α_max at an early checkpoint, and not here: {join_words(without)} (python -m stability.hessian "
        f"ckpt=runs/studies/{without[0]} phase=all measures it where the runs' checkpoints are kept)."
    ) if without else ()  # fmt: skip
    if untrained:
        lacking += paragraph(f"Not here, since no mechanism learned: {join_words(study.name for study in untrained)}.")
    return body_of(found, drawn) + lacking


def has_learned(study: Study) -> bool:
    """Return whether some mechanism learned: the others' runs end on either side of a threshold by noise."""
    return not all(reasons_untrained(study).values())


applies = has_data(lambda study: has_early(study) and has_learned(study))


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the first table; without one the first page says that nothing is known."""
    return heading(TITLE) + shown(tables_of(evidence(study))[:1])


SECTION = Section(body, applies, figures, tables, brief)
