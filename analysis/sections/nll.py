"""Tabulate validation NLL by learning rate, stable windows, and a mistuned rate's mean cost."""

from __future__ import annotations

import numpy as np

from analysis.drawing.tables import chunks, ended_badly, guarded_note, source, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.measures import Form, three_digits
from analysis.numbers.kinds import sensitivity
from analysis.numbers.spread import INTERVAL_RULE, REAL, Scale, Spread
from analysis.numbers.windows import VALIDATION, SeriesWindows, Window, median_line, outcomes, windows
from analysis.study import wording
from analysis.study.load import FINISHED, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import count_range, listed, lr_text, power

NLL_COLUMNS = 6


@once_per_study
def nll_tables(study: Study) -> list[Table]:
    """Return median validation NLL, interval, n and diverged runs, learning rate × mechanism."""
    return [_nll_table(study, series) for series in chunks(study.series, NLL_COLUMNS)]


def _nll_table(study: Study, series: tuple[str, ...]) -> Table:
    best = {name: best_rate(study, name) for name in series}
    lrs = sorted({lr for name in series for lr in outcomes(study, name).index})
    rows = [(Cell(lr_text(lr)), *(nll_cell(study.of(name), lr, best[name] == lr) for name in series)) for lr in lrs]
    caption = (
        f"{wording.words(study).unit.capitalize()} at the end of training; median over the seeds that finished. "
        f"{INTERVAL_RULE}; below it the runs that ended badly. Bold: the best learning rate of each "
        f"column.{guarded_note(study)} {source(study)}"
    )
    return Table("Validation NLL against learning rate", caption, ("LR", *series), tuple(rows))


def best_rate(study: Study, series: str, column: str = VALIDATION) -> float | None:
    """Return the rate of the lowest median NLL, a divergence counting as ∞.

    Args:
        study: the study.
        series: the series.
        column: the NLL's column.

    Returns:
        The rate; None if no median is finite.
    """
    line = median_line(outcomes(study, series, column))
    return float(line.idxmin()) if np.isfinite(line).any() else None


def finished(runs: Frame, column: str) -> Frame:
    """Return the finished runs with a finite ``column``."""
    return runs[runs["status"].isin(FINISHED) & np.isfinite(runs[column])] if column in runs else runs.iloc[:0]


def nll_cell(
    runs: Frame, lr: float, bold: bool, column: str = VALIDATION, scale: Scale = REAL, form: Form = three_digits
) -> Cell:
    """Return a quantity at a learning rate: median over finished runs, interval, n; below it the failures.

    Args:
        runs: one series' runs.
        lr: the rate.
        bold: whether it is the best in its row or column.
        column: the quantity: an NLL, a part of one, or a share.
        scale: the interval's scale.
        form: formats the number.
    """
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    spread, troubles = Spread.of(finished(runs, column)[column], scale), ended_badly(runs)
    if spread.n == 0:
        return Cell(troubles[0] if troubles else "--", "\n".join(troubles[1:]))
    return Cell(form(spread.median), "\n".join([spread.detail(form), *troubles]), bold)


def window_table(study: Study, column: str = VALIDATION, oracle: str = "") -> Table:
    """Return each series' best rate and the window within 5 % of its NLL.

    Args:
        study: the study.
        column: validation or generative NLL.
        oracle: the caption's sentence on a generative NLL's oracle.
    """
    found, words = windows(study, column=column), wording.words(study)
    rows = tuple(_window_row(study, found[name], column) for name in study.series)
    lenient = any(each.median is not None and each.median.is_lenient for each in found.values())
    half = f" Half lost: the NLL within the window where half of what was learned beyond {words.baseline} is lost."
    half = half if lenient else ""
    reach = f" Frequencies: what the {words.baseline_source} reach on the same validation examples."
    reach = reach if column == VALIDATION else ""
    caption = (
        "The range of learning rates whose NLL is within 5 % of the mechanism's best, around the best one, on the "
        "median over seeds (a divergence counting as infinite); edges interpolated in log10 LR. ≥: the window "
        "reaches the end of the sweep, or a rate without a result, and is a lower bound. A range a–b: the "
        "neighbouring rate diverged and the edge lies in between. Last column: the range of the windows of the "
        f"single seeds.{reach}{half}{guarded_note(study)} {oracle}{source(study)}"
    )
    header = ("mechanism", "best LR", "best NLL", "frequencies", "window", "decades", "single seeds")
    title = "Stable windows" if column == VALIDATION else "Stable windows on the generative NLL"
    return Table(title, caption, header, rows)


def _window_row(study: Study, found: SeriesWindows, column: str) -> tuple[Cell, ...]:
    """Return one series' row: best rate, NLL, token-frequency NLL, window edges, width, and the seeds' widths."""
    runs = study.of(found.series)
    unigram = Spread.of(runs["unigram_nll"])
    half = f"half lost at {found.median.half_nll:.3f}" if found.median is not None and found.median.is_lenient else ""
    unigram_cell = (
        Cell("--") if column != VALIDATION else Cell(f"{unigram.median:.3f}" if unigram.n else "not recorded", half)
    )
    name = Cell(found.series, f"{count_range(runs['num_params'])} parameters")
    if found.median is None:
        why = "every run diverged" if (runs["status"] == "diverged").all() else "no run finished"
        return (name, Cell("--"), Cell(why), unigram_cell, Cell("--"), Cell("--"), Cell("--"))
    best = Spread.of(outcomes(study, found.series, column).loc[found.median.best_lr])
    best_cell = Cell(f"{best.median:.3f}", best.detail())
    return (name, Cell(lr_text(found.median.best_lr)), best_cell, unigram_cell, *width_cells(found, found.median))


def width_cells(found: SeriesWindows, median: Window) -> tuple[Cell, ...]:
    """Return a window's cells: its ends, its decades, and the range of the single seeds' widths."""
    widths = found.seed_widths
    return (
        Cell(f"{power(median.low.lr)} to {power(median.high.lr)}", edge_words(median)),
        Cell(width_text(median)),
        Cell(f"{min(widths):.2f} to {max(widths):.2f}" if len(widths) > 1 else "--", f"n={len(found.by_seed)}"),
    )


def edge_words(found: Window) -> str:
    """Return the reason for each edge of a window; "" if both are interpolated."""
    words = []
    for side, edge in (("low", found.low), ("high", found.high)):
        if edge.kind == "open":
            words.append(f"open {side}")
        elif edge.kind == "unmeasured":
            words.append(f"no result {side}")
        elif edge.kind == "diverged":
            words.append(f"{power(edge.furthest_lr)} diverged")
    return ", ".join(words)


def sensitivity_table(study: Study) -> Table | None:
    """Return a table with one row per series; None below two swept rates or without results."""
    found = [sensitivity(study, name) for name in study.series]
    usable = [each for each in found if each.num_rates > 1]
    if not usable:
        return None
    best = min(each.spread.median for each in usable)
    absent = [each.series for each in found if not each.by_seed]
    without = f" Without one, since no run finished: {listed(absent)}." if absent else ""
    rows = tuple(
        (
            Cell(each.series),
            Cell(f"{each.spread.median:.3f}", each.spread.detail(), each.spread.median == best),
            Cell(str(each.num_rates)),
        )
        for each in usable
    )
    caption = (
        "Mean over the swept rates of min(NLL, NLL at initialisation), less the best NLL, in nats (Wortsman et al. "
        "2024): 0 where the learning rate does not matter; a diverged run counts as the NLL at initialisation. "
        "Median over seeds, below it the smallest and largest of them, and n. It depends on the range swept. Bold: "
        f"the lowest.{without} {source(study)}"
    )
    return Table("Learning-rate sensitivity", caption, ("mechanism", "sensitivity (nats)", "rates"), rows)
