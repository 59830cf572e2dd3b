"""Learning curves against medians worked out by hand, and what their panels show."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.drawing.style import lr_colors
from analysis.sections.curves import figures as curve_figures
from analysis.sections.curves import median_curve, smoothed
from analysis.study.load import load
from tests.analysis.synthetic import INIT, QUICKSTART_LRS, write_study


def runs(*losses, diverged=()):
    """One LR; a run a list of losses from step 1 on."""
    rows = [
        {"run_id": str(i), "step": s, "loss": x, "diverged": i in diverged}
        for i, each in enumerate(losses)
        for s, x in enumerate(each, 1)
    ]
    return pd.DataFrame(rows)


def test_smoothing_leaves_lost_losses_out():
    line = smoothed(pd.Series([1.0] * 20 + [3.0] * 20 + [math.inf, math.nan]))
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
    crosses = [line for line in late.lines if line.get_marker() == "x"]
    assert len(crosses) == 2 and all(line.get_ydata()[0] <= late.get_ylim()[1] for line in crosses)


def test_many_series_make_several_figures_and_none_without_a_loss(tmp_path):
    settings = tuple({"optimizer": name} for name in ("adamw", "muon", "lion"))
    many = load(write_study(tmp_path, mechanisms=("sa", "sc"), lrs=(1e-3, 1e-2), seeds=1, settings=settings))
    assert list(curve_figures(many)) == ["curves", "curves-1", "curves-by-lr"]
    assert curve_figures(load(write_study(tmp_path / "none", curves=False))) == {}
