"""What is drawn and tabled of `stability.probe`: columns, medians, exponents, quantiles, and the report's section."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from pypdf import PdfReader

from analysis.claims.layers import qk_heads
from analysis.report import build
from analysis.sections import connectivity_figures as connectivity
from analysis.sections import layers
from analysis.sections.connectivity_figures import connectivity_figure, write_figure
from analysis.sections.layer_figures import (
    FILTER_CAPTION,
    FILTERS,
    QK,
    QUANTILES,
    _log_ticks,
    energy_figures,
    filter_figures,
    kept_shares,
    qk_figures,
    response_curve,
)
from analysis.sections.layers import QK_TABLES, SPECTRA_TABLES, connectivity_table, layer_and_filter, slope
from analysis.study.load import load
from stability.runs import results
from stability.runs.schema import OPTIONAL
from stability.runs.words import Words
from tests.analysis.synthetic import write_study

RUNS = [SimpleNamespace(run_id=str(seed), mechanism="sc", lr=1e-3, seed=seed) for seed in range(3)]
LRS, SEEDS, LAYERS = (1e-3, 1e-2), 3, (0, 1)


def spectra_row(run, layer, head, sequence):
    """Consensus: λ_max = 10·(seed + 1); attention: gain 0.5·(seed + 1). What an update leaves: (seed + 1)/10."""
    consensus = run.mechanism == "sc" or (run.mechanism == "mix" and layer == 1)
    row = dict.fromkeys(results.PROBE_COLUMNS["spectra"]) | {
        "run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": layer, "mixer": "sc" if consensus else "sa", "head": head, "sequence": sequence,
        "variance_before": 10.0, "variance_after": run.seed + 1.0, "gain": 0.5 * (run.seed + 1),
    }  # fmt: skip
    if not consensus:
        return row | {"second_eigenvalue": 0.25}
    largest = 10.0 * (run.seed + 1)
    measured = {
        "largest": largest,
        "step_limit": 1 / (2 * largest),
        "step_size": 0.1,
        "non_oscillating": 0.5,
        "fiedler": 0.02,
    }
    return row | measured | {"fiedler_low": 0.01, "fiedler_high": 0.04, "energy_before": 4.0, "energy_after": 1.0}


def filter_rows(run, layer):
    where = {
        "run_id": run.run_id,
        "phase": "terminal",
        "lr": run.lr,
        "layer": layer,
        "mixer": run.mechanism,
        "head": 0,
        "sequence": 0,
    }
    return [
        {**where, "probe": probe, "node": 1.0, "weight": 0.5, "response": value}
        for probe in (0, 1)
        for value in (1.0, 0.5 - 0.1 * probe)
    ]


@pytest.fixture
def probed(tmp_path):
    folder = write_study(tmp_path, name="probed", mechanisms=["sa", "sc", "mix"], lrs=LRS, seeds=SEEDS)
    runs = list(pd.read_parquet(folder / "results" / "runs.parquet").itertuples())
    frames = {
        "spectra": [spectra_row(run, layer, head, sequence) for run in runs for layer in LAYERS for head in (0, 1) for sequence in (0, 1)],
        "filter": [row for run in runs for layer in LAYERS for row in filter_rows(run, layer)],
        "qk": [
            {"run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": 0, "mixer": "sa", "head": head, "index": index, "singular_value": value}
            for run in runs if run.mechanism != "sc" for head in (0, 1)
            for index, value in enumerate([(run.seed + 1) * 100 * run.lr / 1e-3, 1.0 + head])
        ],
    }  # fmt: skip
    for name, rows in frames.items():
        frame = pd.DataFrame(rows, columns=results.PROBE_COLUMNS[name])
        results.write_parquet(
            frame, folder / "results" / f"{name}.parquet", {"schema_version": str(results.SCHEMA_VERSION)}
        )
    results.write_graphs("connectivity", graphs(), folder / "results")
    return folder


def graphs():
    """λ_1 = w³/N², its bounds half and twice of it."""
    rows = [
        (graph, n, w, w**3 / n**2, 0.5 * w**3 / n**2, 2 * w**3 / n**2)
        for graph in ("window", "cycle")
        for n in (32, 64, 128, 256)
        for w in (1, 2, 4)
    ]
    rows += [("complete", n, n - 1, float(n), n, n) for n in (32, 64, 128)]
    return results.graph_frame(
        "connectivity", [dict(zip(results.GRAPH_COLUMNS["connectivity"], row, strict=True)) for row in rows]
    )


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_layers_are_tabled_by_kind_with_medians_over_seeds(probed):
    consensus, attention = SPECTRA_TABLES.of_study(load(probed))
    assert [row[:3] for row in cells(consensus)] == [
        [m, lr, layer] for m, layers in (("sc", "01"), ("mix", "1")) for lr in ("1e-3", "1e-2") for layer in layers
    ]
    assert [row[:3] for row in cells(attention)] == [
        [m, lr, layer] for m, layers in (("sa", "01"), ("mix", "0")) for lr in ("1e-3", "1e-2") for layer in layers
    ]
    head = list(consensus.header)
    first = dict(zip(head, consensus.rows[0], strict=True))
    assert first["λ_max"].text == "20" and first["λ_max"].detail.endswith("n=3")
    assert first["1/(2λ_max)"].text == "0.025" and first["1−2ηλ ≥ 0"].text == "50 %"
    assert first["energy"].text == "25 %" and first["variance"].text == "20 %"
    assert dict(zip(attention.header, attention.rows[0], strict=True))["second |λ|"].text == "0.2500"
    assert "η = 0.1 (the largest of T)" in consensus.caption


def test_one_runs_tables_need_no_study(probed):
    frame = pd.read_parquet(probed / "results" / "spectra.parquet")
    one = frame[frame.run_id == frame.run_id.iloc[-1]]
    assert [table.title for table in SPECTRA_TABLES.of_run({"spectra": one}, "mix", Words())] == [
        "Learned graphs of consensus layers, terminal checkpoint",
        "Softmax attention as a filter, terminal checkpoint",
    ]


def test_norm_and_condition_are_taken_head_by_head(probed):
    (table,) = QK_TABLES.of_study(load(probed))
    assert [row[:2] for row in cells(table)] == [["sa", "1e-3"], ["sa", "1e-2"], ["mix", "1e-3"], ["mix", "1e-2"]]
    assert cells(table)[0][2:] == ["200", "200", "150", "200"]
    values = [("a", 0, 4.0), ("a", 0, 0.0)]
    rows = pd.DataFrame([dict(zip(["series", "head", "singular_value"], row, strict=True)) for row in values])
    lost = qk_heads(rows.assign(order=0, run_lr=1e-3, seed=0, phase="terminal", layer=0))
    assert lost.condition.tolist() == [math.inf] and lost.norm.tolist() == [4.0]


def test_exponents_are_fitted_in_logarithms_over_the_upper_half():
    x = [1.0, 2.0, 4.0, 8.0]
    assert slope(x, [5 * value**-2 for value in x]) == pytest.approx(-2)
    assert slope(x, [1.0, 1.0, 4**3, 8**3]) == pytest.approx(3)
    assert math.isnan(slope([1.0], [1.0]))
    table = connectivity_table(graphs())
    assert [row[-1] for row in cells(table)[:-1]] == ["N^-2.00"] * 3 + ["N^1.00"]
    assert cells(table)[-2] == ["K_N", "3.20e1", "6.40e1", "1.28e2", "--", "N^1.00"]
    assert cells(table)[-1][1:-1] == ["w^3.00"] * 4
    assert table.rows[0][1].detail == "4.88e-4–1.95e-3"


def test_captions_say_that_the_filter_is_the_graphs_and_not_the_layers(probed):
    (consensus, _) = SPECTRA_TABLES.of_study(load(probed))
    assert "{filter}" in FILTER_CAPTION
    for text in (consensus.caption, FILTER_CAPTION.replace("{filter}", layer_and_filter(()))):
        assert (
            "with mechanism.sc.rope=none the filter is the whole update, u − 2ηL̄u" in text
            and "with mechanism.sc.rope=gradient the filter is the whole update of the rotated ũ" in text
            and "with mechanism.sc.rope=absolute the layer takes off 2ηL̄ũ" in text
        )
        assert "Π(1 − 2η_tλ)" in text
    assert "largest |factor| over the interval from Fiedler to λ_max" in consensus.caption
    assert (
        layer_and_filter({"none"})
        == "The filter is the graph's alone: with mechanism.sc.rope=none the filter is the whole update, u − 2ηL̄u. The sc of mix has mechanism.mix.sc.rope."
    )
    assert layer_and_filter({"gradient"}).endswith(
        "ũ − 2ηL̄ũ, which is then turned back. The sc of mix has mechanism.mix.sc.rope."
    )
    assert "are not the layer's" in layer_and_filter({"gradient", "absolute"})


def test_many_learned_steps_are_told_as_a_range():
    rows = pd.DataFrame(
        [spectra_row(run, 0, 0, 0) | {"step_size": eta} for run, eta in zip(RUNS, (0.08123, 0.09, 0.12), strict=True)]
    )
    (table,) = SPECTRA_TABLES.of_run({"spectra": rows}, "sc", Words(), {"absolute"})
    assert "η = 0.0812 … 0.12 (" in table.caption
    (table,) = SPECTRA_TABLES.of_run(
        {"spectra": rows.assign(step_size=[0.1, 0.1, 0.10000001])}, "sc", Words(), {"absolute"}
    )
    assert "η = 0.1 (" in table.caption


def test_the_complete_graph_is_drawn_beside_its_closed_form():
    lines = [line for line in connectivity_figure(graphs()).axes[0].lines if line.get_marker() == "s"]
    assert [line.get_ydata().tolist() for line in lines] == [[32.0, 64.0, 128.0]]


def test_the_layers_own_factor_stands_beside_the_graphs(probed):
    (figure,) = filter_figures(load(probed), "terminal")
    marks = [[line for line in ax.lines if line.get_marker() == "<"] for ax in figure.axes]
    assert all(len(of_panel) == len(LRS) for of_panel in marks)
    assert marks[0][0].get_ydata().tolist() == pytest.approx([0.2**0.5])


def visible_ticks(axis):
    low, high = axis.get_view_interval()
    return [tick for tick in axis.get_major_locator()() if low <= tick <= high]


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.97), (0.31, 0.89), (1.1, 8.0), (0.3, 40.0), (3.0, 9e4)])
def test_a_logarithmic_axis_has_ticks_enough_to_read_whatever_it_spans(low, high):
    ax = Figure().subplots()
    ax.plot([0, 1], [low, high])
    ax.set_yscale("log")
    _log_ticks(ax.yaxis)
    assert 2 <= len(visible_ticks(ax.yaxis)) <= 9


def test_axes_of_factors_show_where_nothing_changes(probed):
    study = load(probed)
    for figure in (*filter_figures(study, "terminal"), *energy_figures(study, "terminal")):
        for ax in figure.axes:
            low, high = ax.get_ylim()
            assert low <= 1 <= high
    (figure,) = filter_figures(study, "terminal")
    assert all(1.0 in ax.get_yticks() for ax in figure.axes)


def test_the_response_curve_is_the_quantile_function_with_the_probes_scatter():
    draws = np.random.default_rng(0)
    values = np.sort(draws.standard_normal(999))[::-1]
    rows = pd.DataFrame({"run_id": "a", "head": 0, "sequence": 0, "probe": 0, "weight": 1 / 999, "response": values})
    middle, error = response_curve(rows)
    assert np.allclose(middle, np.quantile(values, 1 - QUANTILES, method="hazen"), atol=1e-9) and not error.any()
    two = pd.concat([rows, rows.assign(probe=1, response=values + 1.0)])
    middle_of_two, error = response_curve(two)
    assert np.allclose(middle_of_two, middle + 0.5) and np.allclose(error, 0.5), (
        "two values a distance of 1 apart: deviation 1/√2, over √2"
    )


def test_what_is_kept_is_the_median_of_ratios(probed):
    study = load(probed)
    rows = study.with_run(study.probes["spectra"])
    assert kept_shares(rows[rows["series"] == "sc"], "variance").tolist() == pytest.approx([0.2, 0.2])
    assert kept_shares(rows[rows["series"] == "mix"], "energy").to_dict() == {1: 0.25}


def test_figures_hold_a_panel_for_each_layer_and_a_line_for_each_rate(probed):
    study = load(probed)
    (figure,) = filter_figures(study, "terminal")
    assert len(figure.axes) == 6
    assert all(
        len([line for line in ax.lines if len(line.get_xdata()) == len(QUANTILES)]) == len(LRS) for ax in figure.axes
    )
    drawn = {name for section in (connectivity.SECTION, FILTERS, QK) for name in section.figures(study)}
    assert drawn == {
        "connectivity",
        "filter-terminal-0",
        "energy-terminal-0",
        "qk-terminal-0",
    }
    (norms_and_conditions,) = qk_figures(study, "terminal")
    norms = norms_and_conditions.axes[0].lines[0]
    assert norms.get_ydata().tolist() == pytest.approx([200, 2000])
    texts = [text.get_text() for ax in connectivity_figure(graphs()).axes for text in ax.texts]
    assert "$w=1$: $N^{-2.00}$" in texts and "$N=256$: $w^{3.00}$" in texts


def test_the_report_shows_what_was_measured_and_nothing_else(probed, tmp_path, drawn):
    drawn("connectivity", "filter", "energy", "qk")
    text = "".join(page.extract_text() for page in PdfReader(build(probed, tmp_path)).pages)
    assert (
        "What the layers do to their signal" in text
        and "Layers as filters" in text
        and "Learned graphs of consensus layers" in text
    )
    for name in OPTIONAL["probes"]:
        (probed / "results" / f"{name}.parquet").unlink(missing_ok=True)
    bare = "".join(page.extract_text() for page in PdfReader(build(probed, tmp_path)).pages)
    assert "What the layers do to their signal" not in bare


def test_the_same_figure_is_the_same_file(tmp_path):
    assert (
        len({write_figure(connectivity_figure, graphs(), tmp_path / name).read_bytes() for name in ("a.pdf", "b.pdf")})
        == 1
    )


def test_a_damaged_table_names_the_probe_that_writes_it_again(probed):
    (probed / "results" / "filter.parquet").write_bytes(b"nothing")
    with pytest.raises(
        ValueError,
        match=r"filter.parquet is no parquet file .* `python -m stability.probe what=spectra ckpt=.*probed` writes it again",
    ):
        load(probed)


def test_the_interval_of_a_stochastic_matrixs_second_eigenvalue_ends_at_1():
    rows = pd.DataFrame({"seed": range(3), "second_eigenvalue": [0.5, 0.9, 0.999]})
    (measure,) = [each for each in layers.ATTENTION_MEASURES if each.label == "second |λ|"]
    assert measure.cell(rows).detail == "0.5000–0.9990, n=3"
