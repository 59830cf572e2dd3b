"""Show single steps, loss along u, spectrum, sharpness and parameter blocks, if measured (`measure=…`).

It continues under the heading of α_max.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from analysis.drawing.marks import PANELS_PER_ROW, TRAINING, entry, mark_entry, say_diverged, say_instead
from analysis.drawing.pieces import Pieces, shown
from analysis.drawing.style import MUTED, Look, fitting_legend, looks, panels_width
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.step_shares import (
    count_stable_steps,
    phases_and_states,
    phases_to_draw,
    recorded_steps,
    series_with_results,
)
from analysis.sections.section import Drawn, Figures, Section, draw_by_phase, make_body
from analysis.sections.spectrum_figures import (
    DENSITY_CAPTION,
    PROFILE_CAPTION,
    density_figures,
    profile_figures,
    spectrum_rows_of,
)
from analysis.sections.steps import differences_table, make_fallen_tables, sharpness_table, spectrum_rows
from analysis.study.load import Column, Frame, Study
from analysis.study.protocol import state_text, terms_in_brief
from analysis.words import lr_text, wrap

KINDS = ("embedding", "mixer", "ffn", "norms", "head", "other")
LRS_SHOWN = 3
BLOCKS_CAPTION = (
    "Shares of uᵀHu by block of parameters at the first recorded step, {phase}: u_b·(Hu)_b in % of |uᵀHu|, by layer, "
    "“ends” being what lies outside the layers; median over seeds. A share holds half of the block's coupling with "
    "each other block and may be negative; where uᵀHu < 0 the shares of a run add up to −100. Lowest, middle and "
    "highest LR measured."
)


def part_of_model(block: str) -> str:
    """Return a block's kind: "blocks.1.mixer_norm" and "final_norm" are norms, unknown names "other"."""
    last = block.split(".")[-1]
    return "norms" if last.endswith("norm") else last if last in KINDS else "other"


def layer_of(block: str) -> str:
    """Return the layer's number, or "ends" for embedding, final norm and head."""
    parts = block.split(".")
    return parts[1] if parts[0] == "blocks" and len(parts) > 1 else "ends"


def add_kinds(rows: Frame) -> Frame:
    """Return `blocks` with kind, layer, and the shares in % of |uᵀHu|."""
    scale = 100 / rows["curvature"].abs().replace(0, np.nan)
    kinds, layers = rows["block"].map(part_of_model), rows["block"].map(layer_of)
    return rows.assign(kind=kinds, layer=layers, percent=rows["share"] * scale, own_percent=rows["own"] * scale)


def medians(rows: Frame, by: Sequence[str]) -> Any:
    """Return the median over runs of each run's summed shares in %, by ``by``."""
    sums = rows.groupby([*by, "run_id"])[["percent", "own_percent"]].sum(min_count=1)
    return sums.groupby(level=list(range(len(by)))).median()


def blocks_table(study: Study) -> Table | None:
    """Return shares by kind and the off-diagonal coupling; None if not measured.

    A row for each phase, state, series and LR.
    """
    if "blocks" not in study.spectra or study.spectra["blocks"].empty:
        return None
    present = set(study.spectra["blocks"]["block"].map(part_of_model))
    kinds = tuple(kind for kind in KINDS if kind in present)
    body = []
    for phase, state, series, lr, rows, lost in spectrum_rows(study, "blocks"):
        part = add_kinds(rows)
        detail = "\n".join(filter(None, (f"{phase}, {state_text(state)}, n={rows['run_id'].nunique()}", lost)))
        shares = medians(part, ["kind"])["percent"] if len(part) else {}
        by_run = part.groupby("run_id")[["percent", "own_percent"]].sum(min_count=1)
        own = _whole(float((by_run["percent"] - by_run["own_percent"]).median()))
        cells = [Cell(_whole(float(shares.get(kind, math.nan)))) for kind in kinds]
        body.append((Cell(series, detail), Cell(lr_text(lr)), *cells, Cell(own)))
    caption = (
        "At the first recorded step: u_b·(Hu)_b of all blocks of a kind, in % of |uᵀHu|; median over the n runs "
        "measured (a run that diverged left no terminal checkpoint to measure). Coupling: what lies off the diagonal "
        "blocks, uᵀHu − Σ u_b·H u_b over the single blocks of each layer, in % of |uᵀHu|."
    )
    header = ("mechanism", "LR", *kinds, "coupling")
    return Table("Which parameters bend the loss along u", caption, header, tuple(body))


def _whole(percent: float) -> str:
    return f"{round(percent)}" if math.isfinite(percent) else "--"


def block_figures(study: Study, phase: str = "terminal") -> list[Figure]:
    """Draw stacked bars of the shares by layer, a panel per series and LR; empty if not measured.

    The state is the one of the other spectra's figures.
    """
    rows = spectrum_rows_of(study, "blocks", phase)
    if rows is None:
        return []
    rows = add_kinds(rows)
    lrs = sorted(set(rows["run_lr"]))
    chosen = sorted({lrs[0], lrs[len(lrs) // 2], lrs[-1]})[:LRS_SHOWN]
    return [_figure(rows, part, chosen) for part in chunks(study.present(rows), PANELS_PER_ROW)]


def _figure(rows: Frame, series: Sequence[str], lrs: Sequence[float]) -> Figure:
    """Draw a panel of stacked bars for each series (column) and learning rate (row)."""
    figure = Figure(figsize=(panels_width(len(series)), 0.6 + 1.35 * len(lrs)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(lrs), len(series), sharex=True, sharey="row", squeeze=False))
    layers = sorted(set(rows["layer"]), key=lambda layer: (layer == "ends", int(layer) if layer.isdigit() else 0))
    kinds = [kind for kind in KINDS if kind in set(rows["kind"])]
    for line, lr in enumerate(lrs):
        for column, name in enumerate(series):
            _panel(grid[line, column], rows[(rows["series"] == name) & (rows["run_lr"] == lr)], layers, kinds)
            if line == 0:
                grid[line, column].set_title(wrap(name, 22), loc="left", fontweight="bold")
        grid[line, 0].set_ylabel(f"$\\alpha$ = {lr_text(lr)}\n% of $|u^\\top Hu|$")
    for ax in grid[-1]:
        ax.set_xlabel("layer")
    handles = [Patch(color=color(kind), label=kind) for kind in kinds]
    fitting_legend(figure, handles, 3 if len(series) < 3 else len(kinds), handlelength=1.2, columnspacing=1.2)
    return figure


def color(kind: str) -> Any:
    return colormaps["tab10"](KINDS.index(kind))


def _panel(ax: Any, part: Frame, layers: Sequence[str], kinds: Sequence[str]) -> None:
    """Stack positive shares upwards from 0, negative ones downwards."""
    ax.set_xticks(range(len(layers)), layers)
    ax.axhline(0, color=MUTED, linewidth=0.6)
    if not np.isfinite(part["percent"]).any():
        say_instead(ax, "not measured" if part.empty else "lost to a non-finite loss", va="baseline")
        return
    shares = medians(part, ["layer", "kind"])["percent"]
    for index, layer in enumerate(layers):
        up = down = 0.0
        for kind in kinds:
            value = float(shares.get((layer, kind), 0.0))
            ax.bar(index, value, bottom=up if value >= 0 else down, color=color(kind), width=0.7)
            up, down = up + max(value, 0.0), down + min(value, 0.0)


Lines = dict[tuple[str, float, str], Column]
STEPS_CAPTION = (
    "α_max step by step, {phase}: median over seeds; red dashes: the training LR α (as the paper's Figure 6). ▲: no "
    "positive curvature (∞), ▼: no descent direction (0); the line breaks there. A run that diverged has no such "
    "checkpoint and no line; their number is printed above the panel."
)


def step_figures(study: Study, phase: str = "terminal") -> list[Figure]:
    """Draw α_max against recorded step (paper, Figure 6).

    A panel per LR and state, a line per series; one figure for every four LRs; none without rows.
    """
    rows = recorded_steps(study, phase)
    counts = {
        state: count_stable_steps(study, phase, state) for each, state in phases_and_states(study) if each == phase
    }
    with_result = {
        state: count[count["series"].isin(series_with_results(study, count))] for state, count in counts.items()
    }
    lrs = [float(lr) for lr in sorted({lr for count in with_result.values() for lr in count["run_lr"]})]
    if not lrs or rows.empty:  # every run diverged before its checkpoint, as the tables report
        return []
    limits, medians = _positive_limits(rows, lrs), _medians(rows)
    return [
        _step_figure(medians, with_result, part, looks(study), limits)
        for part in chunks([str(lr) for lr in lrs], PANELS_PER_ROW)
    ]


def _medians(rows: Frame) -> Lines:
    """Return by state, LR and series the median over seeds of each recorded step."""
    keys = ["state", "run_lr", "series"]
    medians = rows.groupby([*keys, "step"])["alpha_max"].median()
    return {key: line.droplevel(keys) for key, line in medians.groupby(level=keys)}


def _step_figure(
    lines: Lines, counts: dict[str, Frame], lrs: Sequence[str], styles: dict[str, Look], limits: tuple[float, float]
) -> Figure:
    """Draw one figure, a column per LR and a row per state; ``counts`` has `count_stable_steps` by state."""
    states = list(counts)
    figure = Figure(figsize=(panels_width(len(lrs)), 0.7 + 1.55 * len(states)), layout="constrained")
    grid = np.atleast_2d(figure.subplots(len(states), len(lrs), sharex=True, sharey=True, squeeze=False))
    known = {series for _, _, series in lines}
    present = [name for name in styles if name in known]
    for line, state in enumerate(states):
        for column, lr in enumerate(map(float, lrs)):
            ax = grid[line, column]
            _step_panel(ax, {name: lines.get((state, lr, name)) for name in present}, styles, limits)
            ax.axhline(lr, zorder=2, **TRAINING)
            if line == 0:
                say_diverged(ax, counts[state][counts[state]["run_lr"] == lr], "series")
                ax.set_title(f"$\\alpha$ = {lr_text(lr)}", loc="left")
        grid[line, 0].set_ylabel(f"{state_text(state)}\n$\\alpha_\\mathrm{{max}}$")
    for ax in grid[-1]:
        ax.set_xlabel("recorded step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    handles = [entry(wrap(name, 30), styles[name].color, linestyle=styles[name].dashes) for name in present]
    handles += [entry("training LR $\\alpha$", **TRAINING), mark_entry("∞", "^", 3.5), mark_entry("0", "v", 3.5)]
    fitting_legend(figure, handles, 4, handlelength=1.8, columnspacing=1.2)
    return figure


def _step_panel(
    ax: Axes, lines: dict[str, Column | None], styles: dict[str, Look], limits: tuple[float, float]
) -> None:
    """Draw the medians of each series' steps; ∞ and 0 as marks at the edges, breaking the line."""
    ax.set_yscale("log")
    ax.set_ylim(*limits)
    ax.yaxis.set_major_locator(LogLocator(numticks=5))
    ax.yaxis.set_minor_locator(NullLocator())
    strip = blended_transform_factory(ax.transData, ax.transAxes)
    for name, line in lines.items():
        medians = pd.Series(dtype=float) if line is None else line
        inside = medians.where(np.isfinite(medians) & (medians > 0))
        ax.plot(inside.index, inside, color=styles[name].color, linestyle=styles[name].dashes, linewidth=1.0, zorder=3)
        for marker, height, steps in (
            ("^", 0.96, medians.index[np.isposinf(medians.to_numpy())]),
            ("v", 0.04, medians.index[medians.to_numpy() == 0]),
        ):
            if len(steps):
                ax.plot(steps, [height] * len(steps), marker, color=styles[name].color, markersize=2.6, transform=strip)


def _positive_limits(rows: Frame, lrs: Sequence[float]) -> tuple[float, float]:
    positive = rows["alpha_max"][np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    values = np.log10(np.concatenate([positive.to_numpy(dtype=float), lrs]))
    room = max(float(values.max() - values.min()), 1.0)
    return 10 ** (float(values.min()) - 0.1 * room), 10 ** (float(values.max()) + 0.1 * room)


def figures(study: Study) -> Figures:
    phases, terms = phases_to_draw(study), terms_in_brief(study)
    return {
        **draw_by_phase(study, "steps", phases, step_figures, STEPS_CAPTION + terms),
        **draw_by_phase(study, "profile", phases, profile_figures, PROFILE_CAPTION + terms),
        **draw_by_phase(study, "density", phases, density_figures, DENSITY_CAPTION),
        **draw_by_phase(study, "blocks", phases, block_figures, BLOCKS_CAPTION),
    }


def _tables(study: Study) -> list[Table | None]:
    return [*make_fallen_tables(study), differences_table(study), sharpness_table(study), blocks_table(study)]


def _brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the first table of companions; that the steps lower their loss repeats % stable."""
    return shown([sharpness_table(study) or blocks_table(study)])


SECTION = Section(make_body("", _tables), figures=figures, brief=_brief)
