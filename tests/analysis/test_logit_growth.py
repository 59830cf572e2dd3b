"""The rate from which attention's largest logit passes a limit, and the edge during training, against made-up logs."""

import io
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from analysis.numbers.logit_growth import find_back_test, find_growths, find_passing, fit_passing, read_logits
from analysis.numbers.transfer import find_groups
from analysis.report import summary
from analysis.sections import attention_logits, training_edge
from analysis.study.load import load
from tests.analysis.synthetic import write_study
from tests.analysis.test_transfer import write_sizes


@pytest.mark.parametrize("log_lr", [-2.6, -2.0, -1.31])
def test_a_power_law_passes_its_limit_where_it_does(log_lr):
    """Interpolation in logarithms is exact for m = limit · (lr / lr₀)³."""
    rates = np.geomspace(1e-3, 1e-1, 5)
    found, spacing, reason = find_passing(rates, 1e4 * (rates / 10**log_lr) ** 3)
    assert (found, spacing, reason) == (pytest.approx(log_lr), pytest.approx(0.5), "")


@pytest.mark.parametrize(
    ("values", "log_lr", "why"),
    [
        ([10, 2e4, 10, 1e6], -1 + 3 / 5, ""),  # the last rate below counts
        ([10, 10, math.inf, math.inf], -1.5, ""),  # diverged: the middle
        ([10, 10, math.nan, 1e6], -2 + 2 * 3 / 5, ""),  # a rate without a result is none
        ([10, 20, 30, 1e4], math.nan, "below it at every rate"),
        ([2e4, 3e4, math.inf, math.inf], math.nan, "above it at every rate"),
        ([10, 2e4, 1e6, 50], math.nan, "above it at some rates, not at the largest"),
        ([math.nan] * 4, math.nan, "not logged"),
    ],
)
def test_the_last_rate_below_the_limit_and_the_next_enclose_it(values, log_lr, why):
    found, _, reason = find_passing([1e-3, 1e-2, 1e-1, 1.0], values)
    assert (found, reason) == (pytest.approx(log_lr, nan_ok=True), why)


def log_activations(study, logit):
    """The study with 20 rows a run and two layers; ``logit(run)`` is the larger layer's at the end."""
    rows = [
        {"run_id": run.run_id, "step": step, "block": f"blocks.{layer}", "attention_logit_max": value}
        for run in study.runs.itertuples()
        for step in range(10, 201, 10)
        for layer, value in enumerate((5.0, logit(run) if step > 150 else 20.0))
    ]
    return replace(study, signals={"activations": pd.DataFrame(rows)})


WIDE = ("model.width=[64,128,256,512]",)


def width_of(run):
    return float(run.model.rpartition("=")[2])


def test_the_law_of_the_rates_of_passing_is_found_tried_and_extrapolated(tmp_path):
    """The logit is 10⁴ at 1e-2 for width 64, and at a rate 0.2 decades lower with each doubling."""

    def logit(run):
        log_lr = -2 - 0.2 * math.log2(width_of(run) / 64) + 0.03 * (run.seed - 1)
        return 1e4 * (run.lr / 10**log_lr) ** 4

    study = log_activations(write_sizes(tmp_path, *WIDE), logit)
    (group,) = find_groups([study])
    found = find_growths(group)
    assert [each.size[0] for each in found] == [64, 128, 256, 512]
    assert [each.log_lr for each in found] == pytest.approx([-2, -2.2, -2.4, -2.6])
    spread = math.sqrt(0.03**2 / 3 + math.log10(2) ** 2 / 12)
    assert [each.error for each in found] == pytest.approx([spread] * 4)
    law, tried = fit_passing(found), find_back_test(found)
    assert law is not None and law.slope(0)[0] == pytest.approx(-0.2)
    assert law.predict((1024.0, *found[0].size[1:]))[0] == pytest.approx(-2.8)
    assert tried is not None and tried.size[0] == 512
    assert tried.said == pytest.approx(-2.6) and tried.error == pytest.approx(0, abs=1e-9)
    assert tried.neighbour == pytest.approx(-2.4)
    table = attention_logits.table(study)
    assert [row[1].text for row in table.rows] == ["1.0e-2", "6.3e-3", "4.0e-3", "2.5e-3", "1.6e-3"]
    assert table.rows[-1][0].text == "width 1,024, predicted" and " to " in table.rows[-1][1].detail
    assert table.caption.endswith(" Predicted: by the law of the sizes above, with its 80 % interval.")
    (sentence,) = attention_logits.sentences(study)
    assert "changes by -0.20 decades (80 %: " in sentence and "doubling of width" in sentence
    assert "the smaller sizes say 2.5e-3 for width 512, and it is 2.5e-3 (+0.00 decades; " in sentence
    assert set(attention_logits.figures(study)) == {"attention-logits"}


def test_a_back_test_knows_nothing_of_the_largest_size(tmp_path):
    def logit(run):
        log_lr = -1.2 if width_of(run) == 512 else -2 - 0.2 * math.log2(width_of(run) / 64)
        return 1e4 * (run.lr / 10**log_lr) ** 4

    study = log_activations(write_sizes(tmp_path, *WIDE), logit)
    tried = find_back_test(find_growths(find_groups([study])[0]))
    assert tried is not None and tried.said == pytest.approx(-2.6) and tried.found == pytest.approx(-1.2)


def test_logits_that_stay_small_have_no_rate_of_passing_and_no_law(tmp_path):
    study = log_activations(write_sizes(tmp_path, *WIDE), lambda run: 30.0 if width_of(run) == 64 else 1e8 * run.lr**2)
    found = find_growths(find_groups([study])[0])
    assert found[0].reason == "below it at every rate" and math.isnan(found[0].log_lr)
    assert not found[1].reason and fit_passing(found) is None
    table = attention_logits.table(study)
    assert table.rows[0][1].detail == "below it at every rate" and "Predicted" not in table.caption
    assert attention_logits.sentences(study) == []
    for each in (study, log_activations(study, lambda run: 30.0)):  # some sizes pass, none passes
        attention_logits.figures(each)["attention-logits"].figure.savefig(io.BytesIO(), format="pdf")


def test_the_late_median_of_the_largest_layer_counts_and_a_diverged_run_is_infinite(tmp_path):
    status = {("sa", 1e-2, 0): ("diverged", "loss is nan at step 200")}
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=2, statuses=status))
    values = read_logits(log_activations(study, lambda run: 100.0 + run.seed), "sa")
    assert values.to_dict() == {0: {1e-3: 100.0, 1e-2: math.inf}, 1: {1e-3: 101.0, 1e-2: 101.0}}


def log_edge(study, of_step):
    """The study with α / α_max of ``of_step(run)`` in its later half, a hundredth before, and Adam's ratio half of it."""
    rows = [
        {"run_id": run.run_id, "step": step, "alpha": 1e-3, "alpha_max": 1e-3 / ratio, "adam_ratio": ratio / 2}
        | {"curvature": 1.0}
        for run in study.runs.itertuples()
        for step in range(20, int(run.num_steps) + 1, 20)
        for ratio in [of_step(run) * (1.0 if step >= run.num_steps / 2 else 0.01)]
    ]
    return replace(study, signals={"edge": pd.DataFrame(rows)})


def test_the_lowest_rate_beyond_the_edge_is_that_of_the_late_medians_over_seeds(tmp_path):
    status = {("sw", 3e-2, seed): ("diverged", "loss is nan at step 9") for seed in range(3)}
    study = load(write_study(tmp_path, mechanisms=["sa", "sw"], lrs=[1e-3, 1e-2, 3e-2], seeds=3, statuses=status))
    ratios = {1e-3: [0.1, 0.2, 5.0], 1e-2: [0.5, 1.5, 1.2], 3e-2: [9.0, 9.0, 0.1]}
    logged = log_edge(study, lambda run: ratios[run.lr][int(run.seed)])
    table = training_edge.table(logged)
    assert table.header == ("mechanism", "upper edge", "α / α_max > 1", "Adam’s sharpness over its threshold > 1")
    assert [(cell.text, cell.detail) for cell in table.rows[0][2:]] == [("1e-2", "1.2"), ("3e-2", "4.5")]
    assert table.rows[1][2] == table.rows[0][2]
    figures = training_edge.figures(logged)
    assert set(figures) == {"training-edge"}
    axes = figures["training-edge"].figure.axes
    assert [ax.get_ylabel().replace("\n", " ") for ax in axes[:2]] == [
        "α / $\\alpha_\\mathrm{max}$", "Adam’s sharpness over its threshold",
    ]  # fmt: skip
    assert {ax.get_xlabel() for ax in axes[-2:]} == {"step"}
    assert (
        "lower bound" in figures["training-edge"].caption and "below Lanczos' value" in figures["training-edge"].caption
    )


def test_a_run_that_diverged_before_the_later_half_is_beyond_the_edge(tmp_path):
    status = {("sa", 1e-2, seed): ("diverged", "loss is nan at step 60") for seed in range(3)}
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=3, statuses=status))
    edge = log_edge(study, lambda run: 0.1).signals["edge"]
    diverged = set(study.runs.loc[study.runs["lr"] == 1e-2, "run_id"])
    early = edge[(edge["step"] < 60) | ~edge["run_id"].isin(diverged)]
    logged = replace(study, signals={"edge": early})
    (row,) = training_edge.table(logged).rows
    assert (row[2].text, row[2].detail) == ("1e-2", "diverged")


def test_a_step_without_positive_curvature_is_far_from_the_edge(tmp_path):
    """It counts as 0: with two of three late steps so, the median is 0, whatever the third one is."""
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=3))
    edge = log_edge(study, lambda run: 9.0).signals["edge"]
    flat = edge["step"] % 60 != 0
    downward = edge.assign(
        curvature=edge["curvature"].mask(flat, -1.0), alpha_max=edge["alpha_max"].mask(flat, math.nan)
    )
    (row,) = training_edge.table(replace(study, signals={"edge": downward})).rows
    assert (row[2].text, row[2].detail) == ("none", "0")


def test_without_adam_there_is_one_ratio(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2], seeds=3))
    edge = log_edge(study, lambda run: 0.1).signals["edge"]
    calm = replace(study, signals={"edge": edge.assign(adam_ratio=math.nan)})
    (row,) = training_edge.table(calm).rows
    assert len(row) == 3 and row[2].text == "none" and row[2].detail == "0.1"


def test_a_report_has_both_sections(tmp_path):
    study = load(write_study(tmp_path, mechanisms=["sa"], lrs=[1e-3, 1e-2, 1e-1], seeds=3))
    signals = log_edge(study, lambda run: run.lr * 30).signals | log_activations(study, lambda run: 50.0).signals
    text = summary(replace(study, signals=signals))
    assert training_edge.TITLE in text and attention_logits.TITLE in text
    without = summary(study)
    assert training_edge.TITLE not in without and attention_logits.TITLE not in without


def test_where_the_ratio_passes_1_is_compared_with_the_end_of_the_window(tmp_path):
    """Both windows end between 3e-3 and 1e-2; sa's ratio passes 1 at 1e-2, sw's at 3e-2."""
    lrs = [1e-3, 3e-3, 1e-2, 3e-2]
    study = load(
        write_study(
            tmp_path, mechanisms=["sa", "sw"], lrs=lrs, seeds=3, nll=lambda name, lr, seed: 2.0 if lr < 5e-3 else 3.0
        )
    )
    logged = log_edge(study, lambda run: 1.5 if run.lr > (5e-3 if run.mechanism == "sa" else 2e-2) else 0.5)
    assert training_edge.sentences(logged) == [
        "1 of 2 curves with a window have α / α_max above 1 first at the first swept rate beyond it.",
        "0 of 2 curves with a window have Adam’s sharpness over its threshold above 1 first at the first swept rate "
        "beyond it.",
    ]
    alone = load(
        write_study(
            tmp_path / "alone",
            mechanisms=["sa"],
            lrs=lrs,
            seeds=3,
            nll=lambda name, lr, seed: 2.0 if lr < 5e-3 else 3.0,
        )
    )
    said = training_edge.sentences(log_edge(alone, lambda run: 1.5 if run.lr > 5e-3 else 0.5))
    assert said[0] == "1 of 1 curve with a window has α / α_max above 1 first at the first swept rate beyond it."
