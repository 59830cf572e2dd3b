"""Show where a run breaks: the gradient norm of each block of parameters against step (`log.gradients=…`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.drawing.pieces import Pieces
from analysis.drawing.style import WIDTH_INCHES
from analysis.drawing.tables import chunks, guarded
from analysis.sections.section import CONTINUED, Drawn, Figures, Section, numbered, pictures, sourced
from analysis.study.load import Frame, Study
from analysis.words import lr_text

NAME = "gradients"
COLUMNS, PANELS, LABELS = 2, 6, 24
CAPTION = (
    "Gradient norm of each block of parameters before clipping (log₁₀) against step, in the run that broke at the "
    "lowest learning rate: that diverged, spiked or was held up by its guards, first seed; where none of a "
    "mechanism's did, at its highest rate. White: not finite."
)


def figures(study: Study) -> Figures:
    """Draw ``gradients`` (and ``gradients-1``, … where there are many series), a heat map for each series; {} where
    nothing was logged."""
    if NAME not in study.gradients or study.gradients[NAME].empty:
        return {}
    rows = study.with_run(study.gradients[NAME])
    runs = {name: run for name in study.series if (run := broken_run(study, name, rows)) is not None}
    drawn = [_figure(rows, [runs[name] for name in part]) for part in chunks(list(runs), PANELS)]
    return {numbered(NAME, i): sourced(study, each, CONTINUED if i else CAPTION) for i, each in enumerate(drawn)}


def body(study: Study, drawn: Drawn) -> Pieces:
    return pictures(drawn)


def broken_run(study: Study, series: str, rows: Frame) -> Any:
    """Return the run of the lowest rate at which one broke, of these with the lowest seed; else that of the highest
    rate; None where none has rows."""
    runs = study.of(series)
    runs = runs[runs["run_id"].isin(set(rows["run_id"]))].sort_values(["lr", "seed"], kind="stable")
    broken = runs[runs["status"].isin(("diverged", "spiked")) | runs["run_id"].isin(guarded(runs)["run_id"])]
    if len(broken):
        return next(broken.itertuples())
    return next(runs[runs["lr"] == runs["lr"].max()].itertuples()) if len(runs) else None


def grid(rows: Frame) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the blocks in the model's order, steps, and log₁₀ of the norms (blocks × steps); NaN where there is none
    or it is 0."""
    table = rows.pivot_table(index="block", columns="step", values="grad_norm", dropna=False, sort=False).sort_index(
        axis=1
    )
    table = table.reindex(rows["block"].drop_duplicates())
    norms = table.to_numpy(dtype=float)
    return list(table.index), table.columns.to_numpy(dtype=float), np.log10(np.where(norms > 0, norms, np.nan))


def _figure(rows: Frame, runs: Sequence[Any]) -> Figure:
    """Draw a heat map of log₁₀ gradient norm, block × step, for each of ``runs`` on one colour scale."""
    found = [grid(rows[rows["run_id"] == run.run_id]) for run in runs]
    lines, columns = math.ceil(len(runs) / COLUMNS), min(COLUMNS, len(runs))
    height = min(3.4, 0.7 + 0.11 * max(len(blocks) for blocks, _, _ in found))
    figure = Figure(
        figsize=(WIDTH_INCHES if columns > 1 else 0.62 * WIDTH_INCHES, 0.3 + height * lines), layout="constrained"
    )
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    finite = np.concatenate([values[np.isfinite(values)] for _, _, values in found])
    # the last steps of a run that blows up would take the whole scale
    low, high = np.percentile(finite, (1, 99)) if len(finite) else (0.0, 1.0)
    image: Any = None
    for ax, run, (blocks, steps, values) in zip(axes, runs, found, strict=False):
        scale = {"cmap": "plasma", "vmin": low, "vmax": high, "shading": "nearest"}
        image = ax.pcolormesh(steps, np.arange(len(blocks)), values, rasterized=True, **scale)
        ax.grid(visible=False)
        ax.invert_yaxis()
        stride = math.ceil(len(blocks) / LABELS)
        ax.set_yticks(range(0, len(blocks), stride), [short(block) for block in blocks[::stride]], fontsize=6)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xlabel("step")
        ax.set_title(f"{run.series}, LR {lr_text(run.lr)}, seed {run.seed:g}: {run.status}", loc="left", fontsize=8.5)
    for ax in axes[len(runs) :]:
        ax.remove()
    figure.colorbar(
        image, ax=list(axes[: len(runs)]), label="$\\log_{10}$ gradient norm", shrink=0.9, pad=0.01, extend="both"
    )
    return figure


def short(block: str) -> str:
    """Shorten a block's name: ``blocks.3.mixer_norm`` → ``3 mixer norm``."""
    return block.removeprefix("blocks.").replace(".", " ").replace("_", " ")


SECTION = Section(body, figures=figures)
