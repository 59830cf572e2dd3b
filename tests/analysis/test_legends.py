"""Every figure's legend lies inside the figure, from one series to four: a saved figure cuts what lies beyond."""

import math

import matplotlib
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.drawing.marks import entry, legend_columns, mechanism_legend
from analysis.drawing.style import RC, WIDTH_INCHES, Look, fitting_legend
from analysis.sections import connectivity_figures as connectivity
from analysis.sections import curvature
from analysis.sections.alpha import alpha_figures
from analysis.sections.layer_figures import FILTERS, QK
from analysis.study.load import load
from stability.runs import results
from stability.runs.schema import SPECTRA_COLUMNS
from tests.analysis.synthetic import QUICKSTART_LRS, write_study
from tests.analysis.test_probe_analysis import filter_rows, spectra_row


def test_a_narrow_figure_has_fewer_columns_in_its_legend():
    handles = [entry("sa mhc_lite layers=24") for _ in range(4)]
    assert legend_columns(handles) == 2 and legend_columns(handles, 0.5) == 1


@pytest.mark.parametrize(("number", "rows"), [(8, 1), (9, 2), (10, 2), (17, 3)])
def test_a_legend_of_several_rows_is_read_from_left_to_right(number, rows):
    """Nine entries in eight columns had the second one alone in the second row."""
    figure, labels = Figure(figsize=(20, 2), layout="constrained"), [f"{place}" for place in range(number)]
    assert fitting_legend(figure, [entry(label) for label in labels], 8) == rows
    figure.draw_without_rendering()
    (legend,) = figure.legends
    places = {text.get_text(): text.get_window_extent() for text in legend.get_texts()}
    assert sorted(labels, key=lambda label: (-round(places[label].y0), places[label].x0)) == labels
    lengths = [sum(round(places[label].y0) == level for label in labels) for level in
               {round(each.y0) for each in places.values()}]  # fmt: skip
    assert len(lengths) == rows and max(lengths) - min(lengths) < rows


def test_a_legend_of_series_that_is_wider_than_its_figure_has_fewer_columns():
    """Dashes are long: four names of a row by their characters ran over the margin."""
    names = ("sc+cc rope=relative", "sc+cc rope=none", "sc+cc rope=gradient", "mix+cc sc.rope=relative")
    look = {name: Look("#000000", "o", (0, (3, 1 + place))) for place, name in enumerate(names)}
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(WIDTH_INCHES, 2), layout="constrained")
        figure.subplots()
        mechanism_legend(figure, look)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    extent = legend.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width


MECHANISMS = ("sc", "sa", "mix", "sw")
EVERY_EDGE = [1e-3, 4e-3, math.inf, 0.0, math.nan]  # each with an entry of its own in the α_max legend


def measured_study(folder, mechanisms, lrs):
    """A study with every table that a figure with a legend draws from."""
    path = write_study(folder, mechanisms=mechanisms, lrs=lrs, seeds=1, alpha=lambda *_: EVERY_EDGE)
    spectra, probes = {name: [] for name in SPECTRA_COLUMNS}, {"spectra": [], "filter": [], "qk": []}
    for run in load(path).runs.itertuples():
        where = {"run_id": run.run_id, "phase": "terminal", "lr": run.lr}
        known = where | {
            "state": "checkpoint",
            "loss_before": 2.9,
            "slope": -10.0,
            "curvature": 2e3,
            "alpha_max": 0.01,
            "critical_lr": 0.03,
        }
        spectra["profile"] += [known | {"alpha": a, "loss": 2.9 - 10 * a} for a in (0.0, 0.02, 0.04)]
        spectra["density"] += [
            known | {"probe": 0, "node": node, "weight": 0.5, "num_params": 99} for node in (0.0, 1.0)
        ]
        blocks = ("embedding", "blocks.0.mixer", "blocks.0.ffn", "blocks.0.mixer_norm", "head", "bias")
        spectra["blocks"] += [known | {"block": block, "share": 300.0, "own": 300.0} for block in blocks]
        probes["spectra"].append(spectra_row(run, 0, 0, 0))
        probes["filter"] += filter_rows(run, 0)
        probes["qk"] += [
            where | {"layer": 0, "mixer": "sa", "head": 0, "index": index, "singular_value": 2.0 - index}
            for index in (0, 1)
        ]
    for tables, columns in ((spectra, SPECTRA_COLUMNS), (probes, results.PROBE_COLUMNS)):
        for name, rows in tables.items():
            frame = pd.DataFrame(rows, columns=list(columns[name]))
            results.write_parquet(
                frame, path / "results" / f"{name}.parquet", {"schema_version": str(results.SCHEMA_VERSION)}
            )
    return load(path)


def drawn(study):
    alpha = {f"alpha-{index}": figure for index, figure in enumerate(alpha_figures(study))}
    sections = (curvature.SECTION, connectivity.SECTION, FILTERS, QK)
    return alpha | {name: each.figure for section in sections for name, each in section.figures(study).items()}


@pytest.mark.parametrize(
    ("count", "lrs"),
    [
        (1, QUICKSTART_LRS[:1]),
        pytest.param(1, QUICKSTART_LRS, marks=pytest.mark.slow),
        pytest.param(2, QUICKSTART_LRS, marks=pytest.mark.slow),
        pytest.param(3, QUICKSTART_LRS[:1], marks=pytest.mark.slow),
        pytest.param(4, QUICKSTART_LRS[:1], marks=pytest.mark.slow),
    ],
)
def test_every_legend_lies_inside_its_figure(tmp_path, count, lrs):
    study = measured_study(tmp_path, MECHANISMS[:count], lrs)
    with matplotlib.rc_context(RC):
        figures = drawn(study)
        assert {name.split("-")[0] for name in figures} >= {
            "alpha",
            "blocks",
            "steps",
            "profile",
            "density",
            "filter",
            "energy",
            "qk",
        }
        for name, figure in figures.items():
            figure.draw_without_rendering()
            (legend,) = figure.legends
            place = legend.get_window_extent()
            assert place.x0 >= 0 and place.x1 <= figure.bbox.x1 and place.y0 >= 0 and place.y1 <= figure.bbox.y1, (
                name,
                place.width / figure.dpi,
            )
            assert figure.get_figwidth() <= WIDTH_INCHES, name
            tops = [box.y1 for box in (ax.get_tightbbox() for ax in figure.axes) if box is not None]
            assert max(tops) <= place.y0 + 1, f"{name}: the legend lies on a panel"
            assert min(ax.get_window_extent().height for ax in figure.axes) > 0.5 * figure.dpi, (
                f"{name}: no room is left for a panel"
            )
