"""The rates and steps at which routing collapses, against made-up logs."""

import io
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.numbers.routing import bracket_collapse, compare_collapse, read_routing
from analysis.report import summary
from analysis.sections import alpha, routing
from analysis.sections.routing import collapse_claim
from analysis.study import wording
from analysis.study.load import load
from tests.analysis.synthetic import write_study

RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]


def routed(tmp_path, *, lost_beyond, collapsed_from, seeds=3):
    """A study whose NLL is lost beyond one rate, and whose second layer loses two experts from another on.

    The first layer loses an expert for a while in every run.
    """
    path = write_study(
        tmp_path,
        mechanisms=["sa"],
        lrs=RATES,
        seeds=seeds,
        nll=lambda _, lr, seed: 2.0 + 0.001 * seed + (1.0 if lr > lost_beyond else 0.0),
    )
    study = load(path)
    rows = [
        {
            "run_id": run.run_id,
            "step": step,
            "block": f"blocks.{layer}",
            "expert_load_max": 1.5 + layer,
            "dead_experts": (2 if run.lr >= collapsed_from and step >= 120 else 0) if layer else int(step == 50),
            "router_entropy": 1.0 - 0.1 * layer,
        }
        for run in study.runs.itertuples()
        for step in range(10, 201, 10)
        for layer in range(2)
    ]
    rows += [{"run_id": run, "step": 10, "block": "model"} for run in study.runs["run_id"]]
    return replace(study, signals={"activations": pd.DataFrame(rows)})


def test_the_worst_layer_counts_and_a_passing_loss_of_an_expert_is_no_collapse(tmp_path):
    runs = read_routing(routed(tmp_path, lost_beyond=1e-1, collapsed_from=1e-2))
    assert len(runs) == 18 and set(runs["expert_load_max"]) == {2.5} and set(runs["router_entropy"]) == {0.9}
    for lr, own in runs.groupby("lr"):
        assert set(own["dead_experts"]) == {2 if lr >= 1e-2 else 0}
        assert (own["collapse"] == 120).all() if lr >= 1e-2 else own["collapse"].isna().all()


@pytest.mark.parametrize(
    ("dead", "low", "high"),
    [
        ([0, 0, 1, 2], -2, -1),
        ([0, 1, 0, 2], -1, 0),  # the last rate with all experts counts
        ([0, 0, 0, 0], 0, math.inf),
        ([1, 1, 2, 2], -math.inf, -3),
    ],
)
def test_collapse_lies_between_the_last_rate_with_all_experts_and_the_next(dead, low, high):
    assert bracket_collapse(pd.Series(dead, index=[1e-3, 1e-2, 1e-1, 1.0])) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    ("lost_beyond", "collapsed_from", "verdict", "text"),
    [
        (1e-1, 1e-2, "holds", "routing collapses 1.31 decades below the upper edge of the stable window"),
        (3e-3, 1e-1, "contradicted", "routing collapses 1.21 decades above"),
        (1e-2, 9.0, "contradicted", "routing collapses at no swept rate; the loss is lost at least 1.43 decades below"),
        (1e-2, 1e-1, "contradicted", "routing collapses 0.69 decades above"),  # at 3e-2 the loss alone is lost
        (1e-2, 3e-2, "unresolved", "routing collapses"),  # one bracket for both
        (9.0, 9.0, "undecided", "neither routing nor loss has an edge"),
    ],
)
def test_the_claim_is_judged_over_seeds_and_by_the_swept_rates(tmp_path, lost_beyond, collapsed_from, verdict, text):
    """The NLL rises by 1 between two rates, so its limit of +0.1 is a tenth of the way, in log10 of the rate."""
    claim = collapse_claim(routed(tmp_path, lost_beyond=lost_beyond, collapsed_from=collapsed_from), "sa")
    assert claim.verdict == verdict and text in claim.text, claim.text


def test_the_effect_and_its_interval_have_the_sign_of_the_words(tmp_path):
    above = collapse_claim(routed(tmp_path / "above", lost_beyond=3e-3, collapsed_from=1e-1), "sa")
    below = collapse_claim(routed(tmp_path / "below", lost_beyond=1e-1, collapsed_from=1e-2), "sa")
    assert above.effect == "+1.21 decades" and above.interval.startswith("95 %: +1.2") and "decades above" in above.text
    assert below.effect == "−1.31 decades" and below.interval.startswith("95 %: −1.3") and "decades below" in below.text


def test_the_difference_is_that_of_both_rates(tmp_path):
    found = compare_collapse(routed(tmp_path, lost_beyond=1e-1, collapsed_from=1e-2), "sa")
    share = np.array([(0.1 + 0.00005 * seed) for seed in range(3)])
    loss = -1 + share * math.log10(3)
    assert found.differences == pytest.approx(loss - (math.log10(3e-3) - 2) / 2, abs=1e-3)
    assert found.grid == (pytest.approx(1.0), pytest.approx(2.0))
    assert compare_collapse(routed(tmp_path, lost_beyond=1e-1, collapsed_from=1e-2, seeds=1), "sa").direction == 1


def test_the_section_has_a_row_for_each_rate_and_a_figure(tmp_path):
    study = routed(tmp_path, lost_beyond=1e-1, collapsed_from=1e-2)
    assert routing.applies(study)
    table = routing.table(study)
    assert [row[4].text for row in table.rows] == ["0", "0", "2", "2", "2", "2"]
    assert table.rows[0][6].text == "--" and (table.rows[3][6].text, table.rows[3][6].detail) == ("120", "3 of 3 seeds")
    (drawn,) = routing.figures(study).values()
    drawn.figure.savefig(io.BytesIO())
    assert len(drawn.figure.axes) == 3


def test_a_report_names_active_parameters_and_losses_that_are_smooth_in_pieces(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa", "sw"], lrs=RATES, seeds=2))
    runs = study.runs.assign(num_params=329_088.0)
    assert wording.count_parameters(runs) == "329 k parameters" and alpha.explain_pieces(study) == ""
    experts = runs.assign(idle_params=195_840.0, piecewise_smooth=np.where(runs["series"] == "sa", 1, np.nan))
    assert wording.count_parameters(experts) == "329 k parameters, 133 k of them active"
    assert "The loss of sa is piecewise smooth" in alpha.explain_pieces(replace(study, runs=experts))
    some = experts.assign(idle_params=experts["idle_params"].where(experts["series"] == "sa"))
    assert wording.count_parameters(some) == "329 k parameters, 133 k to 329 k of them active"


def test_a_study_without_experts_has_no_such_section(tmp_path):
    path = write_study(tmp_path, mechanisms=["sa"], lrs=RATES, seeds=1)
    study = load(path)
    assert not routing.applies(study)
    logged = pd.DataFrame([{"run_id": study.runs["run_id"].iloc[0], "step": 1, "expert_load_max": math.nan}])
    assert not routing.applies(replace(study, signals={"activations": logged}))
    assert routing.TITLE not in summary(path)
