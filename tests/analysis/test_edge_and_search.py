"""What the report says of `lr=edge` and `search=optuna`, from studies with made-up numbers."""

import json
import math

import matplotlib
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.drawing.style import RC, lr_axis
from analysis.report import build, summary
from analysis.sections import edge, search
from analysis.study.load import load
from stability.runs import results
from stability.runs.schema import SEARCH_COLUMNS
from tests.analysis.synthetic import run_id, write_study
from tests.analysis.test_report import text_of

EDGE = {
    "num_seeds": 2, "best_lr": 3e-3, "best_nll": 2.87, "best_low": 1e-3, "best_high": 1e-2, "verdict_lr": 3e-2, "verdict_next_lr": 1e-1,
    "verdict_exceptions": "", "nll_lr": 1e-2, "nll_next_lr": 3e-2, "nll_exceptions": "", "lowest_lr": 3e-4, "highest_lr": 1e-1, "resolution_decades": 0.05,
    "nll_tolerance": 0.05, "num_rates": 6, "num_runs": 12, "num_grid_runs": 104, "num_rounds": 3, "state": "found",
}  # fmt: skip


def write_table(path, name, rows):
    frame = pd.DataFrame(rows, columns=SEARCH_COLUMNS[name])
    results.write_parquet(frame, path / "results" / f"{name}.parquet", {"schema_version": str(results.SCHEMA_VERSION)})


def with_edges(folder, statuses=None, **of_sc):
    path = write_study(folder, mechanisms=("sa", "sc"), statuses=statuses)
    rows = [
        {"run_id": run_id("synthetic", name, 3e-4, 0, {})} | EDGE | more for name, more in (("sc", of_sc), ("sa", {}))
    ]
    write_table(path, "edges", rows)
    return path


def with_search(folder, score=lambda number: 3.0 - 0.01 * number):
    """Three points of sc with two seeds each; each point's rate is its own."""
    path = write_study(
        folder, mechanisms=("sc",), lrs=(1e-3, 2e-3, 4e-3), nll=lambda _m, lr, seed: 2.9 + lr + 0.1 * seed
    )
    rows = []
    for number, lr in enumerate((1e-3, 2e-3, 4e-3), 1):
        point = {"number": number, "round": 1 + number // 3, "score": score(number)}
        values = {"lr_peak": lr, "mechanism.sc.window": number}
        ids = [run_id("synthetic", "sc", lr, seed, {}) for seed in range(2)]
        rows += [
            point | {"run_id": own, "field": field, "value": value} for own in ids for field, value in values.items()
        ]
    write_table(path, "search", rows)
    return path


def test_a_studys_record_becomes_tables_and_an_older_states_tables_go(tmp_path):
    path = with_edges(tmp_path)
    record = json.loads((path / "study.json").read_text())
    (path / "study.json").write_text(
        json.dumps(
            record | {"run_ids": [], "search": [{"run_id": "a", "number": 1, "round": 1, "field": "steps", "value": 3}]}
        )
    )
    collected = results.collect(path)
    assert list(collected.searches) == ["search"] and pd.isna(collected.searches["search"].score[0])
    results.write(collected, path / "results")
    assert not (path / "results" / "edges.parquet").exists() and (path / "results" / "search.parquet").exists()


def test_every_curve_has_its_best_rate_its_edges_and_what_they_took(tmp_path):
    study = load(
        with_edges(
            tmp_path,
            verdict_next_lr=None,
            verdict_exceptions="0.001 0.003",
            nll_lr=None,
            nll_next_lr=3e-4,
            state="failed",
        )
    )
    (table,) = edge.edge_tables(study)
    sa, sc = [[(cell.text, cell.detail) for cell in row] for row in table.rows]
    assert sa[0] == ("sa", "") and sc[0] == ("sc", "failed"), "in the study's order"
    assert sa[1] == ("3e-3", "1e-3–1e-2") and sa[2][0] == "2.870" and sa[2][1].endswith("n=2")
    assert sa[3:] == [("3e-2", "below 1e-1"), ("1e-2", "below 3e-2"), ("12", "6 rates, 3 rounds"), ("104", "n=2")]
    assert sc[3] == ("≥ 3e-2", "not at 1e-3 3e-3") and sc[4] == ("< 3e-4", "")
    assert (
        "Not found to the end: sc (a run failed, the same command tries it again)." in table.caption
        and "within 5 % of the best" in table.caption
    )


def test_a_curve_that_diverged_everywhere_has_no_best(tmp_path):
    lost = dict.fromkeys(("best_lr", "best_nll", "best_low", "best_high", "verdict_lr", "nll_lr"))
    study = load(with_edges(tmp_path, **lost, verdict_next_lr=3e-4, nll_next_lr=3e-4))
    (table,) = edge.edge_tables(study)
    assert [cell.text for cell in table.rows[1]][1:5] == ["--", "--", "< 3e-4", "< 3e-4"]
    with matplotlib.rc_context(RC):
        assert edge.figures(study)["edges"] is not None


def test_a_curve_whose_smallest_rate_learned_nothing_has_no_edge_rather_than_one_below_it(tmp_path):
    ended = {("sc", lr, seed): ("plateaued", "") for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1) for seed in range(2)}
    study = load(with_edges(tmp_path, statuses=ended, verdict_lr=None, verdict_next_lr=3e-4))
    (table,) = edge.edge_tables(study)
    assert [row[3].text for row in table.rows] == ["3e-2", "none"] and "none: at no rate" in table.caption


def test_more_rates_than_a_grid_has_are_ticked_at_round_numbers():
    ax = Figure().subplots()
    lr_axis(ax, [3e-4 * 1.31**step for step in range(25)])
    assert [text.get_text() for text in ax.get_xticklabels()] == ["3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1"]
    lr_axis(ax, [1e-9 * 2.1**step for step in range(25)])
    assert [text.get_text() for text in ax.get_xticklabels()] == [f"1e-{power}" for power in range(9, 1, -1)]
    lr_axis(ax, grid := [3e-4, 1e-3, 4e-3])
    assert [text.get_text() for text in ax.get_xticklabels()] == ["3e-4", "1e-3", "4e-3"] and list(
        ax.get_xticks()
    ) == grid


def test_the_edges_figure_has_a_mark_for_every_rate_and_one_for_every_edge(tmp_path):
    with matplotlib.rc_context(RC):
        figure = edge.figures(load(with_edges(tmp_path, verdict_next_lr=None)))["edges"].figure
    lines = figure.axes[0].lines
    assert sum(len(line.get_xdata()) == 1 and line.get_marker() in "ox" for line in lines) == 12
    uprights = [line.get_xdata()[0] for line in lines if len(line.get_xdata()) == 2]
    assert uprights == pytest.approx([math.sqrt(3e-2 * 1e-1), math.sqrt(1e-2 * 3e-2), math.sqrt(1e-2 * 3e-2)])
    assert len(figure.axes[0].texts) == 1, "an arrow where the edge is open"


def test_the_report_of_edges_has_their_table_and_no_table_full_of_holes(tmp_path, drawn):
    drawn("edges")
    path = with_edges(tmp_path)
    printed, pdf = summary(path), text_of(build(path, tmp_path))
    for text in (printed, pdf):
        assert "Best learning rates and edges of stability" in text and "Stable windows" in text
        assert "Validation NLL against learning rate" not in text.replace("\n", " ").replace("Validation NLL at", "")
    plain = write_study(tmp_path / "plain", mechanisms=("sa", "sc"))
    assert edge.edge_tables(load(plain)) == [] and edge.figures(load(plain)) == {}
    assert "edges of stability" not in summary(plain)


def test_the_best_points_come_first_with_their_seeds_spread_and_their_settings(tmp_path):
    study = load(with_search(tmp_path, lambda number: None if number == 2 else 3.0 - 0.01 * number))
    (table,) = search.search_tables(study)
    assert table.header == ("point", "objective", "lr_peak", "mechanism.sc.window")
    first, second = [[(cell.text, cell.detail) for cell in row] for row in table.rows]
    assert first == [("3", "round 2"), ("2.970", "2.904 to 3.004, n=2"), ("0.004", ""), ("3", "")]
    assert [cell[0] for cell in second] == ["1", "2.990", "0.001", "1"]
    assert "2 best points of 3 (1 without a result)" in table.caption


def test_the_searchs_figure_draws_the_lowest_so_far(tmp_path):
    study = load(with_search(tmp_path, lambda number: {1: 3.0, 2: 3.2, 3: 2.9}[number]))
    with matplotlib.rc_context(RC):
        points, lowest = search.figures(study)["search"].figure.axes[0].lines
    assert list(points.get_ydata()) == [3.0, 3.2, 2.9] and list(lowest.get_ydata()) == [3.0, 3.0, 2.9]


def test_the_report_of_a_search_shows_the_search_and_no_curve_over_runs_with_different_settings(tmp_path, drawn):
    drawn("search")
    path = with_search(tmp_path)
    pdf = text_of(build(path, tmp_path))
    assert "The search" in pdf and "Stable windows" not in pdf and "claim" not in pdf
    assert summary(path).startswith("Search over lr_peak, mechanism.sc.window: sc")
    unknown = with_search(tmp_path / "unknown", lambda _number: None)
    assert "No point of the search has a result yet" in text_of(build(unknown, tmp_path))


def test_a_best_nll_above_the_untrained_ones_is_called_exploded(tmp_path):
    path = with_edges(tmp_path, best_lr=3e-3, best_nll=1.7e9)
    runs = pd.read_parquet(path / "results" / "runs.parquet")
    runs.loc[(runs["mechanism"] == "sc") & (runs["lr"] == 3e-3), "val_nll"] = [1.7e9, 9.0]
    results.write_parquet(runs, path / "results" / "runs.parquet", {"schema_version": str(results.SCHEMA_VERSION)})
    (table,) = edge.edge_tables(load(path))
    assert (table.rows[1][2].text, table.rows[1][2].detail) == ("exploded", "9.0e0–1.7e9, n=2")
    assert table.rows[0][2].text == "2.870"
