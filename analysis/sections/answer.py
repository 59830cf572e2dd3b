"""Answer a sweep's question in a few lines: best rate, NLL, window and recommended rate of each series."""

from __future__ import annotations

import math

from analysis.drawing.tables import width_text
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.windows import Window, median_line, outcomes, windows
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.words import lr_text, plural, power

MOST_LINES = 18  # with what a sweep prints before and after: 25
MOST_ROWS = 8  # of a study of many series; the table's frame has five lines
FRAME = 5


def answer(study: Study) -> str:
    """Return the table of best rates and a sentence on each series' rate, in at most `MOST_LINES` lines.

    A study of many series is cut to those of the lowest NLL, and a line counts the others.
    """
    found = {name: each.median for name, each in windows(study).items()}
    is_cut = 2 * len(found) + FRAME + 1 > MOST_LINES
    ranked = sorted(found, key=lambda name: _nll(found[name])) if is_cut else list(found)
    shown = ranked[:MOST_ROWS] if is_cut else ranked
    said = shown[: MOST_LINES - FRAME - len(shown) - 2] if is_cut else shown  # 2: the empty line and the last
    lines = [_table(study, {name: found[name] for name in shown}).text(), ""]
    lines += [f"{name}: {recommendation(study, name, found[name])}" for name in said]
    if num_more := len(found) - len(said):
        lines.append(f"by NLL; tables=all has the {len(found)} series, {num_more} more than these sentences")
    return "\n".join(lines)


def _nll(found: Window | None) -> float:
    return math.inf if found is None else found.best_nll


def _table(study: Study, found: dict[str, Window | None]) -> Table:
    words = wording.words(study)
    unit = ", rates in multiples of each optimizer's own" if study.is_in_multiples else ""
    header = ("mechanism", "best LR", words.nll, "within 5 % of it", "decades", "seeds")
    rows = tuple(_row(study, name, each) for name, each in found.items())
    return Table(f"Best learning rates{unit}", "", header, rows)


def _row(study: Study, series: str, found: Window | None) -> tuple[Cell, ...]:
    if found is None:
        return (Cell(series), *(Cell("--") for _ in range(5)))
    nll, seeds = f"{found.best_nll:.3f}", str(_seeds(study, series, found))
    if found.best_nll >= _baseline(study, series):  # its window would be the widest of all
        return tuple(map(Cell, (series, "--", nll, "learned nothing", "--", seeds)))
    span = f"{power(found.low.lr)} to {power(found.high.lr)}"
    return tuple(map(Cell, (series, lr_text(found.best_lr), nll, span, width_text(found), seeds)))


def _baseline(study: Study, series: str) -> float:
    """Return the NLL of the targets' frequencies; NaN if not recorded."""
    return float(study.of(series)["unigram_nll"].median())


def _seeds(study: Study, series: str, found: Window) -> int:
    """Return the number of seeds with a result at the best rate."""
    return int(outcomes(study, series).loc[found.best_lr].notna().sum())


def recommendation(study: Study, series: str, found: Window | None) -> str:
    """Return a sentence: the rate to take, the largest good one, the first that fails, and the seeds.

    Args:
        study: the study.
        series: name of the series.
        found: the window of its median NLL; None without a finite run.
    """
    runs = study.of(series)
    if found is None:
        return "every run diverged" if (runs["status"] == "diverged").all() else "no run has a result"
    baseline = _baseline(study, series)
    seeds = plural(_seeds(study, series, found), "seed")
    if found.best_nll >= baseline:
        words = wording.words(study)
        return f"learned nothing at any rate swept ({words.baseline} reach {baseline:.3f}); {seeds}"
    parts = [f"take {lr_text(found.best_lr)}{_end_of_grid(found)}", _upper(found), _first_failure(study, series, found)]
    return "; ".join([*filter(None, parts), seeds])


def _end_of_grid(found: Window) -> str:
    """Return a warning if the best rate is the smallest or largest one; "" otherwise."""
    low, high = (found.best_lr == end for end in found.grid)
    if low and high:
        return " (the only rate swept)"
    return " (the smallest swept: try smaller ones)" if low else " (the largest swept: try larger ones)" if high else ""


def _upper(found: Window) -> str:
    """Return the largest rate that costs less than 5 % of the best NLL; "" if that is the best rate itself."""
    if found.high.lr == found.best_lr:
        return ""
    if found.high.kind == "interpolated":
        return f"up to {power(found.high.lr)} costs < 5 %"
    if found.high.kind == "diverged":
        return f"up to {lr_text(found.high.lr)} costs < 5 %"
    why = "the largest swept" if found.high.kind == "open" else "the last with a result"
    return f"up to {lr_text(found.high.lr)}, {why}, costs < 5 %"


def _first_failure(study: Study, series: str, found: Window) -> str:
    """Return the first rate above the best one at which half of the seeds diverge or learn nothing."""
    runs, line = study.of(series), median_line(outcomes(study, series))
    above = [lr for lr in line.index if lr > found.best_lr and not math.isnan(line[lr])]
    ends = {lr: _failure(runs[runs["lr"] == lr], float(line[lr])) for lr in above}
    first = next((lr for lr in above if ends[lr]), None)
    if first is None:
        return ""
    rest = [ends[lr] for lr in above if lr >= first]
    where = f"from {lr_text(first)} on" if all(rest) and len(rest) > 1 else f"at {lr_text(first)}"
    return f"{where} it {ends[first]}"


def _failure(runs: Frame, nll: float) -> str:
    """Return how the runs of one rate fail; "" if most of them learn."""
    if math.isinf(nll) or 2 * (runs["status"] == "diverged").sum() >= len(runs):
        return "diverges"
    has_learned_nothing = nll >= float(runs["unigram_nll"].median()) or 2 * (runs["status"] == "plateaued").sum() > len(
        runs
    )
    return "learns nothing" if has_learned_nothing else ""
