"""Show the connectivity of attention's and consensus's graphs, under the layer probes' heading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.claims.layers import WITHIN, connectivity_claims
from analysis.drawing.marks import entry
from analysis.drawing.pieces import Pieces, paragraph
from analysis.drawing.style import INK, MUTED, RC, WIDTH_INCHES, fitting_legend, lr_colors
from analysis.sections.layers import connectivity_table, slope
from analysis.sections.section import Captioned, Drawn, Figures, Section, is_of_rates, make_body
from analysis.study.load import Frame, Study
from analysis.words import join_words

CONNECTIVITY_CAPTION = (
    "Algebraic connectivity. Circles: window-path graph, computed; shaded: its bounds (Eq. 16); crosses: cycle, "
    "computed, on its closed form (Eq. 15, dashed); squares: complete graph, computed, on λ_1 = N (dotted). Numbers: "
    "fitted exponents of the window path, upper half of the points."
)


def connectivity_figure(frame: Frame) -> Figure:
    """Draw λ_1 against N by w, and against w by N, on log axes.

    With closed form, bounds and fitted slopes.
    """
    figure = Figure(figsize=(WIDTH_INCHES, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _connectivity_panel(left, frame, across="positions", fixed="window", names=("number of positions $N$", "w", "N"))
    _connectivity_panel(right, frame, across="window", fixed="positions", names=("window $w$", "N", "w"))
    left.set_ylabel("$\\lambda_1$")
    handles = [
        entry("window path", INK, marker="o", markersize=3.5),
        entry("bounds", linewidth=5, alpha=0.35),
        entry("cycle and closed form", linestyle="--", marker="x", markersize=4, linewidth=0.8),
    ]
    whole = frame[frame["graph"] == "complete"].sort_values("positions")
    if len(whole):
        left.plot(whole["positions"], whole["bound_low"], color=MUTED, linestyle=":", linewidth=0.8)
        left.plot(whole["positions"], whole["connectivity"], "s", color=MUTED, markersize=3.5, markerfacecolor="none")
        square = {"marker": "s", "markersize": 3.5, "markerfacecolor": "none"}
        handles.append(entry("complete, and N", linestyle=":", linewidth=0.8, **square))
    fitting_legend(figure, handles, 4)
    return figure


def _connectivity_panel(ax: Axes, frame: Frame, *, across: str, fixed: str, names: tuple[str, str, str]) -> None:
    """Draw λ_1 of path and ring against N or w, coloured by the other.

    The path's bounds are a band, its fitted exponent a label.
    """
    label, held, base = names
    colors = lr_colors(frame[frame["graph"] == "window"][fixed])
    for value, color in colors.items():
        path, ring = (
            frame[(frame["graph"] == graph) & (frame[fixed] == value)].sort_values(across)
            for graph in ("window", "cycle")
        )
        ax.fill_between(path[across], path["bound_low"], path["bound_high"], color=color, alpha=0.18, linewidth=0)
        ax.plot(path[across], path["connectivity"], "o-", color=color, markersize=3, linewidth=0.9)
        ax.plot(ring[across], ring["bound_low"], color=color, linestyle="--", linewidth=0.6)
        ax.plot(ring[across], ring["connectivity"], "x", color=color, markersize=3.5, markeredgewidth=0.8)
        if len(path) > 2:
            text = f"${held}={value:.0f}$: ${base}^{{{slope(list(path[across]), list(path['connectivity'])):.2f}}}$"
            # at the end shared by all lines
            end, side, away = (-1, "left", 4) if across == "positions" else (0, "right", -4)
            place = (path[across].iloc[end], path["connectivity"].iloc[end])
            ax.annotate(
                text, place, (away, 0), textcoords="offset points", fontsize=7, color=color, va="center", ha=side
            )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(label)
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(frame[frame["graph"] == "window"][across]))))
    room = (high / low) ** 0.36  # for the exponents
    ax.set_xlim((low, high * room) if across == "positions" else (low / room, high))


def write_figure(draw: Callable[[Frame], Figure], frame: Frame, path: Path) -> Path:
    """Write a table's figure as a separate file; return its path.

    Args:
        draw: draws the figure.
        frame: the table.
        path: the file; missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        draw(frame).savefig(path, metadata={"CreationDate": None})
    return path


NAME = "connectivity"
ELSEWHERE = {
    "mirror",
    "training_free",
    "training_free_layers",
    "coordinates",
}  # probes with a heading in their own section


def applies(study: Study) -> bool:
    """Return whether `stability.probe` measured layers or graphs: all of them share this heading."""
    return is_of_rates(study) and not study.probes.keys() <= ELSEWHERE


def figures(study: Study) -> Figures:
    if NAME not in study.probes:
        return {}
    return {NAME: Captioned(connectivity_figure(study.probes[NAME]), CONNECTIVITY_CAPTION)}


def bounds_sentence(probes: Mapping[str, Frame]) -> str:
    """Count the graphs within the paper's bounds; "" without probed graphs. ``probes``: tables by name."""
    counts = [claim.finding.removeprefix(WITHIN) for claim in connectivity_claims(probes)]
    return f"{WITHIN}{join_words(counts)}." if counts else ""


_HEADED = make_body(
    "What the layers do to their signal",
    lambda study: [connectivity_table(study.probes[NAME])] if NAME in study.probes else [],
)


def _body(study: Study, drawn: Drawn) -> Pieces:
    text = bounds_sentence(study.probes)
    return _HEADED(study, drawn) + (paragraph(text) if text else ())


SECTION = Section(_body, applies, figures)
