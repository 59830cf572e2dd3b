"""Discrepancy by depth: pooled ratios, slopes and what the seeds say of them, PDMM's table, and the report's part."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader

from analysis.report import build
from analysis.sections.discrepancy import (
    DEPTHS,
    depth_figures,
    direction,
    figures,
    hypothesis,
    pdmm_figure,
    pdmm_table,
    relative,
    shrinkage,
    slopes,
    study_tables,
)
from analysis.study.load import load
from stability.runs import results
from stability.runs.words import Words
from tests.analysis.synthetic import write_study

LAYERS = (0, 1, 2)


def rows_of(run):
    """Own γ: 1.2 − 0.1·layer for attentionx and 0.5 + 0.1·layer for sa, a little different for each seed; γ = 1: half
    of it, heads ±20 %."""
    rising = run.mechanism == "sa"
    gamma = 1.0 if rising else 3.0
    for layer in LAYERS:
        own = (0.5 + 0.1 * layer if rising else 1.2 - 0.1 * layer) * (1 + 0.001 * run.seed)
        for head in (0, 1):
            value = 2.0 + head
            yield {
                "run_id": run.run_id, "phase": "terminal", "lr": run.lr, "layer": layer, "mixer": run.mechanism, "head": head, "sequence": 0,
                "num_positions": 16, "gamma": gamma, "diagonal": 1, "value_rms": value, "own_rms": own * value,
                "unscaled_rms": own * value * (1 if rising else 0.5),
            }  # fmt: skip


def solved(iterations=6):
    return [
        {"graph": graph, "schedule": schedule, "constraints": "consensus", "rho": 1.0, "averaging": 1.0, "nodes": 8, "edges": 7, "iteration": k,
         "error": 10.0 ** (-2 * k), "discrepancy": 0.5**k}
        for graph in ("path", "complete") for schedule in ("synchronous", "asynchronous") for k in range(1, iterations + 1)
    ]  # fmt: skip


def study_with(tmp_path, seeds):
    folder = write_study(
        tmp_path, name=f"probed{seeds}", mechanisms=["sa", "attentionx"], lrs=(1e-3, 1e-2), seeds=seeds
    )
    runs = list(pd.read_parquet(folder / "results" / "runs.parquet").itertuples())
    frame = pd.DataFrame([row for run in runs for row in rows_of(run)], columns=results.PROBE_COLUMNS["discrepancy"])
    results.write_parquet(
        frame, folder / "results" / "discrepancy.parquet", {"schema_version": str(results.SCHEMA_VERSION)}
    )
    results.write_graphs("pdmm", results.graph_frame("pdmm", solved()), folder / "results")
    return folder


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_layers_and_slopes_are_tabled_with_medians_over_seeds(tmp_path):
    layers, slope_table, _ = study_tables(load(study_with(tmp_path, 3)))
    by_place = {tuple(row[:3]): row[3:] for row in cells(layers)}
    assert by_place["sa", "1e-3", "2"] == ["1", "0.701", "0.701"] and by_place["attentionx", "1e-2", "1"] == [
        "3",
        "1.101",
        "0.551",
    ]
    assert cells(slope_table)[0] == ["sa", "1e-3", "+0.1001", "rises", "+0.1001", "rises"]
    assert cells(slope_table)[2] == ["attentionx", "1e-3", "-0.1001", "falls", "-0.0500", "falls"]
    assert slope_table.rows[0][2].detail.endswith("n=3")


def test_pdmms_caption_names_no_data_and_its_graphs_have_the_palettes_colours(tmp_path):
    study = load(study_with(tmp_path, 2))
    said = figures(study)["pdmm"].caption
    assert (
        "as there are nodes." in said.partition("PDMM on networks")[2].partition("\n")[0]
        and "fingerprint" not in said.partition("PDMM on networks")[2].partition("\n")[0]
    )
    colors = {line.get_color() for line in pdmm_figure(study.probes["pdmm"]).axes[0].lines}
    assert colors == {"#0072B2", "#D55E00"}


def test_fewer_than_three_seeds_decide_nothing(tmp_path):
    study = load(study_with(tmp_path, 2))
    assert {row[3] for row in cells(study_tables(study)[1])} == {"too few seeds"}
    assert "4 with fewer than three seeds, which decide nothing" in hypothesis(study)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([-1.0, -1.1, -0.9], "falls"),
        ([1.0, 1.1, 0.9], "rises"),
        ([-1.0, 1.1, 0.2], "undecided"),
        ([-1.0, 0.9, -0.2], "undecided"),
        ([-1.0, -1.0], "too few seeds"),
        ([math.nan], "--"),
    ],
)
def test_what_seeds_say_is_the_interval_of_their_mean(values, said):
    assert direction(values) == said


def test_the_ratio_pools_squares_over_heads_and_sequences():
    rows = pd.DataFrame(
        {
            "order": 0,
            "series": "sa",
            "run_lr": 1e-3,
            "seed": 0,
            "layer": 0,
            "own_rms": [3.0, 0.0],
            "value_rms": [1.0, 2.0],
        }
    )
    assert relative(rows, "own").tolist() == pytest.approx([math.sqrt(9 / 5)])


def test_a_single_attention_layer_has_no_slope():
    rows = pd.DataFrame(
        {"order": 0, "series": "mix", "run_lr": 1e-3, "seed": 0, "layer": [0], "own_rms": [1.0], "value_rms": [2.0]}
    )
    assert slopes(relative(rows, "own")).isna().all()


def test_one_runs_tables_need_no_study(tmp_path):
    frame = pd.read_parquet(study_with(tmp_path, 1) / "results" / "discrepancy.parquet")
    tables = DEPTHS.of_run({"discrepancy": frame[frame.run_id == frame.run_id.iloc[0]]}, "sa", Words())
    assert [table.title for table in tables] == [
        "Consensus discrepancy of softmax attention, terminal checkpoint",
        "Does the discrepancy fall with depth, terminal checkpoint",
    ]


def test_pdmms_table_tells_iterations_factor_and_ends():
    table = pdmm_table(results.graph_frame("pdmm", solved()))
    assert cells(table)[0] == ["path", "synchronous", "7", "3", "0.010", "1.0e-12", "5.0e-1", "1.6e-2"]
    short = pdmm_table(results.graph_frame("pdmm", solved(2)))
    assert cells(short)[0][3] == "not reached"


def test_the_factor_stops_where_rounding_begins():
    errors = [1e-3, 1e-6, 1e-9, 1e-16, 1e-16]
    assert shrinkage(pd.DataFrame({"error": errors})) == pytest.approx(1e-3)
    assert math.isnan(shrinkage(pd.DataFrame({"error": [0.0, 0.0]})))


def test_figures_hold_a_panel_a_series_and_dotted_lines_where_gamma_is_not_one(tmp_path):
    study = load(study_with(tmp_path, 3))
    assert set(figures(study)) == {"pdmm", "discrepancy-terminal-0"}
    sa, attentionx = depth_figures(study, "terminal")[0].axes
    lines = {ax: [line for line in ax.lines if len(line.get_xdata()) == len(LAYERS)] for ax in (sa, attentionx)}
    assert [len(lines[ax]) for ax in (sa, attentionx)] == [2, 4]
    assert [line.get_linestyle() for line in lines[attentionx]] == ["-", ":", "-", ":"]
    assert lines[attentionx][0].get_ydata().tolist() == pytest.approx([1.2 * 1.001, 1.1 * 1.001, 1.001])
    error, _ = pdmm_figure(results.graph_frame("pdmm", solved())).axes
    assert np.allclose(error.lines[0].get_ydata(), [10.0 ** (-2 * k) for k in range(1, 6)]), (
        "what is rounding is not drawn"
    )


@pytest.mark.parametrize("pages", ["all", "short"])
def test_the_report_shows_both_and_what_they_say_of_the_hypothesis(tmp_path, drawn, pages):
    drawn("discrepancy", "pdmm")
    report = PdfReader(build(study_with(tmp_path, 3), tmp_path, pages))
    text = " ".join("".join(page.extract_text() for page in report.pages).split())
    assert "Of 4 pairs of mechanism and learning rate: 2 fall and 2 rise." in text
    assert "Consensus discrepancy of softmax attention by depth" in text
    # in brief without the table of every layer, and without the small networks
    assert ("Does the discrepancy fall with depth, terminal" in text.partition("Not here")[0]) is (pages == "all")
    assert ("PDMM on networks of" in text) is (pages == "all")


def test_a_damaged_table_names_the_probe_that_writes_it_again(tmp_path):
    folder = study_with(tmp_path, 1)
    (folder / "results" / "discrepancy.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="python -m stability.probe what=pdmm ckpt="):
        load(folder)
