"""Answer a study's question: how far can each learning rate be pushed, and what breaks first?

The report's first page and the end of a sweep have the same table and sentences.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from analysis.claims.claim import sentence
from analysis.drawing.tables import limits, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.measures import cell_at, percent_digits, spread_cell
from analysis.numbers import optimizers
from analysis.numbers.at_best_rate import Numbers, numbers_of
from analysis.numbers.common_windows import common_windows, rank_variants, shorten_variant
from analysis.numbers.first_failure import first_failure, share_lost, worse_failures
from analysis.numbers.learning import LEARNED_LITTLE, unlearned_words
from analysis.numbers.optimizers import compares_optimizers_alone
from analysis.numbers.recall import Answered, answered, recalled_share
from analysis.numbers.spread import FEW_RULE, FEWEST_FOR_MEDIANS, MEDIAN_RULE, Spread
from analysis.numbers.windows import KEPT, SeriesWindows, Window, explain_absence, outcomes, windows
from analysis.sections import prediction, transfer
from analysis.sections.choice import answer_setting, choose, upper_edge
from analysis.sections.sentences import UNDECIDED, sentences
from analysis.study import wording
from analysis.study.load import ENDED, Study
from analysis.study.reference import compares_losses, reference_series, references, unlearned
from analysis.words import join_words, lr_text, plural, power, significant
from stability.runs.words import LEARNED_NOTHING

MOST_LINES = 20  # with what a sweep prints before and after: 25
MOST_ROWS = 6  # of a study of many series
RANKED_ROWS = 5  # of many variants, whose ranking is a sentence of the same page
CHOICE_LINES = 2
FEWEST_COLUMNS = 4  # of a table too wide for a line
LINE = 80  # characters
NAMED = 4  # series in the title


def answer(study: Study) -> str:
    """Return the table of best rates and the sentences, in at most `MOST_LINES` lines.

    A study of many series is cut to those of the lowest NLL, and a line counts the others. A sentence without room is
    left out. A study of sizes has `transfer`'s table and sentences.
    """
    if transfer.leads(study):
        return transfer.answer_text(study, MOST_LINES, LINE)
    found = {name: each.median for name, each in windows(study).items()}
    shown = best_series(study)
    lines = [
        *_narrow(answer_table(study, shown), plural(study.runs["seed"].nunique(), "seed")),
        *_fitting_choice(study),
    ]
    told = {name: textwrap.wrap(f"{name}: {recommendation(study, name, found[name])}", LINE) for name in shown}
    room, ranked = MOST_LINES - len(lines), _rank(study)
    while sum(map(len, told.values())) + (len(told) < len(found)) > room:  # 1: the line that counts the others
        told.pop(max(told, key=ranked.index))
    lines += [line for each in told.values() for line in each]
    if num_more := len(found) - len(told):
        lines.append(f"tables=all has the {len(found)} series, {num_more} more than these sentences")
    room = MOST_LINES - len(lines)
    for most in range(NAMED, 0, -1):  # fewer claims in a sentence if it does not fit
        wrapped = [textwrap.wrap(sentence, LINE) for sentence in sentences(study, most)]
        if wrapped and len(wrapped[0]) <= room:
            break
    for part in wrapped:
        if len(part) > room and part[0].startswith(UNDECIDED):
            part = textwrap.wrap(f"{' '.join(part).partition(';')[0].rstrip('.')}.", LINE)  # the number alone
        if len(part) <= room:
            lines, room = lines + part, room - len(part)
    return "\n".join(lines)


def _fitting_choice(study: Study) -> list[str]:
    """Return which mechanism to choose in at most two lines; without its end if that exceeds them."""
    parts = choose(study)
    wrapped = (textwrap.wrap(" ".join(parts[:most]), LINE) for most in range(len(parts), 0, -1))
    return next((lines for lines in wrapped if len(lines) <= CHOICE_LINES), [])


def _narrow(table: Table, seeds: str) -> list[str]:
    """Return a table as lines, without the last columns that exceed a line; ``seeds``: end of its title."""
    text = table.text(details=False, wrap=LINE)
    while len(text.splitlines()[1]) > LINE and len(table.header) > FEWEST_COLUMNS:
        rows, is_common = tuple(row[:-1] for row in table.rows), table.header[-1] == COMMON
        brief = f"{table.brief.partition(';')[0]}." if is_common else table.brief
        table = Table(table.title, table.caption, table.header[:-1], rows, brief=brief)
        text = table.text(details=False, wrap=LINE)
    title, _, *rest = text.splitlines()
    return [f"{title} ({seeds})", *rest]


def best_series(study: Study) -> list[str]:
    """Return the series of the answer: all in the study's order, or of many the first ones by NLL, and the reference.

    Of an ablation over rates: base and reference, and those that can be pushed furthest, in that order.
    """
    if len(study.series) < MOST_ROWS:
        return list(study.series)
    if ranked := rank_variants(study):
        based = [name for name in ranked if name in set(study.runs["base"])]
        bases = [*dict.fromkeys([*based[:1], *compared_with(study)])]
        first = [name for name in ranked if name not in bases][: RANKED_ROWS - len(bases)]
        return [name for name in ranked if name in (*first, *bases)]
    reference = lists_reference(study)
    return [*_rank(study)[: MOST_ROWS - 1], reference] if reference else _rank(study)[:MOST_ROWS]


def lists_reference(study: Study) -> str:
    """Return the reference of a study with many series if it is none of the first ones by NLL; else ""."""
    beyond = [] if rank_variants(study) else [name for name in compared_with(study) if name in _rank(study)[MOST_ROWS:]]
    return "".join(beyond)


def compared_with(study: Study) -> list[str]:
    """Return the reference's first series if any series is compared with it, of optimizers AdamW's; else []."""
    if compares_optimizers_alone(study):
        return [optimizers.find_plain(optimizers.numbers_of(study, study.series)).series]
    first = reference_series(study)
    return [first] if first in references(study).values() else []


def _rank(study: Study) -> list[str]:
    """Return the series by their best NLLs, those of an ablation over rates by `rank_variants`."""
    best = {name: each.median.best_nll if each.median else math.inf for name, each in windows(study).items()}
    return rank_variants(study) or sorted(best, key=lambda name: best[name])


def title(study: Study) -> str:
    """Return the question with its answer: the upper edges of the common windows, or of the own ones without these.

    A study of sizes has `transfer`'s question, one whose series have rates of their own that of `prediction`, one of a
    single named setting that of `answer_setting`. Optimizers at rates of their own are ranked by their NLLs. Recall is
    answered by the share of right answers.
    """
    if transfer.leads(study):
        return transfer.title(study)
    if recalled_share(study) and not prediction.leads(study):
        return _title_of_recall(study)
    if study.runs["lr"].nunique() == 1:
        return _title_of_one_rate(study)
    common, medians = common_windows(study), {name: each.median for name, each in windows(study).items()}
    lacking = unlearned_words(study)
    trained = [name for name, each in medians.items() if each is not None and not lacking[name]]
    question = "How far can the learning rate be pushed"
    if not study.runs["status"].isin(ENDED).any():
        return f"{question}? {sentence(explain_absence(study.runs))}"
    if prediction.leads(study):
        return prediction.title(study)
    if not trained:
        learned = "enough" if LEARNED_LITTLE in lacking.values() else "anything"
        return f"{question}? No mechanism learned {learned} at the rates swept"
    if said := answer_setting(study):
        return said
    if study.is_in_multiples and compares_optimizers_alone(study):  # their rates have no common unit
        return f"Which optimizer has the lowest NLL, each at rates of its own? {_say_lowest(study, 'optimizer')}"
    found = common if set(trained) <= common.keys() else windows(study)
    limit = limits(study, trained, "the")[found is common].replace("'", "’")
    uppers = {name: each.median for name in trained if (each := found[name]).median is not None}
    reached = {name: each for name, each in uppers.items() if not each.is_empty}
    never = [name for name in trained if name not in reached]
    if not reached:
        return f"{question} {limit}? {join_words(never)} never come so close"
    base = reference_series(study)
    if (ranked := [name for name in rank_variants(study) if name in reached]) and base in reached:
        furthest, brackets = ranked[0], [_upper_bracket(study, reached[name])[1] for name in (base, ranked[0])]
        if len(set(brackets)) == 1:
            return f"{question} {limit}? {base} to {brackets[0]}, no series further on this grid"
        places = [text.removeprefix("between ").replace(" and ", "–") for text in brackets]
        is_variant = furthest.startswith(f"{base} ")
        more = f", with {shorten_variant(study, furthest)}" if is_variant else f", {furthest}"
        return f"{question} {limit}? {base} to {places[0]}{more} to {places[1]}"
    groups: dict[tuple[float, str], list[str]] = {}
    for name in sorted(reached, key=lambda name: reached[name].high.lr):
        groups.setdefault(_upper_bracket(study, reached[name]), []).append(name)
    parts = [f"{_list_or_count(names)} to {place}" for (_, place), names in groups.items()]
    return f"{question} {limit}? {join_words(parts)}{f'; {_list_or_count(never)} at no swept rate' if never else ''}"


def _list_or_count(names: Sequence[str]) -> str:
    return join_words(names) if len(names) <= NAMED else f"{len(names)} mechanisms"


def _upper_bracket(study: Study, found: Window) -> tuple[float, str]:
    """Return the last swept rate inside a window, and the place of its upper edge in words."""
    times = " times its own rate" if study.is_in_multiples else ""
    last, first = lr_text(found.high.inside_lr), lr_text(found.high.outside_lr)
    if found.open_high:
        return found.high.inside_lr, f"at least {last}{times}"
    return found.high.inside_lr, f"between {last} and {first}{times}"


def _title_of_one_rate(study: Study) -> str:
    """Return the series with the lowest NLLs at the only rate."""
    place = f"at the learning rate {lr_text(float(study.runs['lr'].iloc[0]))}"
    name, *others = study.series
    if others:
        return f"Which has the lowest NLL {place}? {_say_lowest(study, 'series')}"
    known = _lowest_first(study)
    said = f"NLL {known[0][0]:.3f}" if known else _explain_title(study, name, windows(study)[name].median)
    return f"How well does {name} learn {place}? {said}"


def _title_of_recall(study: Study) -> str:
    """Return each series' share of right answers at its best rate, the largest first."""
    best = {name: each.best.median for name, each in answered(study).items() if each.best.n}
    ranked = sorted(best, key=lambda name: -best[name])
    if len(study.series) == 1:
        return f"How much does {ranked[0]} recall? {percent_digits(best[ranked[0]])} % of the answers"
    said = [f"{name} {percent_digits(best[name])} %" for name in ranked[:NAMED]]
    said += [f"{len(ranked) - NAMED} others less"] if len(ranked) > NAMED else []
    lost = [name for name in study.series if name not in best]
    return f"Which mechanism recalls? {', '.join(said)}{f'; without a result: {_list_or_count(lost)}' if lost else ''}"


def _lowest_first(study: Study) -> list[tuple[float, str]]:
    """Return the best NLL and the name of each series that learned something, sorted."""
    found = {name: each.median for name, each in windows(study).items()}
    lacking = unlearned_words(study)
    return sorted((each.best_nll, name) for name, each in found.items() if each and lacking[name] != LEARNED_NOTHING)


def _say_lowest(study: Study, column: str) -> str:
    """Name the series with the lowest NLLs by a column of their runs."""
    known = _lowest_first(study)
    ranked = [f"{study.of(name)[column].iloc[0]} ({nll:.3f})" for nll, name in known[:NAMED]]
    more = f", {len(known) - NAMED} others higher" if len(known) > NAMED else ""
    return join_words(ranked) + more if ranked else "None has learned anything"


def lowest_nll(study: Study) -> str:
    """Return the series with the lowest NLL and its rate, "sa at 3e-3 (2.089)", or "nothing learned".

    "" for NLLs of several data, objectives or losses, which do not compare.
    """
    if compares_losses(study) or study.runs[["data", "objective"]].drop_duplicates().shape[0] > 1:
        return ""
    known = {name: each.median for name, each in windows(study).items()}
    learned = {name: each for name, each in known.items() if each and unlearned_words(study)[name] != LEARNED_NOTHING}
    if not learned:
        return "nothing learned"
    name = min(learned, key=lambda name: learned[name].best_nll)
    return f"{name} at {lr_text(learned[name].best_lr)} ({learned[name].best_nll:.3f})"


def _explain_title(study: Study, name: str, found: Window | None) -> str:
    return sentence(explain_absence(study.of(name))) if found is None else "It learned nothing"


def answer_table(study: Study, series: Sequence[str] = ()) -> Table:
    """Return one row per series: best rate, NLL, both windows, first failure, α_max / α, time of a step.

    Args:
        study: the study.
        series: the rows; by default `best_series`.
    """
    names = list(series) or best_series(study)
    unit = ", rates in multiples of each optimizer's own" if study.is_in_multiples else ""
    others = len(study.series) - len(names)
    more = f"{spread_told([study])}{f' {others} further series: appendix.' if others else ''}"
    rows, share = [rows_of(study, names)], recalled_share(study)
    told = f"NLL: {wording.words(study).nll}."
    return _table(f"Best learning rates{unit}", rows, told, limits(study, names, "its"), more, share and share.name)


def comparison_table(studies: Sequence[Study]) -> Table:
    """Return the rows of `answer_table` for several studies, each under its name."""
    found, shares = [], [recalled_share(study) for study in studies]
    share = shares[0] if all(shares) else None
    for study in studies:
        names = best_series(study)
        unit = ": rates times each optimizer's own" if study.is_in_multiples else ""
        first = [Cell(names[0], f"{study.name}{unit}"), *(Cell(name) for name in names[1:])]
        rows = rows_of(study, names, is_recall=share is not None)
        found.append([(cell, *row[1:]) for cell, row in zip(first, rows, strict=True)])
    texts = zip(*(limits(study, best_series(study), "its") for study in studies), strict=True)
    own, common = (" or ".join(dict.fromkeys(each)) for each in texts)
    counts = [(len(study.series) - len(best_series(study)), study.name) for study in studies]
    further = join_words(f"{number} further series of {name}" for number, name in counts if number)
    told = "Below a first mechanism its study. NLLs of different data or objectives are not comparable."
    told += f" Not here: {further}." if further else ""
    more = spread_told(studies)
    return _table("The studies side by side", found, told, (own, common), more, share and share.name)


def rows_of(study: Study, names: Sequence[str], *, is_recall: bool | None = None) -> list[tuple[Cell, ...]]:
    """Return the cells of some series, a row each, in the columns of `answer_table`.

    Args:
        study: the study.
        names: the series.
        is_recall: whether the share of right answers has its column, and the windows are its own; by default of recall.
    """
    numbers, common = numbers_of(study, {name: name for name in names}, {}), common_windows(study)
    shares = answered(study) if is_recall is not False else {}
    return [_row(study, numbers[name], common, shares.get(name)) for name in names]


RATIO, STEP = "α_max/α", "step"
OWN, COMMON, FAILURE = "own window", "common window", "first failure"
WIDTHS = ("auto", "auto", "auto", "1fr", "1fr", "1fr", "auto", "auto")
RATIO_TOLD = (
    f"{RATIO}, at the best rate: largest rate that still lowers the batch's loss along the optimizer's own step (to "
    "second order), divided by the rate of training. Training at that multiple of the rate need not work."
)
FAILURE_TOLD = (
    "First failure: first rate above the best at which a run diverged, exploded (NLL above the untrained model's), "
    "learned nothing or spiked; without one, the share of the learning lost at the last rate."
)


def spread_told(studies: Sequence[Study]) -> str:
    """Return what a cell's value and its second line are; ``studies``: those of the table."""
    most = max(study.runs["seed"].nunique() for study in studies)
    return f"Medians. {MEDIAN_RULE if most >= FEWEST_FOR_MEDIANS else FEW_RULE}."


def _table(
    title: str,
    groups: Sequence[list[tuple[Cell, ...]]],
    told: str,
    limits_told: tuple[str, str],
    more: str,
    share: str | None,
) -> Table:
    """Return a table of rows as in `rows_of`, without columns that have no value."""
    shared = (f"{share} (%)", f"window of {share}") if share else (OWN, COMMON)
    header = ("mechanism", "best LR", "NLL", *shared, FAILURE, RATIO, STEP)
    rows = [row for group in groups for row in group]
    kept = [place for place in range(len(header)) if place < 3 or any(row[place].text != "--" for row in rows)]
    names = [header[place] for place in kept]
    own, common = limits_told
    what, _, whose = common.partition(" of ")
    common = f"of {whose}" if own.startswith(f"{what} of ") else common
    brief = f"Own window (decades): {own}" + (f"; common: {common}." if COMMON in names else ".")
    closer = " Here 5 % of the NLL is more than half of the learning." if own.startswith("keeping") else ""
    windows_told = f"{brief}{closer} Windows of medians over seeds; differences named elsewhere are means over seeds."
    if share:
        brief = f"Window of {share} (decades): the rates that keep {100 * KEPT:g} % of the best {share}."
        told = f"{told} {share.capitalize()}: the best over rates."
    parts = [
        told,
        brief if share else windows_told if OWN in names else "",
        FAILURE_TOLD if FAILURE in names else "",
        "Step: time of a training step, by the runs’ own clocks." if STEP in names else "",
        RATIO_TOLD if RATIO in names else "",
        more,
    ]
    return Table(
        title,
        " ".join(filter(None, parts)),
        tuple(names),
        tuple(tuple(row[place] for place in kept) for row in rows),
        widths=tuple(WIDTHS[place] for place in kept),
        brief=brief if share or OWN in names else told,
    )


def _step_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def _row(
    study: Study, numbers: Numbers, common: dict[str, SeriesWindows], answers: Answered | None
) -> tuple[Cell, ...]:
    """Return the cells of one series; with ``answers`` its best share and its window in place of both of the NLL."""

    def pair(own: Cell, beside: Cell) -> tuple[Cell, Cell]:
        return (own, beside) if answers is None else (spread_cell(answers.best, percent_digits), own)

    series, found = numbers.series, windows(study)[numbers.series].median
    spread = Spread.of(numbers.step_s.values())
    last = (spread_cell(numbers.ratio, significant), Cell(_step_text(spread.median) if spread.n else "--"))
    if found is None:
        runs = study.of(series)
        why, has_failed = Cell(explain_absence(runs)), (runs["status"] == "diverged").any()
        own, failure = (Cell("--"), why) if has_failed else (why, Cell("--"))
        return (Cell(series), Cell("--"), Cell("--"), *pair(own, Cell("--")), failure, *last)
    nll_cell = cell_at(study, series, found.best_lr)
    word = unlearned_words(study)[series]
    best = Cell("--" if word == LEARNED_NOTHING else lr_text(found.best_lr))
    if word or found.has_one_rate:  # the less is learned, the wider a window
        return (Cell(series), best, nll_cell, *pair(Cell(word or "--"), Cell("--")), Cell("--"), *last)
    beside = common[series].median if series in common else None
    own = found if answers is None or answers.window is None else answers.window
    both = pair(_window_cell(own), Cell("--") if beside is None else _window_cell(beside))
    return (Cell(series), best, nll_cell, *both, Cell(_failure_text(study, series, found)), *last)


def _failure_text(study: Study, series: str, found: Window) -> str:
    """Return the first failure's rate and runs; without one, the share of the learning lost at the last rate."""
    failure = first_failure(study, series, found)
    if failure is not None:
        return f"{lr_text(failure.lr)}: {failure.runs}/{failure.of} {failure.kind}"
    lost = share_lost(study, series, found)
    if lost is None:
        return "none"
    percent = round(100 * lost[1])
    share = f"{percent} %" if percent else "nothing"
    return f"{lr_text(lost[0])}: {share} lost"


def _window_cell(found: Window) -> Cell:
    """Return a window's rates and width."""
    if found.is_empty:
        return Cell("none")
    return Cell(f"{power(found.low.lr)}–{power(found.high.lr)} ({width_text(found)})")


def recommendation(study: Study, series: str, found: Window | None) -> str:
    """Return a sentence: the rate to take, the largest good one, the first that fails; seeds, if some lack a result.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL; None without a finite run.
    """
    if found is None:
        return explain_absence(study.of(series))
    ended = outcomes(study, series).notna()
    of, number = study.runs["seed"].nunique(), int(ended.loc[found.best_lr].sum())
    seeds = "" if number == of else f"known from {number} of {plural(of, 'seed')}"
    word = unlearned_words(study)[series]
    if word == LEARNED_NOTHING:
        start = unlearned(study, series)
        known, swept = int(ended.any(axis=1).sum()), len(ended)
        where = "any rate swept" if known == swept else f"the {known} of {swept} rates with a result"
        steps = study.of(series)["planned_steps"].max()
        advice = f"train longer (steps={steps:.0f} now)" if known == swept and math.isfinite(steps) else ""
        parts = [f"learned nothing at {where} ({start.name} reach {start.nll:.3f})", advice, seeds]
        return "; ".join(filter(None, parts))
    parts = [
        f"take {lr_text(found.best_lr)}{_end_of_grid(found)}",
        f"{word} for a window" if word else upper_edge(found, answered(study).get(series)),
    ]
    failure = first_failure(study, series, found)
    lost = None if failure or found.open_high else share_lost(study, series, found)
    at_end = "" if lost is None else f"at {lr_text(lost[0])}, {100 * lost[1]:.0f} % of the learning is lost"
    worse = worse_failures(study, series, found)
    first = replace(failure, beyond="") if failure and worse else failure
    parts += [first.clause if first else at_end, *(each.clause for each in worse)]
    return "; ".join(filter(None, [*parts, seeds]))


def _end_of_grid(found: Window) -> str:
    """Return a warning if the best rate is the smallest or largest one; "" otherwise."""
    if "unmeasured" in (found.low.kind, found.high.kind):
        return ""
    low, high = (found.best_lr == end for end in found.grid)
    if low and high:
        return " (the only rate swept)"
    return " (the smallest swept: try smaller ones)" if low else " (the largest swept: try larger ones)" if high else ""
