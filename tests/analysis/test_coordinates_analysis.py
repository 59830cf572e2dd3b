"""Slopes and verdicts of a coordinate check on made-up power laws, its table, its figure and its place in a report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pypdf import PdfReader

from analysis.numbers.coordinates import Slope, judged_slopes, slope, verdict
from analysis.report import build
from analysis.sections.coordinates import coordinates_figure, coordinates_tables, verdict_lines
from stability.runs import results
from tests.analysis.synthetic import write_study

SIZES, SEEDS = (16, 64, 128), 3
ACTIVATIONS = ("embedding", "blocks.0.mixer_norm", "blocks.0.mixer", "blocks.0.mixer logits", "final stream", "logits")


def law(exponents, field="width", sizes=SIZES, seeds=SEEDS, spread=0.0, **names):
    """Every quantity as size^exponent, by (quantity, measure); the others flat. Seeds' exponents lie ``spread`` apart."""
    about = {
        "mechanism": "sa", "residual": "identity", "norm": "layernorm", "optimizer": "adamw", "parametrization": "mup",
        "field": field, "lr": 1e-2, "batch": 8, "positions": 64, "objective": "ar", "data": "stdlib", **names,
    }  # fmt: skip
    quantities = [(name, measure) for name in ACTIVATIONS for measure in ("size", "change")]
    quantities += [(kind, measure) for kind in ("bias", "matrix") for measure in ("update", "gradient")]
    rows = [
        about | {"size": size, "seed": seed, "step": step, "quantity": quantity, "measure": measure,
                 "value": 0.5 * size ** (exponents.get((quantity, measure), 0.0) + spread * (seed - (seeds - 1) / 2))}
        for size in sizes for seed in range(seeds) for step in range(6) for quantity, measure in quantities
    ]  # fmt: skip
    return results.graph_frame("coordinates", rows)


def test_a_slope_is_the_exponent_of_a_power_law_with_students_interval_over_seeds():
    """Exponents 0.5 and 0.1 to both sides: 0.5 ± 4.303·0.1/√3."""
    found = slope(law({("logits", "change"): 0.5}, spread=0.1), "logits", "change", [5])
    assert found.mean == pytest.approx(0.5) and found.high - 0.5 == pytest.approx(4.302653 * 0.1 / 3**0.5)


def test_a_slope_over_steps_is_their_mean():
    frame = law({})
    grows = (frame["quantity"] == "embedding") & (frame["measure"] == "change") & (frame["step"] == 5)
    frame.loc[grows, "value"] *= frame.loc[grows, "size"] ** 0.6
    assert slope(frame, "embedding", "change", [3, 4, 5]).mean == pytest.approx(0.2)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_quantity_that_is_zero_or_not_finite_has_no_slope(value):
    frame = law({})
    frame.loc[(frame["quantity"] == "logits") & (frame["size"] == 16), "value"] = value
    assert slope(frame, "logits", "change", [5]) is None
    assert len(judged_slopes(frame)) == len(judged_slopes(law({}))) - 1


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ((0.25, 0.2, 0.3), "flat"), ((0.1, -0.1, 0.41), "unclear"), ((-0.1, -0.41, 0.1), "unclear"),
        ((0.26, 0.2, 0.3), "grows"), ((0.5, -0.1, 1.1), "unclear"), ((-0.3, -0.5, -0.1), "shrinks"),
    ],
)  # fmt: skip
def test_a_verdict_is_of_slope_and_interval(numbers, word):
    assert Slope("x", "change", *numbers).verdict == word


def test_growth_comes_before_shrinking_and_the_steepest_first():
    slopes = [Slope(name, "change", mean, mean, mean) for name, mean in (("a", -2.0), ("b", 0.3), ("c", 1.0))]
    assert [each.quantity for each in verdict(slopes)[1]] == ["c", "b"] and verdict(slopes)[0] == "grows"
    assert verdict(slopes[:1])[0] == "shrinks" and verdict([Slope("d", "size", 0.1, 0, 0.2)])[0] == "flat"


def test_logits_at_the_start_and_matrices_are_not_judged():
    wrong = {("logits", "size"): -0.5, ("matrix", "update"): -1.0, ("bias", "gradient"): -1.0}
    assert verdict(judged_slopes(law(wrong)))[0] == "flat"
    assert verdict(judged_slopes(law({("bias", "update"): -1.0})))[0] == "shrinks"
    assert verdict(judged_slopes(law({("logits", "change"): 0.5})))[0] == "grows"


def test_over_depths_changes_within_blocks_are_not_judged():
    wrong = {("blocks.0.mixer", "change"): -1.0}
    assert verdict(judged_slopes(law(wrong)))[0] == "shrinks"
    assert verdict(judged_slopes(law(wrong, field="layers")))[0] == "flat"
    assert verdict(judged_slopes(law({("blocks.0.mixer", "size"): -0.5}, field="layers")))[0] == "shrinks"


def two(**exponents):
    return pd.concat([law({("final stream", "change"): 1.0}, parametrization="standard"), law({})])


def test_a_line_for_each_parametrization_says_the_verdict_and_the_steepest_slope():
    standard, mup = verdict_lines(two())
    assert standard.startswith("standard: grows, 1 of 12 quantities; final stream (change) +1.00 (+1.00 to +1.00)")
    assert mup.startswith("mup: flat, all 12 quantities; ")
    (unclear,) = verdict_lines(law({}, spread=0.3))
    assert unclear.startswith("mup: unclear, 12 of 12 quantities") and "more seeds decide" in unclear
    (late,) = verdict_lines(law({("logits", "change"): -0.5}))
    assert "mup: shrinks, 1 of 12" in late and late.endswith("they catch up with more steps or a larger lr")
    frame = law({})
    frame.loc[frame.index[-1], "value"] = np.nan
    assert list(verdict_lines(frame)) == ["mup: diverged; this check needs a smaller rate than lr=1e-2"]


def test_the_table_has_two_columns_for_each_parametrization_and_marks_what_is_not_flat():
    activations, tensors = coordinates_tables(two())
    assert activations.groups == (("", 1), ("standard", 2), ("mup", 2))
    rows = {row[0].text: row[1:] for row in activations.rows}
    assert [cell.text for cell in rows["final stream"]] == ["+0.00", "+1.00", "+0.00", "+0.00"], "no -0.00"
    assert [cell.bold for cell in rows["final stream"]] == [False, True, False, False]
    assert rows["logits"][0].pale and not rows["logits"][1].pale
    assert [row[0].text for row in tensors.rows] == ["bias", "matrix"] and tensors.rows[1][1].pale


def test_the_figure_has_a_row_for_each_parametrization_and_a_panel_for_each_step():
    frame = two()
    axes = coordinates_figure(frame).axes
    assert len(axes) == 2 * 5 and [ax.get_title() for ax in axes[:5]] == [f"step {step}" for step in range(1, 6)]
    lines = {tuple(line.get_ydata()) for line in axes[4].lines}
    assert len(axes[4].lines) == len(ACTIVATIONS) and (8.0, 32.0, 64.0) in lines
    assert axes[0].get_ylabel().startswith("standard") and axes[5].get_ylabel().startswith("mup")


def test_a_study_with_the_check_shows_it_in_its_report(tmp_path):
    folder = write_study(tmp_path, mechanisms=["sa"], lrs=(1e-3, 1e-2), seeds=1)
    results.write_graphs("coordinates", two(), folder / "results")
    text = " ".join("".join(page.extract_text() for page in PdfReader(build(folder, tmp_path)).pages).split())
    assert "Coordinate check" in text and "What the layers do" not in text
