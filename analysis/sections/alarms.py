"""Show what breaks first: which logged signal warns of a break, how long before, and its false alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims.claim import Claim
from analysis.claims.judging import judge
from analysis.claims.reference import short_verdict
from analysis.claims.signals import TEST
from analysis.drawing.marks import mark, rate_legend, symbols
from analysis.drawing.style import MUTED, lr_colors, panel_grid
from analysis.drawing.typeset import Cell, Table
from analysis.numbers.alarms import (
    FEWEST_ROWS,
    HORIZON,
    MADS,
    ROWS,
    Signal,
    Warned,
    find_alarms,
    judge_signals,
    list_rows,
)
from analysis.numbers.early_measurements import breaks
from analysis.numbers.ranking import Estimate
from analysis.numbers.window_ends import shown_states
from analysis.sections.section import (
    Captioned,
    Figures,
    Section,
    is_of_rates,
    list_one,
    make_body,
    make_printer,
)
from analysis.study.load import ENDED, Frame, Study
from analysis.study.once import once_per_study
from analysis.words import join_words, plural
from stability.runs.words import EXPLODED

TITLE, NAME = "What breaks first", "alarms"
LOGS = ("activations", "edge")
BROKEN = ("diverged", EXPLODED, "spiked")  # ends of a run that the first page counts as a break
PANELS, COLUMNS = 6, 3
PER_CENT = "{:.0%}"
CAPTION = (
    "Signals of the broken runs against steps from the onset: the step at which the smoothed loss exceeded its minimum "
    "by a spike's height (dashed). One line a run, coloured by learning rate. Dots: rows in alarm."
)


def applies(study: Study) -> bool:
    return is_of_rates(study) and any(len(study.signals.get(log, ())) for log in LOGS)


@once_per_study
def judged(study: Study) -> list[Warned]:
    """Return how well each signal of a study warns."""
    return judge_signals([study])


def sentences(study: Study) -> list[str]:
    """Return which signals warn of more breaks than chance, and which of them warns earliest; or why none is judged."""
    found, broken = judged(study), int(breaks(study)["broke"].sum())
    if not broken:
        return ["No run broke by this rule: nothing to warn of."]
    ended = study.runs.loc[study.runs["status"].isin(ENDED), "run_id"]
    sound = int((~breaks(study)["broke"].reindex(ended)).sum())
    runs = f"{plural(broken, 'run')} broke, {sound} did not.{_say_recovered(study)}"
    judgeable = max((each.broken for each in found), default=0)
    if not judgeable:
        return [f"{runs} All broke too early to judge: no signal has more than {FEWEST_ROWS} rows before."]
    if judgeable < broken:
        runs += f" {broken - judgeable} broke too early to judge, with at most {FEWEST_ROWS} rows before."
    if rare := [each.signal.name for each in found if not each.broken]:
        runs += f" Logged too rarely to be judged: {join_words(rare)}."
    if not any(each.runs for each in found):
        return [f"{runs} No run of a curve with broken ones held, so chance is unknown and no signal is judged."]
    telling = [each for each in found if each.warned.low > each.chance.high]
    if not telling:
        return [f"{runs} No signal is shown to warn of more of them than it would by chance."]
    named = [f"{each.signal.name} ({100 * each.warned.value:.0f} %, by chance {100 * each.chance.value:.0f} %)"
             for each in sorted(telling, key=lambda each: -each.warned.value)]  # fmt: skip
    first = max(telling, key=lambda each: each.lead.value)
    lead = f"{first.lead.value:.0f} steps before the onset{_within(first.lead, '{:.0f}')}"
    return [f"{runs} More often than by chance warn: {'; '.join(named)}. The earliest is {first.signal.name}, {lead}."]


def _say_recovered(study: Study) -> str:
    """Return how many broken runs ended otherwise; the first page counts runs by their ends. "" for none."""
    broke = breaks(study)["broke"]
    runs = study.runs[study.runs["run_id"].map(broke).eq(True)]
    ends = shown_states(runs)
    counts = ends[~ends.isin(BROKEN)].value_counts()
    if counts.empty:
        return ""
    told = join_words(f"{number} {state}" for state, number in counts.items())
    return f" Of those that broke, {told} in the end."


def _within(found: Estimate, form: str) -> str:
    if not found.has_interval:
        return ""
    return f" (95 %: {form.format(found.low)} to {form.format(found.high)})"


def table(study: Study) -> Table | None:
    """Return one row per signal that is judged: warned runs, by chance, leads, false alarms, its claim; or None."""
    claims = {each.test: each for each in judge(study)}
    rows = [
        (
            Cell(each.signal.name),
            Cell(str(each.broken)),
            _cell(each.warned, PER_CENT),
            _cell(each.chance, PER_CENT),
            _cell(each.lead, "{:.0f}"),
            _cell(each.beyond_loss, "{:+.0f}"),
            _cell(each.false, "{:.1f}"),
            _claimed(claims.get((TEST, each.signal.name))),
        )
        for each in judged(study)
        if each.broken
    ]
    limits = [f"{each.signal.name} {each.signal.limit:g}" for each in judged(study) if each.signal.limit is not None]
    caption = (
        f"Alarm: more than {MADS:g} scaled median absolute deviations above the median of the signal's last {ROWS} "
        f"rows (at least {FEWEST_ROWS}), NaN or infinite, or beyond a named limit: {join_words(limits) or 'none'}. "
        f"Warned: share of a group's broken runs in alarm within {HORIZON} steps before the onset, mean over groups. "
        "Lead: median steps from the first such row to the onset. Before the loss: the same less the training loss's, "
        "over runs of which both warned. By chance: the share warned if every step of runs that did not break were an "
        "onset; false alarms: their beginnings per 1,000 steps of these runs. Both are of the curves with broken runs, "
        "from the lowest rate at which one broke (if none held there, the largest at which one did). Below: 95 % "
        "intervals over groups of runs with one mechanism, settings and seed; for shares at least Clopper and "
        f"Pearson's, with groups (by chance: {HORIZON} steps) as trials. Gain on the loss: mean over groups of "
        "the lead, 0 without an alarm in time, less the mean lead by chance, both less the loss's; below, its interval "
        "(Welch's, of two groups their range) and the verdict on “warns before the training loss does”."
    )
    header = (
        "signal",
        "broken runs",
        "warned",
        "by chance",
        "lead",
        "before the loss",
        "false alarms",
        "gain on the loss",
    )
    return Table("Which signal warns", caption, header, tuple(rows)) if rows else None


def _cell(found: Estimate, form: str) -> Cell:
    if math.isnan(found.value):
        return Cell("--")
    value, low, high = (form.format(each).replace("%", " %") for each in (found.value, found.low, found.high))
    return Cell(value, f"{low} to {high}" if found.has_interval else "")


def _claimed(claim: Claim | None) -> Cell:
    """Return a claim's effect, its interval and its verdict; "--" if it was not judged."""
    if claim is None:
        return Cell("--")
    return Cell(claim.effect, f"{claim.interval}\n{short_verdict(claim)}", claim.verdict in ("holds", "contradicted"))


def figures(study: Study) -> Figures:
    """Draw the signals of the broken runs around the onset, a panel each; {} without a broken run."""
    found = [each for each in judged(study) if each.broken]
    telling = sorted(found, key=lambda each: (-each.warned.value, -np.nan_to_num(each.lead.value)))[:PANELS]
    return {NAME: Captioned(_draw(study, telling), CAPTION)} if telling else {}


def _draw(study: Study, found: Sequence[Warned]) -> Figure:
    known, runs = breaks(study), study.runs.set_index("run_id")
    onsets = known.loc[known["broke"] & known["onset"].notna(), "onset"]
    figure, axes = panel_grid(len(found), min(COLUMNS, len(found)), 1.75, 0.4, sharex=True)
    colors = lr_colors(runs.loc[onsets.index, "lr"])
    for ax, each in zip(axes, found, strict=True):
        rows = list_rows(study, each.signal)
        for run, own in rows[rows["run_id"].isin(onsets.index)].groupby("run_id"):
            _draw_run(ax, own.sort_values("step"), float(onsets[run]), each.signal, colors[runs.loc[run, "lr"]])
        ax.axvline(0, color=MUTED, linewidth=0.8, linestyle="--")
        ax.set_title(symbols(each.signal.name))
    for ax in axes[-COLUMNS:]:
        ax.set_xlabel("steps from the onset")
    rate_legend(figure, {lr: colors[lr] for lr in sorted(colors)})
    return figure


def _draw_run(ax: Axes, rows: Frame, onset: float, signal: Signal, color: Any) -> None:
    """Draw one run's signal from `HORIZON` steps before its onset to a fifth of that after it, with its alarms."""
    x, y = rows["step"].to_numpy(dtype=float) - onset, signal.sign * rows["value"].to_numpy(dtype=float)
    alarm = find_alarms(rows["value"].to_numpy(), signal.signed_limit)
    near = (x >= -HORIZON) & (x <= HORIZON / 5) & np.isfinite(y)
    ax.plot(x[near], y[near], color=color, linewidth=0.9)
    mark(ax, x[near & alarm], y[near & alarm], "o", color, 3, linestyle="")
    if (y[near & (x < 0)] > 0).all():
        ax.set_yscale("log")


TABLES = list_one(table)
BODY = make_body(TITLE, TABLES, sentences)
SECTION = Section(BODY, applies, figures, make_printer(TABLES, sentences), BODY)
