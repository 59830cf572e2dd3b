"""Show α_max along the optimizer's step: figures, method, tables, and its growth with the rate of training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from analysis.drawing.marks import PANELS_PER_ROW, choose_panels, entry, mark, mark_entry, say_instead
from analysis.drawing.pieces import Pieces, heading, paragraph, shown
from analysis.drawing.style import INK, MUTED, WIDTH_INCHES, Look, fitting_legend, looks, lr_axis
from analysis.drawing.tables import chunks
from analysis.drawing.typeset import Table
from analysis.numbers.at_best_rate import OWN_STATE
from analysis.numbers.optimizers import reference_of
from analysis.numbers.step_shares import (
    DIVERGED,
    TERMINAL,
    count_stable_steps,
    finite_median,
    phases_and_states,
    phases_to_draw,
    recorded_steps,
    series_with_results,
)
from analysis.numbers.windows import windows
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.section import Captioned, Drawn, Figures, Section, draw_by_phase, pictures
from analysis.sections.steps import verification
from analysis.study import wording
from analysis.study.load import Frame, Study
from analysis.study.protocol import (
    NOT_DEFINED,
    base_rates,
    explain_undefined_states,
    refers_to_section,
    state_text,
    states_explained,
    step_terms,
    terms_in_brief,
)
from analysis.study.reference import reference_series
from analysis.words import join_words, lr_text, plural, power, wrap

TITLE = "Maximum stable learning rate α_max along the optimizer's step"
MOST_VECTOR_POINTS = 2000  # per panel; more are rasterized, because a PDF with megabytes of vectors renders slowly
COUNT = {"textcoords": "offset points", "fontsize": 5.5, "color": INK}  # beside a mark
DIVERGED_HEIGHT = 0.15  # in axes fractions, above the strip for values without a place on a log axis
# Values without a place on a log axis: (label, marker, height in axes fractions, test).
EDGES = (
    ("∞ (no positive curvature)", "^", 0.97, lambda values: np.isposinf(values)),
    ("0 (no descent direction)", "v", 0.085, lambda values: values == 0),
    ("lost to a non-finite loss", "+", 0.03, lambda values: np.isnan(values)),
)


def alpha_figures(study: Study, phase: str = "terminal") -> list[Figure]:
    """Draw one figure for every four series, states as rows.

    [] if this phase has no recorded step, e.g. every run diverged before it.
    """
    rows = recorded_steps(study, phase)
    counts = {
        state: count_stable_steps(study, phase, state) for each, state in phases_and_states(study) if each == phase
    }
    shown = {name for count in counts.values() for name in series_with_results(study, count)}
    present = [name for name in study.series if name in shown]
    if not present or rows.empty:
        return []
    figures = []
    for part in chunks(present, PANELS_PER_ROW):
        of_part = {state: count[count["series"].isin(part)] for state, count in counts.items()}
        figures.append(_alpha_figure(rows[rows["series"].isin(part)], of_part, part, looks(study)))
    return figures


def row_figure(study: Study, first: Sequence[str] = ()) -> tuple[Figure, str, int] | None:
    """Draw one row of at most four panels, from the run's own state where it was measured.

    The terminal checkpoints if measured, else the first phase.

    Args:
        study: the study.
        first: series to draw before all others.

    Returns:
        The figure, its phase and the number of measured series; None without a recorded step.
    """
    measured = phases_and_states(study)
    if not measured:
        return None
    phase = measured[0][0]
    states = [state for each, state in measured if each == phase]
    state = OWN_STATE if OWN_STATE in states else states[0]
    rows, count = recorded_steps(study, phase, state), count_stable_steps(study, phase, state)
    measured_series = series_with_results(study, count)
    present = choose_panels(study, first, measured_series)
    if not present or rows.empty:
        return None
    of_shown = count[count["series"].isin(present)]
    figure = _alpha_figure(rows[rows["series"].isin(present)], {state: of_shown}, tuple(present), looks(study))
    figure.axes[0].set_ylabel("$\\alpha_\\mathrm{max}$")
    return figure, phase, len(measured_series)


def _alpha_figure(rows: Frame, counts: dict[str, Frame], series: tuple[str, ...], styles: dict[str, Look]) -> Figure:
    """Draw one figure, a row for each state, a column for each series; ``counts``: `count_stable_steps` by state."""
    states = list(counts)
    figure = Figure(
        figsize=(max(2.6, WIDTH_INCHES * min(1.0, 0.1 + 0.3 * len(series))), 0.75 + 1.75 * len(states)),
        layout="constrained",
    )
    grid = np.atleast_2d(figure.subplots(len(states), len(series), sharex=True, sharey=True, squeeze=False))
    lrs = sorted({lr for count in counts.values() for lr in count["run_lr"]})
    limits = _limits(rows, lrs)
    for line, state in enumerate(states):
        for column, name in enumerate(series):
            ax = grid[line, column]
            part = rows[(rows["state"] == state) & (rows["series"] == name)]
            count = counts[state]
            _panel(ax, part, count[count["series"] == name], styles[name], lrs, limits)
            if line == 0:
                ax.set_title(wrap(name, 22), loc="left", fontweight="bold")
        grid[line, 0].set_ylabel(f"{state_text(state)}\n$\\alpha_\\mathrm{{max}}$")
    for ax in grid[-1]:
        ax.set_xlabel("learning rate α")
    _legend(figure, rows, any((count["outcome"] == DIVERGED).any() for count in counts.values()))
    return figure


def _limits(rows: Frame, lrs: list[float]) -> tuple[float, float]:
    """Return the axis's limits: all finite positive values and α_max = α, with a strip above and below for the rest."""
    positive = rows["alpha_max"][np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    values = np.concatenate([positive.to_numpy(dtype=float), lrs])
    low, high = math.log10(values.min()), math.log10(values.max())
    room = max(high - low, 1.0)
    return 10 ** (low - 0.34 * room), 10 ** (high + 0.14 * room)


def _panel(ax: Axes, part: Frame, count: Frame, style: Look, lrs: list[float], limits: tuple[float, float]) -> None:
    """Draw one series: finite α_max as points, medians per learning rate as a line, counts at the edges."""
    ax.set_yscale("log")
    lr_axis(ax, lrs, most=3)
    ax.set_ylim(*limits)
    ends = np.array(ax.get_xlim())
    ax.fill_between(ends, ends, limits[1], color="#f2f5f0", zorder=0, linewidth=0)
    ax.plot(ends, ends, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=2)
    _mark_diverged(ax, count, style)
    if part.empty:
        if (count["outcome"] == DIVERGED).any():
            return
        why = NOT_DEFINED if len(count) and (count["outcome"] == NOT_DEFINED).all() else "not recorded"
        say_instead(ax, why)
        return
    finite = part[np.isfinite(part["alpha_max"]) & (part["alpha_max"] > 0)]
    faint = {"alpha": 0.4, "markeredgewidth": 0, "zorder": 3, "rasterized": len(finite) > MOST_VECTOR_POINTS}
    mark(ax, finite["run_lr"], finite["alpha_max"], ".", style.color, 3.2, **faint)
    medians = pd.Series({lr: finite_median(rows["alpha_max"]) for lr, rows in part.groupby("run_lr")})
    medians = medians.where(medians > 0)
    dots = {"marker": style.marker, "markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5}
    ax.plot(medians.index, medians, color=style.color, linewidth=1.2, zorder=4, **dots)
    _edge_counts(ax, part, style)


def _mark_diverged(ax: Axes, count: Frame, style: Look) -> None:
    """Mark rates with diverged runs by a filled cross and k/n: these have no α_max."""
    strip = blended_transform_factory(ax.transData, ax.transAxes)
    for lr, runs in count.groupby("run_lr"):
        diverged = int((runs["outcome"] == DIVERGED).sum())
        if diverged:
            mark(ax, lr, DIVERGED_HEIGHT, "X", style.color, 4.6, markeredgewidth=0, transform=strip, zorder=5)
            place = {"xycoords": strip, "xytext": (0, 3.5), "ha": "center", "va": "bottom"}
            ax.annotate(f"{diverged}/{len(runs)}", (lr, DIVERGED_HEIGHT), **place, **COUNT)


def _edge_counts(ax: Axes, part: Frame, style: Look) -> None:
    """Draw markers with counts at the edges for steps outside a log axis."""
    strip = blended_transform_factory(ax.transData, ax.transAxes)
    for _, marker, height, which in EDGES:
        for lr, rows in part.groupby("run_lr"):
            count = int(which(rows["alpha_max"].to_numpy(dtype=float)).sum())
            if count:
                mark(ax, lr, height, marker, style.color, 3.6, transform=strip, zorder=5)
                ax.annotate(str(count), (lr, height), xycoords=strip, xytext=(3, 0), va="center", **COUNT)


def _legend(figure: Figure, rows: Frame, diverged: bool) -> None:
    """Draw the legend of the figure's marks."""
    values = rows["alpha_max"].to_numpy(dtype=float)
    handles = [
        entry("$\\alpha_\\mathrm{max} = \\alpha$", INK, linewidth=0.8, linestyle=(0, (4, 2))),
        mark_entry("recorded step", ".", alpha=0.5),
        entry("median of finite steps", marker="o", markersize=4),
        *(mark_entry(label, marker) for label, marker, _, which in EDGES if which(values).any()),
    ]
    if diverged:
        handles.append(mark_entry("diverged, of all runs (0 % stable)", "X", 5, markeredgewidth=0))
    fitting_legend(figure, handles, 3, handlelength=2, columnspacing=1.4)


CAPTION = (
    "α_max of the recorded steps against learning rate, {phase}. Above the dashed line (shaded) the training's own "
    "step lowers its batch's loss to second order; the small numbers count steps. Filled crosses: runs that diverged "
    "and have no such checkpoint, of all runs there; they count as 0 % stable, and no α_max is made up for them."
)


def figures(study: Study) -> Figures:
    """Draw the loss along typical steps, then one figure for each phase and four series."""
    found = step_figure(study)
    along = {} if found is None else {NAME: Captioned(found[1], _caption_along(*found) + terms_in_brief(study))}
    return along | draw_by_phase(study, "alpha", phases_to_draw(study), alpha_figures, CAPTION + terms_in_brief(study))


def tables(study: Study, phases: Sequence[str]) -> Sequence[Table | str]:
    """Return the tables of ``phases`` without details, and a sentence on undefined states."""
    absent = explain_undefined_states(study)
    return [*(table.text(details=False) for table in alpha_tables(study, phases)), *([absent] if absent else [])]


def body(study: Study, drawn: Drawn) -> Pieces:
    head = heading(TITLE)
    absent = explain_undefined_states(study)
    if not phases_and_states(study):
        why = "α_max was not measured in this study (hessian=false, or no run left a checkpoint)."
        return head + paragraph(absent or why)
    told = states_explained(study.curvature) + state_ratio(study) + base_rates(study) + step_terms(study)
    explained = paragraph(told) + paragraph(explain(study) + explain_pieces(study))
    explained += paragraph(absent) if absent else ()
    return head + explained + pictures(drawn) + paragraph(verification(study)) + shown(alpha_tables(study))


def explain_pieces(study: Study) -> str:
    """Return a sentence on series whose loss is piecewise smooth; "" for none."""
    runs = study.runs
    names = list(dict.fromkeys(runs["series"][runs.get("piecewise_smooth", 0 * runs["lr"]) == 1]))
    if not names:
        return ""
    return (
        f" The loss of {join_words(names)} is piecewise smooth: the model selects by its own scores, and curvature and "
        "α_max are the current piece’s, as if the step changed no selection."
    )


def state_ratio(study: Study) -> str:
    """Describe the ratio of α_max under the paper's state to the run's own; "" without any.

    Median over runs with finite medians of both.
    """
    rows = recorded_steps(study, "terminal")
    finite = rows[np.isfinite(rows["alpha_max"])]
    medians = finite.groupby(["run_id", "state"])["alpha_max"].median().unstack()
    if not {"paper", "checkpoint"} <= set(medians.columns):
        return ""
    ratios = (medians["paper"] / medians["checkpoint"]).replace(np.inf, np.nan).dropna()
    if ratios.empty:
        return ""
    return (
        f" Here a run's median α_max in the paper's warm-up state is {ratios.median():.1f} times that in its own "
        f"(median of {plural(len(ratios), 'run')}; {ratios.min():.1f} to {ratios.max():.1f})."
    )


def brief(study: Study, drawn: Drawn) -> Pieces:
    """Return the loss along a step with its explanation, and a table, from the run's own state if measured."""
    if not phases_and_states(study):
        absent = explain_undefined_states(study)
        return heading(TITLE) + (paragraph(absent) if absent else ())
    terms = step_terms(study) if refers_to_section(study) else ""
    along = paragraph(explain(study) + explain_pieces(study) + terms) + drawn[NAME] if NAME in drawn else ()
    tables = alpha_tables(study)
    own = [each for each in tables if state_text(OWN_STATE) in each.title]
    return heading(TITLE) + along + shown((own or tables)[:1])


NAME = "alpha-along-step"
EXPLAINED = (
    "α_max = −2 · slope / curvature describes the weights that a run has reached, not the model. To second order the "
    "loss along a step is a parabola, back at its start at α_max.{growth} α_max is no recommended rate: it says how "
    "far a step can go from these weights. α_max / α compares runs."
)
GROWTH = (
    " α_max grows with the rate of training: a run leaves regions whose curvature along its steps is too large for its "
    "rate, and ends in a flatter one."
)
ALONG_CAPTION = (
    "Loss along a step of {series} at {number} rates of training, from the recorded slope and curvature of the step "
    "with the median α_max (terminal checkpoint, run's own state). Dot: the step taken; dashed: α_max."
)


def explain(study: Study) -> str:
    """Return the meaning of α_max; that it grows with the rate is said only if it does so here."""
    steps = typical_steps(study, reference_series(study))["alpha_max"]
    return EXPLAINED.format(growth=GROWTH if len(steps) > 1 and steps.is_monotonic_increasing else "")


def typical_steps(study: Study, series: str) -> Frame:
    """Return the recorded step with the median α_max at the lowest, the best and the highest measured rate.

    Rates in multiples of an optimizer's own have slope and curvature of the loss per multiple, too.

    Returns:
        ``run_lr lr slope curvature alpha_max``, one row per rate; fewer if rates coincide.
    """
    rows = recorded_steps(study, TERMINAL, OWN_STATE)
    rows = rows[(rows["series"] == series) & np.isfinite(rows["alpha_max"]) & (rows["alpha_max"] > 0)]
    rows, best = rows.sort_values("alpha_max"), windows(study)[series].median
    rates = sorted(set(rows["run_lr"]))
    chosen = {*rates[:1], *([best.best_lr] if best is not None and best.best_lr in rates else []), *rates[-1:]}
    places = [np.flatnonzero(rows["run_lr"] == lr) for lr in sorted(chosen)]
    medians = [int(place[(len(place) - 1) // 2]) for place in places]
    steps = rows.iloc[medians][["run_lr", "lr", "slope", "curvature", "alpha_max"]]
    unit = reference_of(study, str(study.of(series)["optimizer"].iloc[0])) if study.is_in_multiples else 1.0
    return steps.assign(slope=steps["slope"] * unit, curvature=steps["curvature"] * unit**2)


def step_figure(study: Study) -> tuple[str, Figure] | None:
    """Draw the reference's loss along typical steps; None below two measured rates."""
    series = reference_series(study)
    steps = typical_steps(study, series)
    if len(steps) < 2:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 1.75), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(steps)))
    for ax, step in zip(axes, steps.itertuples(), strict=True):
        _step_panel(ax, step, looks(study)[series].color)
    axes[0].set_ylabel(f"change of the loss{wording.nats(study)}")
    return series, figure


def _caption_along(series: str, figure: Figure) -> str:
    return ALONG_CAPTION.format(series=series, number={2: "two", 3: "three"}[len(figure.axes)])


def _step_panel(ax: Axes, step, color: str) -> None:
    """Draw one step's parabola up to beyond α_max."""
    taken = step.lr if np.isfinite(step.lr) else step.run_lr
    lengths = np.linspace(0, 1.15 * max(step.alpha_max, taken), 60)
    change = lengths * step.slope + lengths**2 * step.curvature / 2
    ax.plot(lengths, change, color=color)
    ax.plot(taken, taken * step.slope + taken**2 * step.curvature / 2, "o", color=color, markersize=4)
    ax.axhline(0, color=MUTED, linewidth=0.6)
    ax.axvline(step.alpha_max, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    limit = f"$\\alpha_\\mathrm{{max}}$ {power(step.alpha_max)}"
    ax.set_title(f"trained at {lr_text(step.run_lr)}: {limit}", loc="left", fontsize=8)
    ax.set_xlabel("length of the step α", fontsize=8)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
    ax.tick_params(labelsize=7)


SECTION = Section(body, figures=figures, brief=brief, tables=tables)
