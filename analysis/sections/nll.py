"""Tabulate validation NLL by learning rate, stable windows, and a mistuned rate's mean cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.drawing.tables import chunks, guarded_note, limits, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.measures import cell_at, outcome_of, rate_table
from analysis.numbers.at_best_rate import Sensitivity, sensitivity
from analysis.numbers.common_windows import common_windows, equal_share
from analysis.numbers.learning import reasons_untrained, say_lacking, unlearned_words
from analysis.numbers.recall import recalled_share
from analysis.numbers.spread import Spread, interval
from analysis.numbers.window_ends import EXPLAINED, window_ends
from analysis.numbers.windows import VALIDATION, Edge, SeriesWindows, Window, explain_absence, outcomes, windows
from analysis.study import wording
from analysis.study.load import Study
from analysis.study.once import once_per_study
from analysis.study.reference import references
from analysis.words import join_words, lr_text, power

NLL_COLUMNS = 6


@once_per_study
def nll_tables(study: Study) -> list[Table]:
    """Return median validation NLL, interval, n and diverged runs, learning rate × mechanism."""
    return [
        rate_table(study, outcome_of(study), series, guarded_note(study))
        for series in chunks(study.series, NLL_COLUMNS)
    ]


def window_table(study: Study, column: str = VALIDATION, oracle: str = "") -> Table:
    """Return each series' best rate, its own and its common window, and what ends its own.

    Args:
        study: the study.
        column: validation or generative NLL.
        oracle: the caption's sentence on a generative NLL's oracle.
    """
    found, common, words = windows(study, column=column), common_windows(study, column), wording.words(study)
    shares, equal = _equal_windows(study) if column == VALIDATION else ({}, {})
    beside = {name: [each.get(name) for each in (common, *([equal] if equal else []))] for name in study.series}
    rows = tuple(_window_row(study, found[name], beside[name], column) for name in study.series)
    own, of_reference = limits(study, study.series, "the mechanism's", column)
    start = words.baseline if words.in_nats else f"{words.baseline} and untrained models"
    half = f" Learning is measured from {start}." if "half" in own else ""
    reach = f" Frequencies: what the {words.baseline_source} reach on the same validation examples."
    reach = reach if column == VALIDATION else ""
    others = f" Common: rates {of_reference}." if common else ""
    share = f" Equal share: rates that lose at most the share of what was learned that {_shares_text(shares)}."
    others += share if equal else ""
    ends = f" {EXPLAINED}." if column == VALIDATION else ""
    caption = (
        f"Own: the learning rates {own}, around the best one, on the median "
        f"over seeds (a divergence counting as infinite).{others} Below the decades: the edges, interpolated in log10 "
        "LR; the two rates between which each lies; the range over single seeds. ≥: the window reaches the end of the "
        "sweep, or a rate without a result, and is a lower bound. A range a–b: the neighbouring rate diverged and the "
        f"edge lies in between."
        f"{half}{_say_narrow(study) if column == VALIDATION else ''}{ends}{reach}{guarded_note(study)}"
        f"{oracle and f' {oracle}'}"
    )
    shared = ("equal share (decades)",) if equal else ()
    header = ("mechanism", "best LR", "best NLL", "own (decades)", "common (decades)", *shared, "own ends by")
    title = "Stable windows" if column == VALIDATION else "Stable windows on the generative NLL"
    return Table(title, caption, header, rows)


def _say_narrow(study: Study) -> str:
    """Name the mechanisms of a study of recall whose seeds differ by more than 5 % of the best NLL; "" without any."""
    share, lacking = recalled_share(study), reasons_untrained(study)
    if share is None:
        return ""
    said = []
    for name, each in windows(study).items():
        if each.median is None or lacking[name]:
            continue
        seeds = Spread.of(outcomes(study, name).loc[each.median.best_lr])
        if (allowed := each.median.threshold_nll - each.median.best_nll) < seeds.high - seeds.low:
            said.append(f"{name} {power(allowed)} nats, seeds {seeds.low:.3f}–{seeds.high:.3f}")
    told = f"5 % of the best NLL are less than seeds differ by ({'; '.join(said)}), so that such widths say little: see"
    return f" {told} the windows of {share.name}." if said else ""


def _equal_windows(study: Study) -> tuple[dict[str, float], dict[str, SeriesWindows]]:
    """Return the share that each reference's own window allows to lose, and every series' windows at it.

    References that learned nothing, and series without one, are left out.
    """
    pairs, lacking = references(study), reasons_untrained(study)
    shares, found = {}, {}
    compared = [name for name in study.series if name in pairs or name in pairs.values()]
    for name in (each for each in compared if not lacking[pairs.get(each, each)]):
        if (equal := equal_share(study, name, pairs.get(name, name))) is not None:
            shares[pairs.get(name, name)], found[name] = equal.share, equal.found
    return shares, found


def _shares_text(shares: Mapping[str, float]) -> str:
    """Return the references' shares as text, e.g. "sa's own window allows (16 %)"."""
    if len(shares) > 2:
        return "the reference's own window allows"
    return join_words(f"{name}'s own window allows ({100 * share:.0f} %)" for name, share in shares.items())


def _window_row(
    study: Study, found: SeriesWindows, others: Sequence[SeriesWindows | None], column: str
) -> tuple[Cell, ...]:
    """Return one series' row; in place of windows the reason for their absence.

    ``others``: the common window, and that at an equal share if the table has it.
    """
    runs = study.of(found.series)
    unigram = Spread.of(runs["unigram_nll"])
    frequencies = f"frequencies {unigram.median:.3f}" if column == VALIDATION and unigram.n else ""
    name = Cell(found.series, f"{wording.count_parameters(runs)}\n{frequencies}")
    if found.median is None:
        return (name, Cell("--"), Cell(explain_absence(runs, column)), *(Cell("--"),) * (2 + len(others)))
    best_lr = found.median.best_lr
    best_cells = (Cell(lr_text(best_lr)), cell_at(study, found.series, best_lr, column))
    if word := unlearned_words(study)[found.series]:
        return (name, *best_cells, Cell(word), *(Cell("--"),) * (1 + len(others)))
    if found.median.has_one_rate:
        return (name, *best_cells, *(Cell("--"),) * (2 + len(others)))
    beside = [Cell("--") if each is None else width_cell(each) for each in others]
    return (name, *best_cells, width_cell(found), *beside, _ends_cell(study, found.series, column))


def _ends_cell(study: Study, series: str, column: str) -> Cell:
    """Return what ends a series' own window at the low and at the high side."""
    ends = window_ends(study).get(series) if column == VALIDATION else None
    if ends is None:
        return Cell("--")
    counts = [f"{end.runs}/{end.of} at {lr_text(end.lr)}" for end in ends if end.of]
    return Cell(" / ".join(end.reason for end in ends), "\n".join(counts))


def width_cell(found: SeriesWindows) -> Cell:
    """Return a window's decades; below them its edges, their brackets, and the range over single seeds."""
    median, widths = found.median, found.seed_widths
    if median is None:
        return Cell("--")
    seeds = f"{min(widths):.2f} to {max(widths):.2f}, n={len(widths)}" if len(widths) > 1 else f"n={len(widths)}"
    if median.is_empty:
        return Cell("none", f"best {median.best_nll:.3f}, limit {median.threshold_nll:.3f}\n{seeds}")
    return Cell(width_text(median), f"{power(median.low.lr)} to {power(median.high.lr)}\n{edge_words(median)}\n{seeds}")


def edge_words(found: Window) -> str:
    """Return the bracket of each edge of a window, low before high."""
    return "\n".join(f"{side} {bracket_words(edge)}" for side, edge in (("low", found.low), ("high", found.high)))


def bracket_words(edge: Edge) -> str:
    """Return the two rates between which an edge lies, or the reason for an open one."""
    if edge.kind in ("open", "unmeasured"):
        return "open" if edge.kind == "open" else "no result"
    low, high = sorted((edge.inside_lr, edge.outside_lr))
    return f"{lr_text(low)}–{lr_text(high)}{' diverged' if edge.kind == 'diverged' else ''}"


def sensitivity_table(study: Study) -> Table | None:
    """Return a table with one row per series; None below two swept rates or without results."""
    found = [sensitivity(study, name) for name in study.series]
    usable = [each for each in found if each.num_rates > 1]
    if not usable:
        return None
    best = min(each.spread.median for each in usable)
    absent = [each.series for each in found if not each.by_seed]
    without = f" Without one: {say_lacking(study, absent)}." if absent else ""
    beside = {each.series: _less_reference(study, each, found) for each in usable}
    rows = tuple(
        (
            Cell(each.series),
            Cell(f"{each.spread.median:.3f}", each.spread.detail(), each.spread.median == best),
            beside[each.series],
            Cell(str(each.num_rates)),
        )
        for each in usable
    )
    unit = ", in nats" if wording.nats(study) else ""
    caption = (
        f"Mean over the swept rates of min(NLL, NLL at initialisation), less the best NLL{unit} (Wortsman et al. "
        "2024): 0 where the learning rate does not matter; a diverged run counts as the NLL at initialisation. "
        "Median over seeds, below it the smallest and largest of them, and n. It depends on the range swept. Bold: "
        f"the lowest.{without}"
    )
    header = ("mechanism", f"sensitivity{wording.nats(study)}", "less the reference’s", "rates")
    if not any(cell.text for cell in beside.values()):
        header, rows = (*header[:2], header[3]), tuple((*row[:2], row[3]) for row in rows)
        return Table("Learning-rate sensitivity", caption, header, rows)
    caption += (
        " Less the reference’s: mean paired difference over seeds; below it Student’s t interval (95 %; of two "
        "seeds smallest and largest), not corrected for their number."
    )
    return Table("Learning-rate sensitivity", caption, header, rows)


def _less_reference(study: Study, own: Sensitivity, found: Sequence[Sensitivity]) -> Cell:
    """Return the mean paired difference from the reference's; empty without a reference of as many rates."""
    name = references(study).get(own.series)
    other = next((each.by_seed for each in found if each.series == name and each.num_rates == own.num_rates), {})
    differences = [value - other[seed] for seed, value in own.by_seed.items() if seed in other]
    if not differences:
        return Cell("")
    low, high = interval(differences)
    detail = f"{low:+.3f} to {high:+.3f}" if len(differences) > 1 else ""
    return Cell(f"{np.mean(differences):+.3f}", detail)
