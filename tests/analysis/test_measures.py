"""Tables of declared measures: a row a place in the study's order, a cell a measure over seeds."""

import math

import pandas as pd
import pytest

from analysis.measures import (
    LAYER,
    RATE,
    SERIES,
    Difference,
    Measure,
    Place,
    Text,
    grid_table,
    over_rows,
    phase_tables,
    rows_of_run,
    spread_cell,
    three_digits,
)
from analysis.numbers.spread import Spread

ROWS = pd.DataFrame(
    [
        {"order": order, "series": series, "run_lr": lr, "layer": layer, "seed": seed, "phase": "terminal", "value": value}
        for order, series in ((1, "sa"), (0, "sc"))
        for lr in (1e-2, 1e-3)
        for layer in (0, 1)
        for seed in (0, 1)
        for value in (order + layer + seed, order + layer + seed + 0.5, 9.0)
    ]
)  # fmt: skip
VALUE = Measure("value", over_rows(lambda rows: rows["value"]), three_digits)


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_rows_are_the_places_in_the_studys_order_and_cells_medians_over_seeds_of_medians_over_rows():
    table = grid_table("T", "c", ROWS, (SERIES, RATE, LAYER), (VALUE,), (("", 3), ("of it", 1)))
    assert table.header == ("mechanism", "LR", "layer", "value") and table.groups == (("", 3), ("of it", 1))
    assert texts(table)[:3] == [
        ["sc", "1e-3", "0", "1.000"],
        ["sc", "1e-3", "1", "2.000"],
        ["sc", "1e-2", "0", "1.000"],
    ]
    assert texts(table)[4] == ["sa", "1e-3", "0", "2.000"]
    # the medians over a seed's three rows are 0.5 and 1.5
    assert table.rows[0][3].detail == "0.500–1.500, n=2"


def test_a_summary_other_than_the_median_is_asked_for_by_its_name():
    largest = Measure("largest", over_rows(lambda rows: rows["value"], "max"), three_digits)
    assert grid_table("T", "c", ROWS, (SERIES,), (largest,)).rows[0][1].text == "9.000"


def test_a_difference_is_a_mean_with_its_interval_written_from_to():
    """Of 0, 1, 5: mean 2, standard error √7/√3, t(2) = 4.302653."""
    cell = Difference("d", lambda rows: [0.0, 1.0, 5.0, math.inf], "{:+.3f}".format).cell(ROWS)
    assert (cell.text, cell.detail) == ("+2.000", "-4.572 to +8.572, n=3")
    two = Difference("d", lambda rows: [-1.0, 1.0], "{:+.1f}".format).cell(ROWS)
    assert (two.text, two.detail) == ("+0.0", "-1.0 to +1.0, n=2")
    one = Difference("d", lambda rows: [-1.0], "{:+.1f}".format).cell(ROWS)
    assert (one.text, one.detail) == ("-1.0", "n=1")
    assert Difference("d", lambda rows: []).cell(ROWS).text == "--"


@pytest.mark.parametrize("values", [(), (math.nan,), (math.inf,)])
def test_a_place_without_a_finite_number_has_a_dash(values):
    assert Measure("v", lambda rows: values).cell(ROWS).text == "--"
    assert spread_cell(Spread.of(values)).text == "--"


def test_words_stand_beside_measures():
    table = grid_table(
        "T", "c", ROWS, (SERIES, Place("at", "layer", "l{:g}".format)), (Text("n", lambda part: str(len(part))), VALUE)
    )
    assert texts(table)[0] == ["sc", "l0", "12", "1.000"]


def test_phases_have_a_table_each_the_terminal_one_first_and_empty_ones_are_left_out():
    both = pd.concat([ROWS.assign(phase="earliest"), ROWS])
    made = phase_tables(both, lambda part, phase: [grid_table(phase, "c", part, (SERIES,), (VALUE,))])
    assert [table.title for table in made] == ["terminal checkpoint", "earliest checkpoint"]
    assert phase_tables(both, lambda part, phase: [grid_table(phase, "c", part.iloc[:0], (SERIES,), (VALUE,))]) == []


def test_one_runs_rows_are_a_study_of_one_series():
    rows = rows_of_run(pd.DataFrame({"lr": [1e-3], "layer": [0], "value": [2.0]}), "gla")
    assert texts(grid_table("T", "c", rows, (SERIES, RATE), (VALUE,))) == [["gla", "1e-3", "2.000"]]
