"""Show broken runs: each parameter block's gradient norm against step (`log.gradients=…`).

If a study compares residual schemes, also the whole gradient's norm (mHC-lite's Figure 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.claims.pairs import PLAIN
from analysis.drawing.marks import mechanism_legend
from analysis.drawing.style import WIDTH_INCHES, Look, looks, panel_grid
from analysis.drawing.tables import chunks, find_guarded
from analysis.sections.section import CONTINUED, Captioned, Figures, Section, continuation_name, make_body
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
    """Draw ``gradients`` (``gradients-1``, … for many series), a heat map for each series; {} without a log."""
    if NAME not in study.signals or study.signals[NAME].empty:
        return {}
    rows = study.with_run(study.signals[NAME])
    runs = {name: run for name in study.series if (run := find_broken_run(study, name, rows)) is not None}
    drawn = [_figure(rows, [runs[name] for name in part]) for part in chunks(list(runs), PANELS)]
    return {continuation_name(NAME, i): Captioned(each, CONTINUED if i else CAPTION) for i, each in enumerate(drawn)}


def find_broken_run(study: Study, series: str, rows: Frame) -> Any:
    """Return the first broken run by rate, then seed; if none broke, one at the highest rate.

    Args:
        study: the study.
        series: the run's series.
        rows: logged norms; runs without rows are ignored.

    Returns:
        The run's row; None if no run has rows.
    """
    runs = study.of(series)
    runs = runs[runs["run_id"].isin(set(rows["run_id"]))].sort_values(["lr", "seed"], kind="stable")
    broken = runs[runs["status"].isin(("diverged", "spiked")) | runs["run_id"].isin(find_guarded(runs)["run_id"])]
    if len(broken):
        return next(broken.itertuples())
    return next(runs[runs["lr"] == runs["lr"].max()].itertuples()) if len(runs) else None


def grid(rows: Frame) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return blocks in the model's order, steps, and log₁₀ norms (blocks × steps); NaN for missing or 0."""
    table = rows.pivot_table(index="block", columns="step", values="grad_norm", dropna=False, sort=False).sort_index(
        axis=1
    )
    table = table.reindex(rows["block"].drop_duplicates())
    norms = table.to_numpy(dtype=float)
    return list(table.index), table.columns.to_numpy(dtype=float), np.log10(np.where(norms > 0, norms, np.nan))


def _figure(rows: Frame, runs: Sequence[Any]) -> Figure:
    """Draw each run's heat map of log₁₀ gradient norm, block × step.

    All share one colour scale.
    """
    found = [grid(rows[rows["run_id"] == run.run_id]) for run in runs]
    columns = min(COLUMNS, len(runs))
    height = min(3.4, 0.7 + 0.11 * max(len(blocks) for blocks, _, _ in found))
    width = WIDTH_INCHES if columns > 1 else 0.62 * WIDTH_INCHES
    figure, axes = panel_grid(len(runs), columns, height, 0.3, width)
    finite = np.concatenate([values[np.isfinite(values)] for _, _, values in found])
    # percentiles: the last steps of a blow-up would span the whole scale
    low, high = np.percentile(finite, (1, 99)) if len(finite) else (0.0, 1.0)
    image: Any = None
    for ax, run, (blocks, steps, values) in zip(axes, runs, found, strict=True):
        scale = {"cmap": "plasma", "vmin": low, "vmax": high, "shading": "nearest"}
        image = ax.pcolormesh(steps, np.arange(len(blocks)), values, rasterized=True, **scale)
        ax.grid(visible=False)
        ax.invert_yaxis()
        stride = math.ceil(len(blocks) / LABELS)
        ax.set_yticks(range(0, len(blocks), stride), [short(block) for block in blocks[::stride]], fontsize=6)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set_xlabel("step")
        ax.set_title(f"{run.series}, LR {lr_text(run.lr)}, seed {run.seed:g}: {run.status}", loc="left", fontsize=8.5)
    figure.colorbar(image, ax=list(axes), label="$\\log_{10}$ gradient norm", shrink=0.9, pad=0.01, extend="both")
    return figure


def short(block: str) -> str:
    """Shorten a block's name: ``blocks.3.mixer_norm`` → ``3 mixer norm``."""
    return block.removeprefix("blocks.").replace(".", " ").replace("_", " ")


NORMS_NAME = "gradient-norms"
NORMS_PANELS = 4  # learning rates, evenly chosen
WINDOW_SHARE = 50  # the running mean's window: steps / 50
NORMS_CAPTION = (
    "Norm of the whole gradient before clipping against step, as mHC-lite's Figure 2, by learning rate (four at "
    "most). Line: median over seeds of a running mean over a fiftieth of the steps; shade: the seeds' range. A line "
    "ends where its last seed does. With n streams the head reads the sum of n normed ones, so that the logits "
    "start n times as large as with the plain residual (hc; mhc and mhc_lite nearly). NLL and gradient norm start "
    "larger for that alone{here}, which is no sign of instability, but clip_norm acts on it."
)


def norm_figures(study: Study) -> Figures:
    """Draw the figure; {} with a single residual scheme."""
    if study.runs["residual"].nunique() < 2:
        return {}
    rows = study.with_run(study.curves)
    rows = rows[np.isfinite(rows["grad_norm"]) & (rows["grad_norm"] > 0)]
    if rows.empty:
        return {}
    return {NORMS_NAME: Captioned(_norms_figure(study, rows), NORMS_CAPTION.format(here=_describe_start(study)))}


def _describe_start(study: Study) -> str:
    """Describe the initial NLL and gradient norm against the plain residual; "" without a plain one.

    Ranges over mechanisms and schemes, each a median over runs.
    """
    norms = study.curves[study.curves["grad_norm"] > 0].sort_values("step").groupby("run_id")["grad_norm"].first()
    runs = study.runs.assign(start=study.runs["run_id"].map(norms))
    medians = runs.groupby(["mechanism", "residual"])[["init_nll", "start"]].median().dropna()
    beside = [
        (row, medians.loc[(mechanism, PLAIN)])
        for (mechanism, name), row in medians.iterrows()
        if name != PLAIN and (mechanism, PLAIN) in medians.index
    ]
    if not beside:
        return ""
    nll, plain = (_span([values["init_nll"] for values in side], ".2f") for side in zip(*beside, strict=True))
    return (
        f" (here {nll} against {plain} nats and "
        f"{_span([row['start'] / base['start'] for row, base in beside], '.1f')} times the norm)"
    )


def _span(values: Sequence[float], digits: str) -> str:
    low, high = f"{min(values):{digits}}", f"{max(values):{digits}}"
    return low if low == high else f"{low} to {high}"


def _norms_figure(study: Study, rows: Frame) -> Figure:
    """Draw gradient norm against step: a panel for each of a few learning rates, a line for each series."""
    rates = sorted(set(rows["run_lr"]))
    shown = [
        rates[place]
        for place in sorted({round(place) for place in np.linspace(0, len(rates) - 1, min(NORMS_PANELS, len(rates)))})
    ]
    styles, present = looks(study), set(rows["series"])
    figure = Figure(figsize=(max(3.2, WIDTH_INCHES * min(1.0, 0.1 + 0.24 * len(shown))), 2.6), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, lr in zip(axes, shown, strict=True):
        for name in (name for name in styles if name in present):
            _line(ax, rows[(rows["series"] == name) & (rows["run_lr"] == lr)], styles[name])
        ax.set_yscale("log")
        ax.set_title(f"LR {lr_text(lr)}", loc="left")
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0].set_ylabel("gradient norm")
    mechanism_legend(figure, {name: look for name, look in styles.items() if name in present}, markers=False)
    return figure


def _line(ax: Axes, rows: Frame, look: Look) -> None:
    if rows.empty:
        return
    table = norms(rows)
    ax.plot(table.index, table.median(axis=1), color=look.color, linestyle=look.dashes, linewidth=1.1)
    ax.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=look.color, alpha=0.15, linewidth=0)


def norms(rows: Frame) -> Frame:
    """Return the gradient norm's running mean, one column per run, one row per step."""
    runs = {run_id: run.set_index("step")["grad_norm"].sort_index() for run_id, run in rows.groupby("run_id")}
    return pd.DataFrame(
        {run_id: norm.rolling(max(1, len(norm) // WINDOW_SHARE), min_periods=1).mean() for run_id, norm in runs.items()}
    )


SECTION = Section(make_body(), figures=figures)
NORMS = Section(make_body(), figures=norm_figures)
