"""What the report says of the protocol, of exact curvatures beside differences, and of the parameter blocks."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.alpha_tables import alpha_tables
from analysis.block_shares import block_figures, blocks_table, kind_of, layer_of
from analysis.differences import differences_table, other_sign, relative_difference
from analysis.load import load
from analysis.protocol import sentence, stated
from stability.config import CurvatureSpec
from tests.analysis.synthetic import quickstart_alpha, write_study

PROTOCOL = {
    **CurvatureSpec(batch=512, clip_norm=1.0, microbatch=16).model_dump(mode="json"),
    "weight_decay": False,
    "gradient": "clipped",
}


@pytest.fixture
def study(tmp_path):
    return load(write_study(tmp_path, mechanisms=["sa", "sw"], lrs=[1e-3, 1e-2], seeds=1, states=["paper"], alpha=quickstart_alpha))


def test_the_sentence_names_every_choice():
    assert sentence(PROTOCOL) == (
        "5 warm-up batches, 5 warm-up steps, 25 recorded steps of 512 sequences, 16 at a time; slope of the clipped gradient; "
        "weight decay left out in u; clipping norm 1; method auto"
    )
    own = sentence(CurvatureSpec(warmup_steps=1).model_dump(mode="json"))
    assert "1 warm-up step, 25 recorded steps of the run's own batch; slope of the true gradient; weight decay included in u" in own
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
    line = stated(study.curvature)
    assert f"{sentence(PROTOCOL)} (3 runs)" in line
    assert "weight decay included in u; clipping norm 1; method auto (1 run)" in line
    study.curvature["protocol"] = ""
    assert stated(study.curvature).startswith("Protocol: not recorded. ")


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
    assert (name.text, name.detail, count.text) == ("sw", "terminal, paper", "3")
    assert (difference.text, difference.detail) == ("2.5e-1", "≤ 2.0e0")
    assert (sign.text, sign.detail) == ("33 %", "1 of 3")
    assert [cell.text for cell in numbers] == ["1.0e-1", "1.0e-1", "67", "67"]
    assert "1e-4" in table.caption and "For sw the paper has differences only" in table.caption


def test_a_study_without_differences_has_no_table_of_them(study):
    assert differences_table(study) is None
    assert blocks_table(study) is None
    assert block_figures(study) == []


def test_relative_difference_and_sign():
    exact, other = pd.Series([2.0, 0.0, -1.0, 1.0]), pd.Series([1.0, 0.0, 1.0, 0.0])
    assert relative_difference(exact, other).tolist() == [0.5, 0.0, 2.0, 1.0]
    assert other_sign(exact, other).tolist() == [False, False, True, True]


def test_blocks_are_sorted_by_kind_and_layer():
    names = ["embedding", "blocks.0.mixer", "blocks.11.ffn", "blocks.2.ffn_norm", "final_norm", "head", "blocks.3"]
    assert [kind_of(name) for name in names] == ["embedding", "mixer", "ffn", "norms", "norms", "head", "other"]
    assert [layer_of(name) for name in names] == ["ends", "0", "11", "2", "ends", "ends", "3"]


@pytest.fixture
def blocks(study):
    rows = [
        {"run_id": run, "phase": "terminal", "state": "paper", "lr": 1e-3, "block": block, "share": share, "own": own, "curvature": -4.0}
        for run in study.runs["run_id"]
        for block, share, own in (("embedding", 1.0, 0.5), ("blocks.0.mixer", -3.0, -1.0), ("blocks.0.mixer_norm", -2.5, 0.0), ("final_norm", 0.5, 0.0))
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
