"""Tabulate validation NLL by learning rate, and the stable windows."""

from __future__ import annotations

import numpy as np

from analysis.drawing.tables import chunks, ended_badly, guarded_note, source, width_text
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.spread import INTERVAL_RULE, REAL, Scale, Spread
from analysis.numbers.windows import VALIDATION, SeriesWindows, Window, median_line, outcomes, windows
from analysis.study import wording
from analysis.study.load import FINISHED, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import count_range, lr_text, power

NLL_COLUMNS = 6


@once_per_study
def nll_tables(study: Study) -> list[Table]:
    """Return tables, learning rate × mechanism, of median validation NLL, its interval and n, and how many runs
    diverged."""
    return [_nll_table(study, series) for series in chunks(study.series, NLL_COLUMNS)]


def _nll_table(study: Study, series: tuple[str, ...]) -> Table:
    best = {name: best_rate(study, name) for name in series}
    lrs = sorted({lr for name in series for lr in outcomes(study, name).index})
    rows = [(Cell(lr_text(lr)), *(nll_cell(study.of(name), lr, best[name] == lr) for name in series)) for lr in lrs]
    caption = (
        f"{wording.unit(study).capitalize()} at the end of training; median over the seeds that finished. "
        f"{INTERVAL_RULE}; below it the runs that ended badly. Bold: the best learning rate of each "
        f"column.{guarded_note(study)} {source(study)}"
    )
    return Table("Validation NLL against learning rate", caption, ("LR", *series), tuple(rows))


def best_rate(study: Study, series: str, column: str = VALIDATION) -> float | None:
    """Return the rate at which a series' median NLL is lowest, a divergence counting as ∞; None where none is
    finite."""
    line = median_line(outcomes(study, series, column))
    return float(line.idxmin()) if np.isfinite(line).any() else None


def nll_cell(runs: Frame, lr: float, bold: bool, column: str = VALIDATION, scale: Scale = REAL) -> Cell:
    """Return an NLL, or a part of one (``column``), at a learning rate: the median over the runs that finished, its
    interval and n, and below it the runs that ended badly."""
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    usable = runs[runs["status"].isin(FINISHED) & np.isfinite(runs[column])]
    spread, troubles = Spread.of(usable[column], scale), ended_badly(runs)
    if spread.n == 0:
        return Cell(troubles[0] if troubles else "--", "\n".join(troubles[1:]))
    return Cell(f"{spread.median:.3f}", "\n".join([spread.detail(), *troubles]), bold)


def window_table(study: Study, column: str = VALIDATION, oracle: str = "") -> Table:
    """Return a table with one row per series: its best learning rate, and the range of rates within 5 % of the best NLL
    (validation, or generative; ``oracle``: by whom)."""
    found, words = windows(study, column=column), wording.words(study)
    rows = tuple(_window_row(study, found[name], column) for name in study.series)
    lenient = any(each.median is not None and each.median.is_lenient for each in found.values())
    half = (
        f" Half lost: the NLL within the window where half of what was learned beyond {words.baseline} is lost."
        if lenient
        else ""
    )
    reach = (
        f" Frequencies: what the {words.baseline_source} reach on the same validation examples."
        if column == VALIDATION
        else ""
    )
    caption = (
        "The range of learning rates whose NLL is within 5 % of the mechanism's best, around the best one, on the "
        "median over seeds (a divergence counting as infinite); edges interpolated in log10 LR. ≥: the window "
        "reaches the end of the sweep, or a rate without a result, and is a lower bound. A range a–b: the "
        "neighbouring rate diverged and the edge lies in between. Last column: the range of the windows of the "
        f"single seeds.{reach}{half}{guarded_note(study)} {oracle}{source(study)}"
    )
    header = ("mechanism", "best LR", "best NLL", "frequencies", "window", "decades", "single seeds")
    return Table(
        "Stable windows" if column == VALIDATION else "Stable windows on the generative NLL", caption, header, rows
    )


def _window_row(study: Study, found: SeriesWindows, column: str) -> tuple[Cell, ...]:
    """Return one series' row: best rate and NLL, token-frequency NLL, the window with its edges and width, and the
    seeds' widths."""
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
    at_best = outcomes(study, found.series, column).loc[found.median.best_lr]
    best = Spread.of(at_best)
    widths = found.seed_widths
    seeds = (
        Cell(f"{min(widths):.2f} to {max(widths):.2f}", f"n={len(found.by_seed)}")
        if len(widths) > 1
        else Cell("--", f"n={len(found.by_seed)}")
    )
    return (
        name,
        Cell(lr_text(found.median.best_lr)),
        Cell(f"{best.median:.3f}", best.detail()),
        unigram_cell,
        Cell(f"{power(found.median.low.lr)} to {power(found.median.high.lr)}", edge_words(found.median)),
        Cell(width_text(found.median)),
        seeds,
    )


def edge_words(found: Window) -> str:
    """Say why a window ends where it does; "" where both edges are interpolated."""
    words = []
    for side, edge in (("low", found.low), ("high", found.high)):
        if edge.kind == "open":
            words.append(f"open {side}")
        elif edge.kind == "unmeasured":
            words.append(f"no result {side}")
        elif edge.kind == "diverged":
            words.append(f"{power(edge.furthest_lr)} diverged")
    return ", ".join(words)
