"""Reports of studies that are nothing but one extreme: every run lost, twenty mechanisms, very many steps."""

from __future__ import annotations

import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from analysis import assembly
from analysis.drawing.files import lay_out
from analysis.drawing.interactive import describe
from analysis.drawing.pieces import Paragraph
from analysis.drawing.style import RC
from analysis.export import export
from analysis.page import build_page
from analysis.paper.figures import FOOT, alpha_grids
from analysis.paper.grid import blocks
from analysis.report import build_together
from analysis.sections import alpha, curvature, curves, nll_figures
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.nll import sensitivity_table, window_table
from analysis.sections.steps import verification
from analysis.study.load import load
from tests.analysis.synthetic import write_study

TWENTY = [f"m{place:02d}" for place in range(20)]
ASKED = {"hessian": True, "curvature": {"phase": "terminal", "state": ["paper"], "recorded_steps": 5}}


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """A study that was to measure α_max and of which every run diverged before its first checkpoint."""
    study = load(
        write_study(tmp_path_factory.mktemp("lost"), mechanisms=["sa", "sc"], lrs=[1e-3, 1e-2], nll=lambda *_: math.inf)
    )
    return replace(study, study=study.study | {"spec": ASKED})


def test_where_every_run_diverged_no_panel_is_drawn_without_a_step(lost):
    assert alpha.alpha_figures(lost) == [] and curvature.step_figures(lost) == []


def test_where_every_run_diverged_the_report_says_so_in_whole_sentences(lost):
    assert verification(lost) == (
        "No step was recorded: every run that was to be measured diverged before its checkpoint."
    )
    (table,) = alpha_tables(lost)
    assert [cell.text for cell in table.rows[0]] == ["1e-3", "--", "--", "0", "0"]
    assert "Steps: none; -- where there is none." in table.caption and "not recorded steps" not in table.caption
    assert {row[2].text for row in window_table(lost).rows} == {"every run diverged"}
    assert verification(lost) in [piece.text for piece in alpha.body(lost, {}) if isinstance(piece, Paragraph)]


def test_a_mechanism_that_only_diverged_has_no_sensitivity_rather_than_the_lowest(tmp_path, lost):
    assert sensitivity_table(lost) is None
    half = load(
        write_study(
            tmp_path,
            mechanisms=["sa", "sc"],
            lrs=[1e-3, 1e-2],
            nll=lambda m, lr, _: math.inf if m == "sa" else 2 + 2 * lr,
        )
    )
    table = sensitivity_table(half)
    assert table is not None
    assert [(row[0].text, row[1].text, row[1].bold) for row in table.rows] == [("sc", "0.009", True)]
    assert "Without one: of sa every run diverged." in table.caption


def panel_inches(figure):
    """The height of the first panel once the figure is laid out."""
    lay_out(figure)
    return figure.axes[0].get_position().height * figure.get_figheight()


def test_the_legend_of_twenty_mechanisms_takes_no_room_from_the_panels(tmp_path):
    few, many = (
        load(write_study(tmp_path / str(len(names)), mechanisms=names, lrs=[1e-3, 1e-2], seeds=1))
        for names in (TWENTY[:4], TWENTY)
    )
    with matplotlib.rc_context(RC):
        heights = [
            (panel_inches(nll_figures.nll_figure(each)), panel_inches(curves.figures(each)["curves-by-lr"].figure))
            for each in (few, many)
        ]
    assert all(tall > 0.75 * usual for usual, tall in zip(*heights, strict=True))


def test_crosses_of_twenty_mechanisms_that_diverged_stay_at_the_foot(tmp_path):
    study = load(
        write_study(tmp_path, mechanisms=TWENTY, lrs=[1e-3, 1e-2], seeds=1, curves=False, states=["paper"],
                    nll=lambda m, lr, _: math.inf if lr > 5e-3 else 2.0, alpha=lambda *_: [0.1])
    )  # fmt: skip
    (figure,) = alpha_grids(blocks([study]), "terminal", "paper")
    heights = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert len(heights) == len(set(heights)) == 20
    assert FOOT[0] <= min(heights) < max(heights) < FOOT[1]


@pytest.mark.parametrize("rates", [[1e-3, 1e-2], [1e-4, 1e-3, 1e-2, 1e-1], [1e-3, 1.2e-3, 1e-2]])
def test_marks_of_twenty_mechanisms_at_one_rate_stay_on_the_axes_and_apart_from_the_next_rates(tmp_path, rates):
    study = load(
        write_study(tmp_path, mechanisms=TWENTY, lrs=rates, seeds=1, curves=False,
                    nll=lambda m, lr, _: 2.0 if lr == rates[1] and m == "m00" else math.inf)
    )  # fmt: skip
    with matplotlib.rc_context(RC):
        figure = nll_figures.nll_figure(study)
        lay_out(figure)
    ax = figure.axes[0]
    crosses = [line for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())]
    places = [(line.get_xdata()[0], line.get_transform().transform(line.get_xydata())[0, 0]) for line in crosses]
    of_rate = [[place for lr, place in places if lr == rate] for rate in rates]
    assert [len(row) for row in of_rate] == [20, 19, *([20] * (len(rates) - 2))]
    left, right = ax.get_window_extent().extents[[0, 2]]
    assert left < min(of_rate[0]) and max(of_rate[-1]) < right
    assert all(max(one) < min(following) for one, following in zip(of_rate, of_rate[1:], strict=False))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return load(
        write_study(folder, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=1, alpha=lambda *_: [1e-2] * 5 + [math.inf])
    )


def dots(study):
    """Whether the recorded steps in each panel of the α_max figure are a picture."""
    (figure,) = alpha.alpha_figures(study)
    return [line.get_rasterized() for ax in figure.axes for line in ax.lines if line.get_marker() == "."]


def test_recorded_steps_by_the_thousand_are_a_picture_in_their_panel(small, monkeypatch):
    assert dots(small) == [False, False]
    monkeypatch.setattr(alpha, "MOST_VECTOR_POINTS", 9)  # of 10
    assert dots(small) == [True, True]


def places(figure):
    return np.round([ax.get_position().bounds for ax in figure.axes], 12).tolist()


def test_a_figure_stands_alike_in_every_format_whichever_was_written_first(small):
    def drawn():
        with matplotlib.rc_context(RC):
            return alpha.alpha_figures(small)[0]

    found = []
    for order in (("pdf", "svg", "png"), ("png", "pdf"), ()):
        figure = drawn()
        for kind in order:
            assembly.render(figure, kind)
        pdf = assembly.render(figure, "pdf")
        found.append((places(figure), pdf, describe(figure)))
    unsaved = drawn()
    assert all(each == found[0] for each in found) and describe(unsaved) == found[0][2]


def test_a_figure_is_drawn_once_for_all_that_it_is_written_as(small, tmp_path, monkeypatch):
    calls, draw = [], alpha._alpha_figure
    monkeypatch.setattr(alpha, "_alpha_figure", lambda *given: calls.append(1) or draw(*given))
    study = replace(small)  # nothing was drawn of it yet
    build_together([study], "small", tmp_path)
    build_page([study], "small", tmp_path)
    written = export(study, tmp_path / "files")
    assert len(calls) == 2, "in brief on the second page, and in its section"
    assert {path.suffix for path in written} >= {".csv", ".parquet", ".pdf", ".svg", ".png"}
