"""Learning curves against medians worked out by hand, and what their panels show."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.drawing.style import lr_colors, panel_grid
from analysis.sections import curves
from analysis.sections.curves import _spans, median_curves, smooth
from analysis.sections.curves import figures as curve_figures
from analysis.study.load import load
from tests.analysis.synthetic import INIT, QUICKSTART_LRS, write_study


def runs(*losses, diverged=(), lr=1e-3):
    """One LR; a run a list of losses from step 1 on."""
    rows = [
        {"run_id": f"{lr} {i}", "series": "sa", "run_lr": lr, "step": s, "loss": x, "diverged": i in diverged}
        for i, each in enumerate(losses)
        for s, x in enumerate(each, 1)
    ]
    return pd.DataFrame(rows)


def median_curve(rows, width):
    """The curve of the only series and rate."""
    (line,) = median_curves(rows, width).values()
    return line


def test_smoothing_leaves_lost_losses_out():
    line = smooth(pd.Series([1.0] * 20 + [3.0] * 20 + [math.inf, math.nan]))
    assert line[5] == 1.0 and line[30] == 3.0 and line[20] == 2.0 and math.isnan(line[40]) and math.isnan(line[41])


def test_a_line_is_the_median_over_seeds_and_its_shade_their_range():
    line = median_curve(runs([4, 3, 2], [5, 1, 2], [6, 2, 8]), 1)
    assert (
        line["median"].tolist() == [5, 2, 2]
        and line["low"].tolist() == [4, 1, 2]
        and line["high"].tolist() == [6, 3, 8]
    )


def test_smoothing_comes_before_the_median():
    line = median_curve(runs([0, 3, 0], [3, 0, 3]), 3)
    assert line["median"].tolist() == [1.5, 1.5, 1.5]  # means of neighbours: 1.5, 1, 1.5 and 1.5, 2, 1.5


def test_a_diverged_seed_counts_as_infinite_after_its_end_and_an_unfinished_one_does_not():
    losses = ([4, 3, 2], [5, 4], [6])
    assert median_curve(runs(*losses), 1)["median"].tolist() == [5, 3.5, 2]
    one = median_curve(runs(*losses, diverged=(2,)), 1)["median"]
    # at step 3 one of two counted seeds is infinite
    assert one.tolist() == [5, 4, pytest.approx(math.nan, nan_ok=True)]
    assert np.isnan(median_curve(runs([4, 3], [5], diverged=(1,)), 1)["median"][2])


def by_hand(rows, width):
    """The same of one series and rate, run by run and step by step."""
    smooth, last = {}, {}
    for run, part in rows.groupby("run_id"):
        known = [(step, loss) for step, loss in zip(part["step"], part["loss"], strict=True) if math.isfinite(loss)]
        for place, (step, _) in enumerate(known):
            near = known[max(0, place - width // 2) : place + (width - 1) // 2 + 1]
            smooth[run, step] = sum(loss for _, loss in near) / len(near)
        last[run] = known[-1][0]
    lost = set(rows.loc[rows["diverged"], "run_id"])
    found = {}
    for step in sorted({step for _, step in smooth}):
        own = {run: smooth[run, step] for run in last if (run, step) in smooth}
        ended = [math.inf for run in lost if step > last[run]]
        middle = statistics.median([*own.values(), *ended])
        found[step] = (middle if math.isfinite(middle) else None, min(own.values()), max(own.values()))
    return found


@pytest.mark.parametrize("width", [1, 2, 5])
def test_curves_of_many_rates_at_once_are_those_of_each_by_itself(width):
    draws, gap = np.random.default_rng(0), [math.nan, math.inf]
    parts = [
        runs(
            *(draws.normal(3, 1, length).tolist() for length in (12, 9 + place, 12)),
            [2.0, 3.0, *gap, 1.0, 4.0],
            diverged=(1, 3) if place % 2 else (),
            lr=10.0**-place,
        )
        for place in range(3)
    ]
    shuffled = pd.concat(parts).sample(frac=1, random_state=0)
    found = median_curves(shuffled, width)
    assert list(found) == [("sa", 0.01), ("sa", 0.1), ("sa", 1.0)]
    for place, part in enumerate(parts):
        line = found["sa", 10.0**-place]
        drawn = {
            step: (
                None if math.isnan(row["median"]) else pytest.approx(row["median"], rel=1e-12),
                row["low"],
                row["high"],
            )
            for step, row in line.iterrows()
        }
        expected = {
            step: (middle, pytest.approx(low), pytest.approx(high))
            for step, (middle, low, high) in by_hand(part, width).items()
        }
        assert list(drawn) == list(expected) and all(drawn[step] == expected[step] for step in drawn)


def test_a_rate_without_a_finite_loss_has_a_curve_without_steps():
    both = pd.concat([runs([math.nan]), runs([4.0, 3.0], lr=1e-2)])
    assert {key: len(line) for key, line in median_curves(both, 1).items()} == {("sa", 1e-3): 0, ("sa", 1e-2): 2}
    assert {len(line) for line in median_curves(runs([math.nan]), 1).values()} == {0}


def test_each_mechanism_has_an_early_and_a_late_panel_and_each_rate_one_of_its_own(quickstart):
    figures = curve_figures(quickstart)
    by_mechanism, by_rate = figures["curves"].figure, figures["curves-by-lr"].figure
    assert [ax.get_xlim() for ax in by_mechanism.axes] == [(0, 40), (40, 200)] * 4
    assert [ax.get_title(loc="left") for ax in by_mechanism.axes[::2]] == ["sa", "sc", "mix", "sw"]
    colors = {line.get_color() for line in by_mechanism.axes[0].lines}
    assert colors == set(lr_colors(QUICKSTART_LRS).values())
    assert [ax.get_title(loc="left") for ax in by_rate.axes] == [
        "LR 3e-4",
        "LR 1e-3",
        "LR 3e-3",
        "LR 1e-2",
        "LR 3e-2",
        "LR 1e-1",
    ]


def test_a_blow_up_stays_inside_the_axis_and_is_crossed(quickstart):
    early, late = curve_figures(quickstart)["curves"].figure.axes[:2]
    assert late.get_ylim()[1] < INIT < early.get_ylim()[1] + 0.5
    (crosses,) = (line for line in late.lines if line.get_marker() == "x")  # one drawing, however many runs diverged
    heights = np.asarray(crosses.get_ydata())
    assert len(heights) == 2 and heights.max() <= late.get_ylim()[1]


def test_rates_that_explode_do_not_press_the_others_flat():
    """Two of three rates end a hundred times above the start; the axis ends there."""
    steps = np.arange(1, 201)
    fall, rise = 5.0 - steps / 100, 5.0 * 1.03**steps
    rows = pd.concat([runs(line.tolist(), lr=lr) for line, lr in ((fall, 1e-3), (rise, 1e-2), (rise, 1e-1))])
    *_, whole = _spans(rows.assign(val_nll=math.nan))
    assert 5 < whole.limits[1] < 6


def test_many_series_make_several_figures_and_none_without_a_loss(tmp_path):
    settings = tuple({"optimizer": name} for name in ("adamw", "muon", "lion"))
    many = load(write_study(tmp_path, mechanisms=("sa", "sc"), lrs=(1e-3, 1e-2), seeds=1, settings=settings))
    assert list(curve_figures(many)) == ["curves", "curves-1", "curves-by-lr"]
    assert curve_figures(load(write_study(tmp_path / "none", curves=False))) == {}


def test_a_grid_of_panels_has_no_empty_place_and_a_height_by_its_rows():
    figure, axes = panel_grid(5, 3, 1.5, 0.5, width=6.0, sharex=True)
    assert list(axes) == figure.axes and len(axes) == 5
    assert tuple(figure.get_size_inches()) == pytest.approx((6.0, 0.5 + 2 * 1.5))


def test_the_curves_are_smoothed_once_for_both_of_a_reports_figures(quickstart, monkeypatch):
    study, smoothed = replace(quickstart), []
    monkeypatch.setattr(
        curves, "median_curves", lambda rows, width: smoothed.append(width) or median_curves(rows, width)
    )
    assert curves.row_figure(study) is not None and curve_figures(study)
    assert len(smoothed) == 2  # for the early part, and for the late one
