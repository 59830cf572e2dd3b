"""What the report says of the protocol, of exact curvatures beside differences, and of the parameter blocks."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pypdf
import pytest

from analysis.report import build, summary
from analysis.sections.alpha import alpha_figures
from analysis.sections.alpha_tables import alpha_tables
from analysis.sections.curvature import block_figures, blocks_table, layer_of, part_of_model
from analysis.sections.steps import differences_table, find_other_sign, relative_difference, verification
from analysis.study.load import load
from analysis.study.protocol import (
    describe_protocol,
    explain_undefined_states,
    gradient_of,
    gradients,
    is_literal,
    sentence,
    states_explained,
)
from stability.config.curvature import CurvatureSpec
from stability.runs.schema import own_settings
from tests.analysis.synthetic import quickstart_alpha, write_study, write_table

PROTOCOL = {
    **CurvatureSpec(batch=512, clip_norm=1.0, microbatch=16).model_dump(mode="json"),
    "weight_decay": False,
    "gradient": "clipped",
}


@pytest.fixture
def study(tmp_path):
    return load(
        write_study(
            tmp_path, mechanisms=["sa", "sw"], lrs=[1e-3, 1e-2], seeds=1, states=["paper"], alpha=quickstart_alpha
        )
    )


def test_the_sentence_names_every_choice():
    assert sentence(PROTOCOL) == (
        "5 warm-up batches, 5 warm-up steps, 25 recorded steps of 512 sequences, 16 at a time; slope of the clipped "
        "gradient; weight decay left out in u; clipping norm 1; method auto"
    )
    own = sentence(CurvatureSpec(warmup_steps=1).model_dump(mode="json"))
    slope = "slope of the clipped gradient in the paper's warm-up state and true gradient in the run's own state"
    assert f"1 warm-up step, 25 recorded steps of the run's own batch; {slope}; weight decay included in u" in own
    assert "clipping norm the run's own" in own


def test_the_tables_of_alpha_max_state_their_protocol_and_methods_in_both_captions(study):
    study.curvature["protocol"] = json.dumps(PROTOCOL)
    (table,) = alpha_tables(study)
    for caption in (table.caption, table.brief):
        assert f"Protocol: {sentence(PROTOCOL)}." in caption
        assert "Methods: taylor (50 steps) and finite_difference (50 steps)." in caption


def test_runs_measured_under_several_protocols_are_told_apart(study):
    first = study.runs["run_id"].iloc[0]
    other = {key: value for key, value in PROTOCOL.items() if key not in ("weight_decay", "gradient", "microbatch")}
    study.curvature["protocol"] = np.where(study.curvature["run_id"] == first, json.dumps(other), json.dumps(PROTOCOL))
    line = describe_protocol(study.curvature)
    assert f"{sentence(PROTOCOL)} (3 runs)" in line
    assert "weight decay included in u; clipping norm 1; method auto (1 run)" in line
    study.curvature["protocol"] = ""
    assert describe_protocol(study.curvature).startswith("Protocol: not recorded. ")


def test_differences_compare_only_the_steps_that_hold_both(study):
    rows = study.curvature
    rows["parity_curvature"] = rows["parity_alpha_max"] = math.nan
    run = study.runs.query("mechanism == 'sw' and lr == 1e-3")["run_id"].item()
    index = rows.index[rows["run_id"] == run][:4]
    rows.loc[index, "curvature"] = [4.0, 2.0, 1.0, math.nan]
    rows.loc[index, "parity_curvature"] = [3.0, -2.0, 1.0, 1.0]
    rows.loc[index, "alpha_max"] = [1e-1, 2e-1, 1e-4, math.nan]
    rows.loc[index, "parity_alpha_max"] = [2e-1, math.inf, 1e-4, 1.0]
    table = differences_table(study)
    assert table is not None
    ((name, count, difference, sign, *numbers),) = table.rows
    assert (name.text, name.detail, count.text) == ("sw", "terminal, paper's warm-up state", "3")
    assert (difference.text, difference.detail) == ("2.5e-1", "≤ 2.0e0")
    assert (sign.text, sign.detail) == ("33 %", "1 of 3")
    assert [cell.text for cell in numbers] == ["1.0e-1", "1.0e-1", "67", "67"]
    assert "1e-4" in table.caption and "For sw the paper has differences only" in table.caption


def test_stale_terminal_rows_of_a_diverged_run_are_no_pairs_and_the_run_is_counted(study):
    study.curvature["parity_curvature"], study.curvature["parity_alpha_max"] = (
        study.curvature["curvature"],
        study.curvature["alpha_max"],
    )
    study.curvature["rel_error"] = 1e-5
    lost = study.runs.query("lr == 1e-2 and mechanism == 'sa'")["run_id"].item()
    study.curvature.loc[study.curvature["run_id"] == lost, "rel_error"] = 0.5
    study.runs.loc[study.runs["run_id"] == lost, "status"] = "diverged"
    table = differences_table(study)
    finite = study.curvature[np.isfinite(study.curvature["curvature"])].groupby("run_id").size()
    of_sa = study.runs.query("lr == 1e-3 and mechanism == 'sa'")["run_id"].item()
    assert [(row[0].text, row[1].detail) for row in table.rows] == [("sa", "1 run\ndiverged 1/2"), ("sw", "2 runs")]
    assert table.rows[0][1].text == str(finite[of_sa])
    assert (
        "taylor (25 steps)" in verification(study)
        and "in 75 steps" in verification(study)
        and "largest 1.0e-5" in verification(study)
    )


def test_a_study_without_differences_has_no_table_of_them(study):
    assert differences_table(study) is None
    assert blocks_table(study) is None
    assert block_figures(study) == []


def test_relative_difference_and_sign():
    exact, other = pd.Series([2.0, 0.0, -1.0, 1.0]), pd.Series([1.0, 0.0, 1.0, 0.0])
    assert relative_difference(exact, other).tolist() == [0.5, 0.0, 2.0, 1.0]
    assert find_other_sign(exact, other).tolist() == [False, False, True, True]


def test_blocks_are_sorted_by_kind_and_layer():
    names = ["embedding", "blocks.0.mixer", "blocks.11.ffn", "blocks.2.ffn_norm", "final_norm", "head", "blocks.3"]
    assert [part_of_model(name) for name in names] == ["embedding", "mixer", "ffn", "norms", "norms", "head", "other"]
    assert [layer_of(name) for name in names] == ["ends", "0", "11", "2", "ends", "ends", "3"]


@pytest.mark.parametrize("gradient", ["auto", "true", "clipped"])
@pytest.mark.parametrize("state", ["paper", "checkpoint"])
def test_whose_gradient_a_protocol_asks_for_is_what_was_measured_under_it(gradient, state):
    curvature = CurvatureSpec(gradient=gradient)
    assert gradient_of(curvature.model_dump(mode="json"), state) == curvature.gradient_of(state)


def paper_rows(study, *, gradient="clipped", **changes):
    """The study's rows, of state paper, as the defaults measure them at clipping norm 1."""
    stored = {**CurvatureSpec(clip_norm=1.0, batch=4).model_dump(mode="json"), **changes}
    return study.curvature.assign(gradient=gradient, protocol=json.dumps(stored))


def test_to_the_letter_is_said_only_of_rows_that_are(study):
    literal = paper_rows(study)
    assert is_literal(literal) and "to the letter" in states_explained(literal)
    assert "slope of the clipped gradient;" in describe_protocol(literal)
    changes = (
        {"warmup_steps": 4},
        {"recorded_steps": 24},
        {"warmup_batches": 6},
        {"weight_decay": False},
        {"clip_norm": 2.0},
    )
    for rows in (
        *(paper_rows(study, **{key: value}) for change in changes for key, value in change.items()),
        paper_rows(study, gradient="true"),
    ):
        assert not is_literal(rows)
        assert "to the letter" not in states_explained(rows)
    mixed = literal.assign(gradient=["true"] + ["clipped"] * (len(literal) - 1))
    assert gradients(mixed) == {"paper": "true or clipped"} and not is_literal(mixed)
    assert "starts from the paper's warm-up, here with the slope of the true or clipped gradient" in states_explained(
        mixed
    )
    # not said row by row: the protocol says it, and before there was a choice it was the true one
    old = paper_rows(study, gradient="")
    old["protocol"] = [
        json.dumps({key: value for key, value in json.loads(text).items() if key != "gradient"})
        for text in old["protocol"]
    ]
    assert gradients(old) == {"paper": "true"} and not is_literal(old)
    assert not is_literal(study.curvature), "no protocol is recorded"
    assert not is_literal(literal.assign(state="checkpoint"))


def test_of_two_states_the_sentence_says_whose_gradient_is_whose(study):
    rows = pd.concat([paper_rows(study), paper_rows(study, gradient="true").assign(state="checkpoint")])
    assert (
        "slope of the clipped gradient in the paper's warm-up state and true gradient in the run's own state; weight"
        in describe_protocol(rows)
    )


def test_states_that_are_not_defined_are_said_in_report_and_summary(tmp_path, drawn):
    drawn("alpha")
    folder = write_study(
        tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=2, states=["checkpoint"], alpha=quickstart_alpha
    )
    path = folder / "results" / "runs.parquet"
    runs = pd.read_parquet(path)
    assert explain_undefined_states(load(folder)) == ""
    runs["undefined_states"], runs["optimizer"] = ["paper", None, "paper", "paper"], ["sgd", "adamw", "sgd", "lion"]
    write_table(path, "runs", runs.to_dict("records"))
    sentence = "The paper's warm-up state is not defined for lion (1 run) and sgd (2 runs): its warm-up sets the averages m and v of Adam"
    assert explain_undefined_states(load(folder)).startswith(sentence)
    assert sentence in " ".join(summary(folder).split())
    pages = pypdf.PdfReader(build(folder, tmp_path / "out")).pages
    assert "is not defined for lion (1 run) and sgd (2 runs)" in " ".join(
        " ".join(page.extract_text() for page in pages).split()
    )
    write_table(folder / "results" / "curvature.parquet", "curvature", [])
    assert sentence in " ".join(summary(folder).split()), "also where there is no row at all"


def doubtful(study, errors, exact=(), difference=(), used=()):
    rows = study.curvature
    rows["rel_error"] = math.nan
    index = rows.index[: len(errors)]
    rows.loc[index, "rel_error"] = errors
    for column, values in (("float64_curvature", exact), ("difference_curvature", difference), ("curvature", used)):
        rows.loc[index[: len(values)], column] = list(values)
    return verification(study)


def test_float64_says_which_side_erred(study):
    assert "computed" not in doubtful(study, [1e-5, 9e-4])
    text = doubtful(study, [2e-2, 1e-5], exact=[100.0], difference=[98.0], used=[100.001])
    assert (
        "Beyond 0.001: 1 step, all of them computed once more in float64: there the difference was off by up to "
        "2.0e-2, the value that is used by up" in text
    )
    assert text.endswith("up to 1.0e-5.")
    text = doubtful(study, [2e-2, 3e-2], exact=[100.0], difference=[100.0], used=[98.0])
    assert (
        "the difference was off by up to 0, the value that is used by up to 2.0e-2; of the other 1 it is not known "
        "which is off." in text
    )
    study.curvature["float64_curvature"] = math.nan
    assert (
        "Beyond 0.001: 1 step, none of them computed in float64: which of the two is off is not known there."
        in doubtful(study, [2e-2])
    )


def test_the_papers_difference_is_judged_by_float64_where_there_is_one(study):
    rows = study.curvature
    rows["parity_curvature"], rows["parity_alpha_max"] = rows["curvature"], rows["alpha_max"]
    assert "float64" not in differences_table(study).caption
    index = rows.index[np.isfinite(rows["curvature"])][:2]
    rows.loc[index, ["curvature", "parity_curvature", "float64_curvature"]] = [[1.0, 1.5, 1.0], [-2.0, 2.0, -2.0]]
    caption = differences_table(study).caption
    assert (
        "In 2 pairs uᵀHu was computed once more in float64: there the paper's difference was off by up to 2.0e0, "
        "the exact value by up to 0." in caption
    )


def test_steps_without_an_alpha_max_are_no_lost_steps_in_the_figure(study):
    def marked(study):
        return [line.get_marker() for ax in alpha_figures(study)[0].axes for line in ax.get_lines()].count("+")

    rows = study.curvature
    rows["alpha_max"] = rows["alpha_max"].where(np.isfinite(rows["alpha_max"]), 1e-3)
    rows.loc[rows.index[:2], "alpha_max"] = math.nan
    assert marked(study) == 1
    undefined = rows.assign(method=rows["method"].where(rows.index >= rows.index[2], "not defined"))
    assert marked(replace(study, curvature=undefined)) == 0


@pytest.fixture
def blocks(study):
    rows = [
        {
            "run_id": run,
            "phase": "terminal",
            "state": "paper",
            "lr": 1e-3,
            "block": block,
            "share": share,
            "own": own,
            "curvature": -4.0,
        }
        for run in study.runs["run_id"]
        for block, share, own in (
            ("embedding", 1.0, 0.5),
            ("blocks.0.mixer", -3.0, -1.0),
            ("blocks.0.mixer_norm", -2.5, 0.0),
            ("final_norm", 0.5, 0.0),
        )
    ]
    study.spectra["blocks"] = pd.DataFrame(rows)
    return study


def test_shares_of_a_kind_add_up_and_the_coupling_is_the_rest(blocks):
    table = blocks_table(blocks)
    assert table is not None
    assert table.header == ("mechanism", "LR", "embedding", "mixer", "norms", "coupling")
    assert [cell.text for cell in table.rows[0][2:]] == ["25", "-75", "-50", "-88"]


def test_bars_end_at_the_layers_sums_above_and_below_zero(blocks):
    (figure,) = block_figures(blocks)
    ax = figure.axes[-1]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "ends"]
    bars: Any = ax.patches
    ends = {0: [], 1: []}
    for bar in bars:
        ends[round(bar.get_x() + bar.get_width() / 2)] += [bar.get_y(), bar.get_y() + bar.get_height()]
    assert (min(ends[0]), max(ends[0])) == pytest.approx((-137.5, 0))
    assert (min(ends[1]), max(ends[1])) == pytest.approx((0, 37.5))


def test_the_protocol_of_a_run_without_clipping_says_so():
    spec = {"batch": 16, "clip_norm": None}
    protocol = PROTOCOL | own_settings(PROTOCOL | {"clip_norm": None, "batch": None}, spec)
    line = sentence(json.loads(json.dumps(protocol)))
    assert "; no clipping; " in line and "16 sequences" in line
    assert "clipping norm" not in line
