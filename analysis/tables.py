"""The report's tables of NLL and stable windows, and of the runs that went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis import recipe
from analysis.load import FINISHED, PENDING, Frame, Study
from analysis.spread import INTERVAL_RULE, Spread, count_range, lr_text, plural, power
from analysis.stability_window import VALIDATION, SeriesWindows, Window, median_line, outcomes, windows
from analysis.typeset import Cell, Table, paragraph, picture

NLL_COLUMNS = 6
TROUBLES_SHOWN = 60


def chunks(items: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """As even as possible, none longer than ``size``: seven columns become 4 + 3, not 6 + 1."""
    count = max(1, math.ceil(len(items) / size))
    return [tuple(part) for part in np.array_split(np.asarray(items, dtype=object), count)]


def source(study: Study) -> str:
    """The end of every caption: which data, in which tokens, and which objective the numbers are about."""
    description = str(study.study.get("provenance", {}).get("data_description") or "")
    origin = description.partition(":")[0]  # what was read; counts follow
    named, objective = "; ".join(filter(None, (origin, recipe.tokens(study)))), recipe.objective(study)
    return f"Data fingerprint {study.fingerprint}{f' ({named})' if named else ''}.{f' Objective: {objective}.' if objective else ''}"


def nll_tables(study: Study) -> list[Table]:
    """Learning rate × mechanism: median validation NLL, its interval and n, and how many runs diverged."""
    return [_nll_table(study, series) for series in chunks(study.series, NLL_COLUMNS)]


def _nll_table(study: Study, series: tuple[str, ...]) -> Table:
    lines = {name: median_line(outcomes(study, name)) for name in series}
    best = {name: line.idxmin() for name, line in lines.items() if np.isfinite(line).any()}
    lrs = sorted({lr for line in lines.values() for lr in line.index})
    rows = [(Cell(lr_text(lr)), *(nll_cell(study.of(name), lr, best.get(name) == lr) for name in series)) for lr in lrs]
    caption = (
        f"{recipe.unit(study).capitalize()} at the end of training; median over the seeds that finished. "
        f"{INTERVAL_RULE}; below it the runs that ended badly. Bold: the best learning rate of each column.{guarded_note(study)} {source(study)}"
    )
    return Table("Validation NLL against learning rate", caption, ("LR", *series), tuple(rows))


def nll_cell(runs: Frame, lr: float, bold: bool) -> Cell:
    runs = runs[runs["lr"] == lr]
    if runs.empty:
        return Cell("--")
    usable = runs[runs["status"].isin(FINISHED) & np.isfinite(runs["val_nll"])]
    spread, troubles = Spread.of(usable["val_nll"]), ended_badly(runs)
    if spread.n == 0:
        return Cell(troubles[0], "\n".join(troubles[1:]))
    return Cell(f"{spread.median:.3f}", "\n".join([spread.detail(), *troubles]), bold)


def ended_badly(runs: Frame) -> list[str]:
    """``["diverged 1/2", "plateaued 1/2"]``: every verdict of a cell's runs but the good ones."""
    finite = np.isfinite(runs["val_nll"])
    labels = runs["status"].where(~(runs["status"].isin(FINISHED) & ~finite), "non-finite")
    counts = dict(labels[~labels.isin(("stable", "spiked"))].value_counts()) | {"guarded": len(guarded(runs))}
    order = ("diverged", "non-finite", "failed", *PENDING, "plateaued", "guarded")
    return [f"{label} {counts[label]}/{len(runs)}" for label in order if counts.get(label)]


def guarded(runs: Frame) -> Frame:
    """The runs in which guards skipped a step or restored a checkpoint."""
    return runs[runs["skipped_steps"].fillna(0) + runs["restores"].fillna(0) > 0]


def guarded_note(study: Study) -> str:
    """What guards did in this study; "" where they did nothing."""
    runs = guarded(study.runs)
    if runs.empty:
        return ""
    steps, restores = (plural(int(runs[column].sum()), word) for column, word in (("skipped_steps", "skipped step"), ("restores", "restore")))
    return f" Guarded: {len(runs)} of {plural(len(study.runs), 'run')}, in which guards answered what ends a run as diverged ({steps}, {restores})."


def window_table(study: Study, column: str = VALIDATION, oracle: str = "") -> Table:
    """One row per series: its best learning rate, and the range of rates within 5 % of the best NLL (validation, or generative; ``oracle``: by whom)."""
    found = windows(study, column=column)
    rows = tuple(_window_row(study, found[name], column) for name in study.series)
    lenient = any(each.median is not None and each.median.is_lenient for each in found.values())
    half = " Half lost: the NLL within the window where half of what was learned beyond token frequencies is lost." if lenient else ""
    reach = " Frequencies: what the training tokens' frequencies reach on the same validation examples." if column == VALIDATION else ""
    caption = (
        "The range of learning rates whose NLL is within 5 % of the mechanism's best, around the best one, on the median over seeds (a divergence "
        "counting as infinite); edges interpolated in log10 LR. ≥: the window reaches the end of the sweep, or a rate without a result, and is a "
        "lower bound. A range a–b: the neighbouring rate diverged and the edge lies in between. Last column: the range of the windows of the "
        f"single seeds.{reach}{half}{guarded_note(study)} {oracle}{source(study)}"
    )
    caption = recipe.worded(study, caption)
    header = ("mechanism", "best LR", "best NLL", "frequencies", "window", "decades", "single seeds")
    return Table("Stable windows" if column == VALIDATION else "Stable windows on the generative NLL", caption, header, rows)


def _window_row(study: Study, found: SeriesWindows, column: str) -> tuple[Cell, ...]:
    runs = study.of(found.series)
    unigram = Spread.of(runs["unigram_nll"])
    half = f"half lost at {found.median.half_nll:.3f}" if found.median is not None and found.median.is_lenient else ""
    unigram_cell = Cell("--") if column != VALIDATION else Cell(f"{unigram.median:.3f}" if unigram.n else "not recorded", half)
    name = Cell(found.series, f"{count_range(runs['num_params'])} parameters")
    if found.median is None:
        return (name, Cell("--"), Cell("no run finished"), unigram_cell, Cell("--"), Cell("--"), Cell("--"))
    at_best = outcomes(study, found.series, column).loc[found.median.best_lr]
    best = Spread.of(at_best)
    widths = found.seed_widths
    seeds = Cell(f"{min(widths):.2f} to {max(widths):.2f}", f"n={len(found.by_seed)}") if len(widths) > 1 else Cell("--", f"n={len(found.by_seed)}")
    return (
        name,
        Cell(lr_text(found.median.best_lr)),
        Cell(f"{best.median:.3f}", best.detail()),
        unigram_cell,
        Cell(f"{power(found.median.low.lr)} to {power(found.median.high.lr)}", edge_words(found.median)),
        Cell(width_text(found.median)),
        seeds,
    )


def width_text(found: Window) -> str:
    """1.32, ≥ 1.32 or 1.20–1.68: what is known of the width in decades."""
    if math.isinf(found.width_max):
        return f"≥ {found.width:.2f}"
    if found.width_max > found.width + 0.005:
        return f"{found.width:.2f}–{found.width_max:.2f}"
    return f"{found.width:.2f}"


def edge_words(found: Window) -> str:
    """Why a window ends where it does, empty where both edges are interpolated."""
    words = []
    for side, edge in (("low", found.low), ("high", found.high)):
        if edge.kind == "open":
            words.append(f"open {side}")
        elif edge.kind == "unmeasured":
            words.append(f"no result {side}")
        elif edge.kind == "diverged":
            words.append(f"{power(edge.furthest_lr)} diverged")
    return ", ".join(words)


def trouble_table(study: Study) -> Table | None:
    """Every run that did not end `stable`, or did so by its guards only, with its reason; None where there is none."""
    runs = study.runs[(study.runs["status"] != "stable") | study.runs["run_id"].isin(guarded(study.runs)["run_id"])]
    runs = runs.assign(order=runs["series"].map(study.series.index)).sort_values(["order", "lr", "seed"], kind="stable")
    if runs.empty:
        return None
    rows = tuple(
        (
            Cell(run.run_id),
            Cell(run.series),
            Cell(lr_text(run.lr)),
            Cell(f"{run.seed:g}"),
            Cell(run.status),
            Cell(f"{run.num_steps:g}" if math.isfinite(run.num_steps) else "--"),
            Cell(", ".join(filter(None, (run.reason, guards_did(run)))) or "--"),
        )
        for run in runs.head(TROUBLES_SHOWN).itertuples()
    )
    hidden = len(runs) - len(rows)
    more = f" {plural(hidden, 'further run')} not shown: results/runs.parquet has them." if hidden else ""
    caption = f"A divergence is a result; only “failed” is a crash.{guarded_note(study)}{more} {source(study)}"
    align = ("left", "left", "right", "right", "left", "right", "left")
    widths = ("auto",) * 6 + ("1fr",)
    title = f"Runs that did not end stable{'' if (runs['status'] != 'stable').all() else ' by themselves'}"
    return Table(title, caption, ("run", "mechanism", "LR", "seed", "status", "steps", "reason"), rows, (), align, widths)


def guards_did(run) -> str:
    """What guards did in a run, e.g. 2 steps skipped, 1 restore; "" where they left it alone."""
    skipped, restores = (0 if math.isnan(number) else int(number) for number in (run.skipped_steps, run.restores))
    return ", ".join(filter(None, (f"{plural(skipped, 'step')} skipped" if skipped else "", plural(restores, "restore") if restores else "")))


def captioned(study: Study, figures: Mapping[str, Path | None], name: str, caption: str, missing: str = "") -> str:
    """A drawn figure with its caption and the data that it shows; where nothing was drawn, what is missing."""
    path = figures.get(name)
    return paragraph(missing) if path is None else picture(path, f"{caption} {source(study)}")
