"""Make the first two pages: the answer with a figure and a table; then α_max, a diagnostic and learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import matplotlib
from matplotlib.figure import Figure

from analysis.claims.claim import sentence
from analysis.drawing.pieces import PageBreak, Picture, Pieces, box, paragraph, small
from analysis.drawing.style import RC
from analysis.drawing.typeset import Table
from analysis.numbers.ablations import ablations
from analysis.numbers.common_windows import rank_variants
from analysis.numbers.learning import say_little
from analysis.numbers.recall import recalled_share
from analysis.numbers.step_shares import PHASES
from analysis.numbers.window_ends import shown_states
from analysis.sections import alpha, curves, transfer
from analysis.sections.choice import breaks, choose
from analysis.sections.headline import (
    answer_table,
    best_series,
    compared_with,
    lists_reference,
    spread_told,
    title,
)
from analysis.sections.nll_figures import NLL, nll_caption, nll_figure
from analysis.sections.overview import provenance_line
from analysis.sections.sentences import NAMED, is_in_a_table, sentences
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.naming import spell
from analysis.study.once import once_per_study
from analysis.study.reference import reference_series
from analysis.words import join_words, lr_text, plural, value_text
from stability.runs.words import EXPLODED, LEARNED_NOTHING

# Names of figures in order of preference.
FIRST = ("nll", "optimizers", "ablation-0", "mixers", "edges")
TELLING = (
    "streams-terminal-0",
    "qk-terminal-0",
    "mirror-terminal-0",
    "filter-terminal-0",
    "prediction-roc",
    "gradients",
)
ENDS = ("diverged", EXPLODED, "spiked", LEARNED_NOTHING, "failed", "running", "interrupted", "stopped", "queued")
FEW_SERIES = 4
MOST_SETTINGS = 2  # whose values the first page gives for the base
LINE = 110  # characters
TITLE_LINE, TITLE_LINES = 60, 2  # characters; lines of a title for which there is room
MOST_LINES, MOST_LINES_LOW = 35, 39  # lines of text on the first page beside a figure of full height, a lower one
TALL = "optimizers"  # has a row for each series
ALPHA, CURVES, FEW = "alpha-in-brief", "curves-in-brief", "nll-in-brief"
ALPHA_CAPTION = (
    "α_max of the recorded steps, from the run's own optimizer state, against the learning rate, {phase}. Points: "
    "steps; line: median of the finite ones; triangles with their number: steps without positive curvature (α_max is "
    "∞) or without descent (0). Above the dashed line (shaded) the training's own step lowers its batch's loss, to "
    "second order. α_max is no recommended rate: it may lie far above the rate of a run that learned nothing."
)
CURVES_CAPTION = (
    "Training loss against step by learning rate, averaged over a twentieth of the run: median over seeds, ending "
    "where half of them diverged; shade: their range; circles: validation NLL."
)
Find = Callable[[tuple[str, ...]], Picture | None]


def list_first(study: Study) -> tuple[str, ...]:
    """Return the names of the first page's figure, in order of preference.

    A study of sizes begins with the law, one of recall with the share of right answers.
    """
    if transfer.leads(study):
        return ("transfer", *FIRST)
    share = recalled_share(study)
    return (share.column.removeprefix("val_"), *FIRST) if share else FIRST


def first_page(study: Study, find: Find, prefix: str) -> Pieces:
    """Return the first page below the title: what was run, a figure, the table, the sentences, the provenance.

    Without a figure over learning rates (at one rate) it has the learning curves.

    Args:
        study: the study.
        find: returns the first of the report's figures with one of some names.
        prefix: start of the figures' file names.
    """
    is_of_sizes = transfer.leads(study)
    table: Table = transfer.first_table(study) if is_of_sizes else _make_table(study)
    found, runs, last = find(list_first(study)) or _curves(study, prefix), describe_runs(study), provenance_line(study)
    title_lines = math.ceil(len(title(study)) / TITLE_LINE)
    fixed = 2 * max(0, title_lines - TITLE_LINES) + _count_lines(
        [runs, last, table.caption, found.caption if found else ""]
    )
    fixed += (2 if len(study.series) <= FEW_SERIES else 3) * len(table.rows)
    for most in range(NAMED, 0, -1):  # fewer claims in a sentence if the page is full
        said = transfer.sentences(study) if is_of_sizes else _sentences(study, most)
        if fixed + _count_lines(said) <= MOST_LINES_LOW:
            break
    else:
        said = [text for text in said if not is_in_a_table(text)]
    figure = _draw_best_series(study, found, is_low=fixed + _count_lines(said) > MOST_LINES)
    return paragraph(runs) + ((figure,) if figure else ()) + (table,) + box(said) + small(last) + (PageBreak(only=1),)


def _count_lines(texts: Sequence[str]) -> int:
    return sum(math.ceil(len(text) / LINE) for text in texts)


def _sentences(study: Study, most: int) -> list[str]:
    """Return whether little was learned, the choice, what breaks first, and the sentences that the terminal has, too.

    Of more than `FEW_SERIES`, the table alone says what breaks first. ``most``: claims named in a sentence.
    """
    broken = breaks(study, study.series) if len(study.series) <= FEW_SERIES else ""
    chosen = " ".join(choose(study, is_long=True))
    return list(filter(None, (say_little(study), chosen, broken, *sentences(study, most))))


def _make_table(study: Study) -> Table:
    """Return the table of the first page; of many series without intervals, which the appendix has."""
    table = answer_table(study)
    if len(best_series(study)) == len(study.series):
        return table
    rows = tuple(tuple(replace(cell, detail="") for cell in row) for row in table.rows)
    return replace(table, rows=rows, caption=table.caption.replace(f"{spread_told([study])} ", "Intervals and "))


def _draw_best_series(study: Study, found: Picture | None, *, is_low: bool) -> Picture | None:
    """Return the first page's figure with the table's series alone: of many, the appendix has the others."""
    shown = best_series(study)
    is_whole = len(shown) == len(study.series)
    if found is None or found.name not in (NLL, TALL):
        return found
    if is_whole and (found.name == TALL or (len(shown) <= FEW_SERIES and not is_low)):
        return found
    with matplotlib.rc_context(RC):
        figure = nll_figure(study, series=shown)
    if figure is None:
        return found
    if is_whole:
        return replace(found, figure=figure)
    chosen = "of the largest rates" if rank_variants(study) else "with the lowest NLLs"
    reference = lists_reference(study)
    beside, count = (f"{reference} and the", len(shown) - 1) if reference else ("The", len(shown))
    caption = f"{nll_caption(study, figure)} {beside} {count} series {chosen}; appendix: all."
    return Picture(FEW, figure, caption, found.file.replace(f"{found.name}.", f"{FEW}."))


def second_page(study: Study, find: Find, prefix: str) -> Pieces:
    """Return α_max against the rate, the most telling diagnostic, and learning curves that the first page lacks.

    Args:
        study: the study.
        find: as in `first_page`.
        prefix: start of the figures' file names.
    """
    row, _ = _brief_figures(study)
    found: list[Picture | None] = []
    if row is not None:
        figure, phase, measured = row
        caption = ALPHA_CAPTION.format(phase=PHASES.get(phase, phase)) + _count_panels(figure, measured)
        found.append(Picture(ALPHA, figure, caption, f"{prefix}{ALPHA}.pdf"))
    found.append(find(TELLING))
    if find(list_first(study)) is not None:
        found.append(_curves(study, prefix))
    return tuple(each for each in found if each is not None)


def _curves(study: Study, prefix: str) -> Picture | None:
    _, row = _brief_figures(study)
    if row is None:
        return None
    figure, logged = row
    return Picture(CURVES, figure, CURVES_CAPTION + _count_panels(figure, logged), f"{prefix}{CURVES}.pdf")


def _count_panels(figure: Figure, of: int) -> str:
    """Return a sentence on a figure with a panel for each of some series; "" if it has all of them."""
    return f" {len(figure.axes)} of {of} series; pages=all draws the others." if len(figure.axes) < of else ""


@once_per_study
def _brief_figures(study: Study) -> tuple[tuple[Figure, str, int] | None, tuple[Figure, int] | None]:
    """Draw α_max and the learning curves of the reference, then of the table's other series in their order."""
    first = [*compared_with(study), *best_series(study)]
    with matplotlib.rc_context(RC):
        return alpha.row_figure(study, first), curves.row_figure(study, first)


def describe_runs(study: Study) -> str:
    """Return the sweep's size, its runs' ends, model, objective and data, and the mechanisms' full names."""
    runs, spec = study.runs, study.spec
    lrs, seeds, number = sorted(set(runs["lr"])), runs["seed"].nunique(), len(study.series)
    span = lr_text(lrs[0]) if len(lrs) == 1 else f"{lr_text(lrs[0])} to {lr_text(lrs[-1])}"
    span += " times each optimizer's own" if study.is_in_multiples else ""
    kinds = plural(number, "mechanism") if runs["mechanism"].nunique() == number else f"{number} series"
    swept = runs.groupby("series")["lr"].nunique()  # rates of its own, e.g. of `lr=edge`, make no grid
    own = "" if swept.max() == len(lrs) else f"{_span_text(swept.min(), swept.max())} of "
    is_product = number * swept.max() * seeds == len(runs)
    by, in_all = (" ×", "") if is_product else (",", "" if own else " in all")
    of = f" of {wording.training(study)}" if {"steps", "batch"} <= spec.keys() else ""
    counts = shown_states(runs).value_counts()
    ended = join_words(f"{counts[status]} {status}" for status in ENDS if status in counts)
    model = "; ".join(filter(None, (wording.model(study), wording.objective(study), wording.recipe(study))))
    shown = runs[runs["series"].isin([*best_series(study), reference_series(study), *_titled(study)])]
    varied = [column for column in ("cross", "residual") if runs[column].nunique() > 1]
    short = [*shown["mechanism"], *(each for name in varied for each in shown[name]), *runs["objective"]]
    weights = wording.weights(study)
    said = [
        f"{kinds}{by} {own}{plural(len(lrs), 'learning rate')}{in_all} ({span}){by} {plural(seeds, 'seed')}: "
        f"{plural(len(runs), 'run')}{of}; {ended or 'none diverged'}.",
        f"Every run {weights}." if weights else "",
        f"Model {model}. Data: {wording.data(study) or 'not recorded'}.",
        spell(short),
        _describe_bases(study),
    ]
    return " ".join(filter(None, said))


def _span_text(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _titled(study: Study) -> list[str]:
    """Return the series that the title names."""
    words = {word.strip("?;:,").removesuffix("’s") for word in title(study).split()}
    return [name for name in study.series if name in words]


def _describe_bases(study: Study) -> str:
    """Return the base's value of each varied setting, e.g. "Plain sa has ffn=moe."; "" of more than two settings.

    A base whose name has the value, e.g. "sc window=4", needs no sentence.
    """
    found = [(each.base, group) for each in ablations(study) for group in each.groups]
    if len(found) > MOST_SETTINGS:
        return ""
    told = [(base, f"{group.setting or group.part}={value_text(group.base_value)}") for base, group in found]
    parts = [f"plain {base} has {value}" for base, value in told if value not in base.split()]
    return f"{sentence('; '.join(parts))}." if parts else ""
