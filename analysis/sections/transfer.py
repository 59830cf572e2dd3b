"""Show how the best learning rate moves with the size, and predict it at a larger one."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import matplotlib

from analysis.claims.judging import judge
from analysis.claims.reference import against_reference
from analysis.drawing.pieces import Picture, Pieces, box, heading, shown
from analysis.drawing.style import RC
from analysis.drawing.typeset import Cell, Table
from analysis.measures import spread_cell
from analysis.numbers.size_laws import AXES, FLAT_DECADES, FLAT_WITHIN, FLOOR_DECADES, Law
from analysis.numbers.transfer import (
    FEWEST_SIZES,
    LAST,
    LAW,
    SMALLEST,
    Compared,
    Curve,
    Group,
    Prediction,
    Trial,
    compare_groups,
    find_groups,
    has_sizes,
    locate,
)
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, pictures
from analysis.sections.transfer_figures import CAPTION, draw
from analysis.study import wording
from analysis.study.load import ENDED, Study
from analysis.study.once import once_per_study
from analysis.study.reference import references
from analysis.words import join_words, plural, power, significant

TITLE, NAME = "The best learning rate by size", "transfer"
QUESTIONS = {"steps": "Which learning rate for longer training", "batch": "Which learning rate at a larger batch"}
QUESTION = "Which learning rate at a larger size"  # of other sizes, or of several
REST = "More of it is in the report."
MOST_TITLED = 4  # groups with an answer in the title
FEWEST_SHARED = 3  # rates that all sizes share, of a sensitivity
VERDICTS = {"cannot tell": "no significant difference from 0 with these sizes at 95 %"}  # of laws, in sentences


@once_per_study
def groups_of(study: Study) -> list[Group]:
    """Return one study's groups with more than one size."""
    return [group for group in find_groups([study]) if group.axes]


def applies(study: Study) -> bool:
    several = study.runs["lr"].nunique() > 1
    return several and is_of_rates(study) and has_sizes(study) and not study.is_in_multiples and bool(groups_of(study))


def leads(study: Study) -> bool:
    """Return whether the study asks for a larger size. Series that are compared at too few sizes for a law do not."""
    if not applies(study):
        return False
    sizes = [len({size[axis] for size in group.sizes}) for group in groups_of(study) for axis in group.axes]
    return max(sizes) >= FEWEST_SIZES or not references(study)


def title(study: Study) -> str:
    """Return the question with each group's answer."""
    return title_of(groups_of(study))


def title_of(groups: Sequence[Group]) -> str:
    """Return the question with the answers of the first groups; a size that all share is in the question."""
    shown, axes = groups[:MOST_TITLED], {AXES[axis] for group in groups for axis in group.axes}
    rest = f"; {len(groups) - MOST_TITLED} further below" if len(groups) > MOST_TITLED else ""
    question = QUESTIONS.get("".join(axes), QUESTION)  # several names joined are no key
    places = {locate(double(group)) for group in groups}
    at = f", {places.pop()}" if len(places) == 1 else ""
    return f"{question}{at}? {'; '.join(_say_briefly(group, has_place=not at) for group in shown)}{rest}"


def _say_briefly(group: Group, *, has_place: bool) -> str:
    target = double(group)
    found = group.predict(target)
    if found.reasons:
        return f"{group.name}: cannot predict"
    low, high = map(power, found.interval)
    return f"{group.name}: {power(10**found.log_lr)} ({low} to {high}){f' {locate(target)}' if has_place else ''}"


def sentences(study: Study) -> list[str]:
    """Return the predictions a doubling further, the laws and their back-tests, a paragraph each."""
    groups = groups_of(study)
    laws = " ".join(filter(None, map(describe_law, groups)))
    predictions = [describe_prediction(group, double(group)) for group in groups]
    told = (*(describe_trials(group) for group in groups), describe_comparisons(groups))
    return list(filter(None, (*predictions, laws, *told)))


def answer_text(study: Study, most: int, width: int) -> str:
    """Return the table, the predictions and the laws; what has no room is left out.

    Args:
        study: the study.
        most: largest number of lines.
        width: characters in a line.
    """
    title, _, *rest = best_table(study).text(details=False, wrap=width).splitlines()
    lines, groups = [title, *rest, ""], groups_of(study)
    predictions = [describe_prediction(group, double(group)) for group in groups]
    start = len(lines)
    for sentence in [*predictions, *filter(None, map(describe_law, groups))]:
        wrapped = textwrap.wrap(sentence, width)
        if len(lines) + len(wrapped) > most:
            # in place of the empty line if no other is left
            return "\n".join([*lines, REST] if len(lines) < most else [*lines[: start - 1], REST, *lines[start:]])
        lines += wrapped
    return "\n".join(lines)


def describe(studies: Sequence[Study], target: Mapping[str, float]) -> str:
    """Return the table of best rates, then for each group its law, its back-test and the prediction.

    Args:
        studies: one study, or several that share everything but their sizes.
        target: a size, by axis; the others as at the largest size.

    Raises:
        ValueError: no size varies, or the studies differ in more than sizes; one line.
    """
    groups = [group for group in find_groups(studies) if group.axes]
    if not groups:
        names = join_words(study.name for study in studies)
        raise ValueError(f"{names}: no size varies; sweep several, e.g. model.width=[64,128,256]")
    parts = [best_table(studies[0], groups).text(), *filter(None, map(_count_missing, studies))]
    for group in groups:
        said = (describe_law(group), describe_trials(group), describe_prediction(group, target))
        parts.append("\n".join(textwrap.fill(each, 110) for each in said if each))
    if compared := describe_comparisons(groups):
        parts.append(textwrap.fill(compared, 110))
    return "\n\n".join(parts)


def _count_missing(study: Study) -> str:
    """Say how many runs of a study have no result yet; "" if all have one."""
    ended = int(study.runs["status"].isin(ENDED).sum())
    planned = max(len(study.study.get("run_ids", ())), len(study.runs))
    if ended == planned:
        return ""
    return f"{study.name}: {ended} of {plural(planned, 'run')} have ended; the numbers may still change."


def join(studies: Sequence[Study]) -> list[Group]:
    """Return the groups with sizes of several studies; [] where these share no law."""
    try:
        found = find_groups(studies)
    except ValueError:  # studies of several questions in one report; `say_apart` gives the reason
        return []
    return [group for group in found if group.axes and len({id(curve.study) for curve in group.curves}) > 1]


def say_apart(studies: Sequence[Study]) -> str:
    """Say why studies share no law of sizes; "" if they can share one, or none of them varies a size."""
    if not any(map(applies, studies)):
        return ""
    try:
        find_groups(studies)
    except ValueError as error:
        return f"No joint law of the sizes: {error}."
    return ""


def together(studies: Sequence[Study], prefix: str) -> Pieces:
    """Return the joint law of several studies: predictions, back-tests, figure and tables; () without one.

    Args:
        studies: the studies.
        prefix: start of the figure's file name.
    """
    groups = join(studies)
    if not groups:
        return ()
    with matplotlib.rc_context(RC):
        figure = draw(groups)
    predictions = [describe_prediction(group, double(group)) for group in groups]
    said = [*predictions, *filter(None, map(describe_trials, groups)), describe_comparisons(groups)]
    picture = () if figure is None else (Picture(NAME, figure, CAPTION, f"{prefix}{NAME}.pdf"),)
    return box([*filter(None, said)]) + picture + shown([best_table(studies[0], groups), trial_table(groups)])


def double(group: Group) -> dict[str, float]:
    """Return a group's largest size with each varying axis doubled."""
    largest = group.curves[-1].size
    return {AXES[axis]: 2 * largest[axis] for axis in group.axes}


def describe_law(group: Group) -> str:
    """Return the slopes of a group's law with their intervals and verdicts.

    "" without a law: the prediction beside it has the reason.
    """
    law = group.law
    if law is None:
        return ""
    verdicts = [VERDICTS.get(word := law.judge(place), word) for place in range(len(law.axes))]
    parts = [f"{_slope_text(law, place)} a doubling of {AXES[axis]} ({verdicts[place]})"
             for place, axis in enumerate(law.axes)]  # fmt: skip
    return f"{group.name}: the best rate moves by {join_words(parts)}."


def _slope_text(law: Law, place: int) -> str:
    value, half = law.slope(place)
    within = f" (80 %: {_signed(value - half)} to {_signed(value + half)})" if math.isfinite(half) else ""
    return f"{_signed(value)} decades{within}"


def _signed(decades: float) -> str:
    return f"{round(decades, 2) + 0.0:+.2f}"  # +0.00 instead of -0.00


def describe_trials(group: Group) -> str:
    """Return how the law of the smaller sizes fared at the largest one, beside the rules without a law."""
    if not group.trials:
        return ""
    largest = group.curves[-1]
    tried = [_trial_text(trial) for trial in group.trials if trial.rule in (LAW, SMALLEST, LAST)]
    truth = largest.best.open or f"best {power(largest.best.lr)}"
    place = f"{group.name} {group.locate(largest.size)}"
    return f"Back-test of {place} ({truth}), from the smaller sizes: {'; '.join([*tried, *_beside_text(group)])}."


def _beside_text(group: Group) -> list[str]:
    """Return how upper edge and α_max/α of the smaller sizes fared at the largest one, those that are known."""
    said, largest = group.predict_largest(), group.curves[-1]
    found = []
    if math.isfinite(said.edge):
        known = f"found {power(10**largest.edge)}" if math.isfinite(largest.edge) else "no swept rate is too large"
        found.append(f"upper edge: predicted {power(10**said.edge)}, {known}")
    if math.isfinite(said.ratio) and largest.numbers.ratio.n:
        known = significant(largest.numbers.ratio.median)
        found.append(f"α_max/α: predicted {significant(said.ratio)}, found {known}")
    return found


def _trial_text(trial: Trial) -> str:
    inside = "" if math.isinf(trial.half) else f", {'inside' if trial.is_inside else 'outside'} its 80 % interval"
    error = f" ({_signed(trial.error)} decades{inside})" if math.isfinite(trial.error) else ""
    return f"{trial.rule} {power(10**trial.log_lr)}{error}, {_loss_text(trial)}"


def _loss_text(trial: Trial) -> str:
    if math.isnan(trial.regret):
        return "its cost is unknown: no runs at such rates"
    return "beside diverged runs" if math.isinf(trial.regret) else f"costs {100 * trial.share:.1f} % of the NLL"


def describe_prediction(group: Group, target: Mapping[str, float]) -> str:
    """Return the rate to take at a size, or why it cannot be predicted."""
    found = group.predict(target)
    place = locate(target)
    if found.reasons:
        last = group.curves[-1]
        rest = "" if last.best.open else f" The best rate {group.locate(last.size)} is {power(last.best.lr)}."
        return f"{group.name} {place}: cannot predict: {'; '.join(found.reasons)}.{rest}"
    apart = ""
    if group.varies_apart:
        names = join_words(AXES[axis] for axis in group.axes)
        apart = f" No runs vary {names} together: their effects are taken to add up."
    return f"{group.name} {place}: {_prediction_text(group, found)}.{apart}"


def _prediction_text(group: Group, found: Prediction) -> str:
    low, high = map(power, found.interval)
    parts = [f"take {power(10**found.log_lr)} (80 %: {low} to {high})"]
    if not math.isnan(found.edge):
        parts.append(f"up to about {power(10**found.edge)} costs < 5 %")
    elif open_at := [curve for curve in group.curves if math.isnan(curve.edge)]:
        places = join_words(group.locate(curve.size) for curve in open_at)
        parts.append(f"the upper edge is unknown, since {places} no swept rate is too large")
    if not math.isnan(found.ratio):
        parts.append(f"α_max/α about {significant(found.ratio)}")
    return "; ".join(parts)


def describe_comparisons(groups: Sequence[Group]) -> str:
    """Return each group's lowest NLL beside the first group's, at the largest size that both have; "" for none."""
    largest = {each.other.name: each for each in compare_groups(groups)}  # sizes ascend, so the last one stays
    return " ".join(_comparison_text(each) for each in largest.values())


def _comparison_text(found: Compared) -> str:
    low, high = found.bests.result.interval
    seeds = plural(found.bests.result.n, "seed")
    ends = f"{_percent(low).removesuffix(' %')} to {_percent(high)}"
    within = f"95 %: {ends}, {seeds}" if found.bests.result.n > 2 else seeds
    place = found.reference.locate(found.size)
    verdict = _verdict(found)
    return (
        f"{found.other.name} against {found.reference.name} {place}, each at its own best rate: NLL "
        f"{_percent(found.bests.result.size[0])} ({within}): {verdict}."
    )


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f} %" if math.isfinite(share) else "unknown"


def _verdict(found: Compared) -> str:
    if not found.is_decided:
        return "undecided"
    return "lower" if found.bests.result.direction < 0 else "higher"


def comparison_table(groups: Sequence[Group]) -> Table | None:
    """Return one row per size and group: lowest NLL beside the first group's, paired over seeds; None for none."""
    rows = [
        (
            Cell(f"{found.other.name} − {found.reference.name}"),
            Cell(found.reference.describe(found.size)),
            Cell(f"{found.bests.second:.3f}"),
            Cell(f"{found.bests.first:.3f}"),
            Cell(_percent(found.bests.result.size[0])),
            Cell(" to ".join(map(_percent, found.bests.result.interval)) if found.bests.result.n > 2 else "--"),
            Cell(str(found.bests.result.n)),
            Cell(_verdict(found)),
        )
        for found in compare_groups(groups)
    ]
    caption = (
        "Lowest NLL of each seed over the swept rates: medians, and the paired relative difference, mean over "
        "seeds. Sizes with an open best rate are left out. Verdict: Student's t at the 5 % level, after Holm's "
        "correction for the rows; below three seeds none."
    )
    header = ("", "size", "reference's NLL", "NLL", "difference", "95 %", "seeds", "verdict")
    return Table("NLL at the best rates", caption, header, tuple(rows)) if rows else None


def best_table(study: Study, groups: Sequence[Group] = ()) -> Table:
    """Return one row per group and size: best rate, its NLL, the upper edge, sensitivity and α_max / α.

    Args:
        study: the study, for its words.
        groups: the groups; by default the study's.
    """
    rows = []
    for group in groups or groups_of(study):
        rates = group.list_common_rates()
        for number, curve in enumerate(group.curves):
            first = Cell(group.name, _rates_text(rates)) if number == 0 else Cell("")
            rows.append((first, Cell(group.describe(curve.size)), *_cells(curve, rates)))
    header = ("", "size", "fitted best LR", "NLL", "within 5 % up to", "S", "α_max/α")
    kept = [place for place in range(len(header)) if place < 3 or any(row[place].text != "--" for row in rows)]
    caption = (
        "Fitted best LR: for each seed the lowest point of a parabola through the lowest NLL and its neighbours, mean "
        "over seeds in log10; ±: its standard error in decades, which includes the spacing of the rates. "
        f"NLL ({wording.words(study).nll}): lowest median over seeds. S: mean over the rates that all sizes of a group "
        "share of the NLL (or the untrained model's, if lower), less the lowest; these rates below the group, for at "
        f"least {FEWEST_SHARED}."
        f"{' α_max/α: at the best measured rate.' if len(header) - 1 in kept else ''}"
    )
    return Table(
        TITLE,
        caption,
        tuple(header[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in rows),
        brief=(
            "Fitted best LR: lowest point of a parabola through each seed's lowest NLLs, mean over seeds. S: nats "
            "above the lowest NLL, mean over the rates that all sizes share. 0.30 decades are a factor of 2."
            + (" Open: no lowest point between the rates." if any(row[2].text == "open" for row in rows) else "")
        ),
    )


def _rates_text(rates: Sequence[float]) -> str:
    if len(rates) < FEWEST_SHARED:
        return ""
    return f"S: {len(rates)} rates, {power(rates[0])} to {power(rates[-1])}"


def _cells(curve: Curve, rates: Sequence[float]) -> tuple[Cell, ...]:
    best, edge = curve.best, curve.edge
    at_least = power(curve.window.high.lr) if curve.window else ""
    return (
        Cell("open", best.open) if best.open else Cell(power(best.lr), f"±{best.error:.2f}"),
        Cell(f"{curve.best_nll:.3f}" if math.isfinite(curve.best_nll) else "--"),
        Cell(power(10**edge) if math.isfinite(edge) else f"at least {at_least}" if at_least else "--"),
        spread_cell(curve.sensitivity(rates), "{:.3f}".format) if len(rates) >= FEWEST_SHARED else Cell("--"),
        spread_cell(curve.numbers.ratio, significant),
    )


def first_table(study: Study) -> Table:
    """Return `best_table` without the lines below its values, for the first page."""
    table = best_table(study)
    return replace(table, rows=tuple(tuple(replace(cell, detail="") for cell in row) for row in table.rows))


def law_table(groups: Sequence[Group]) -> Table | None:
    """Return one row per group and axis: decades per doubling, interval, scatter and verdict; None without a law."""
    rows = [
        (
            Cell(group.name),
            Cell(AXES[axis]),
            Cell(f"{law.slope(place)[0]:+.3f}"),
            Cell("--" if math.isinf(law.slope(place)[1]) else f"±{law.slope(place)[1]:.3f}"),
            Cell(f"{law.scatter:.3f}"),
            Cell(law.judge(place)),
        )
        for group in groups
        if (law := group.law) is not None
        for place, axis in enumerate(law.axes)
    ]
    caption = (
        "Least squares of log10 of the best rate against log2 of the size, weighted by the rates' errors. Scatter: "
        f"standard deviation around the law, at least {FLOOR_DECADES}. Transfers: at most {FLAT_DECADES} decades a "
        f"doubling, and the 80 % interval within ±{FLAT_WITHIN}. Drifts: the 95 % interval excludes 0."
    )
    header = ("", "size", "decades a doubling", "80 %", "scatter", "verdict")
    return Table("How the best rate moves", caption, header, tuple(rows)) if rows else None


def trial_table(groups: Sequence[Group]) -> Table | None:
    """Return one row per rule: rate for the largest size, error and regret; None without a back-test."""
    rows = [
        (
            Cell(f"{group.name}, {group.describe(group.curves[-1].size)}" if number == 0 else ""),
            Cell(trial.rule),
            Cell(power(10**trial.log_lr)),
            Cell("--" if math.isnan(trial.error) else _signed(trial.error)),
            Cell("--" if math.isinf(trial.half) else f"±{trial.half:.2f}"),
            _regret_cell(trial.regret),
            Cell(f"{100 * trial.share:.2f} %" if math.isfinite(trial.share) else "--"),
        )
        for group in groups
        for number, trial in enumerate(group.trials)
    ]
    caption = (
        "The largest size as if it had not been swept. Error: decades from the best rate there; law: with its 80 % "
        "interval. Regret: NLL at the rule's rate, interpolated between the swept rates, less the lowest; median over "
        "seeds. Step Law: η ∝ N^−0.713 (Li et al. 2025), of runs whose batch is tuned as well. steps^−0.32: Bjorck et "
        "al. 2024, at a fixed batch. √batch: Malladi et al. 2022."
    )
    header = ("", "rule", "LR", "error", "80 %", "regret (nats)", "of the NLL")
    return Table("Back-test on the largest size", caption, header, tuple(rows)) if rows else None


def _regret_cell(nats: float) -> Cell:
    return Cell("--" if math.isnan(nats) else "diverged" if math.isinf(nats) else f"{nats:.3f}")


def matrix_table(group: Group) -> Table:
    """Return the nats lost at each column's size with the best rate of each row's."""
    names = [group.describe(curve.size) for curve in group.curves]
    rows = [
        (Cell(name), *(_regret_cell(nats) for nats in row)) for name, row in zip(names, group.regrets(), strict=True)
    ]
    caption = (
        "Regret in nats: NLL at the best rate of the row's size, used at the column's, less the lowest there; "
        "interpolated between the swept rates, median over seeds. --: outside them, or an open best rate."
    )
    return Table(f"Tuned at one size, used at another: {group.name}", caption, ("tuned at", *names), tuple(rows))


def tables_of(study: Study) -> list[Table]:
    """Return the tables of laws, back-tests, NLLs and regrets.

    Where the series have references, their comparisons are corrected together, and NLLs have no second verdict.
    """
    groups, is_compared = groups_of(study), bool(against_reference(judge(study)))
    matrices = (matrix_table(group) for group in groups)
    found = [law_table(groups), trial_table(groups), None if is_compared else comparison_table(groups), *matrices]
    return [table for table in found if table is not None]


def tables(study: Study, phases: Sequence[str]) -> list[Table | str]:
    return [best_table(study), *tables_of(study), *sentences(study)]


def figures(study: Study) -> Figures:
    figure = draw(groups_of(study))
    return {} if figure is None else {NAME: Captioned(figure, CAPTION)}


def body(study: Study, drawn: Drawn) -> Pieces:
    first = box(sentences(study)) + pictures(drawn)
    return heading(TITLE) + first + shown([best_table(study), *tables_of(study)])


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the tables that the first page lacks, and its own with intervals."""
    return heading(TITLE) + shown([best_table(study), *tables_of(study)])


SECTION = Section(body, applies, figures, tables, brief)
