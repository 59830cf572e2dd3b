"""Show the shares of uᵀHu by parameter block, kind and layer (`measure=blocks`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.drawing.marks import PANELS_PER_ROW, say_instead
from analysis.drawing.style import MUTED, fitting_legend, panels_width
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Cell, Table
from analysis.sections.spectrum_figures import spectrum_rows_of
from analysis.sections.steps import spectrum_rows
from analysis.study.load import Frame, Study
from analysis.study.protocol import state_text
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
    present = [name for name in study.series if name in set(rows["series"])]
    lrs = sorted(set(rows["run_lr"]))
    chosen = sorted({lrs[0], lrs[len(lrs) // 2], lrs[-1]})[:LRS_SHOWN]
    return [_figure(rows, part, chosen) for part in chunks(present, PANELS_PER_ROW)]


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
