"""First alarms, leads and false alarms against runs whose alarms are planted by hand."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, ttest_1samp

from analysis.claims import signals
from analysis.claims.judging import judge
from analysis.numbers.alarms import SIGNALS, _earned_leads, find_alarms, find_warnings, judge_signals, list_rows
from analysis.report import summary
from analysis.sections import alarms as section
from analysis.study.load import load
from tests.analysis.synthetic import write_study

NORM = SIGNALS[1]


def calm(number, size=0.01):
    """A signal that alternates around 1: its median is 1 or between, its scaled deviation about 1.5 times ``size``."""
    return [1 + size * (-1) ** place for place in range(number)]


def test_an_alarm_begins_where_a_signal_leaves_its_own_median():
    values = calm(60)
    values[30] = values[31] = 1.2
    assert np.flatnonzero(find_alarms(values)).tolist() == [30]
    assert not find_alarms(calm(60)).any()


def test_a_fall_is_no_alarm_and_the_first_rows_are_none():
    values = calm(60)
    values[30], values[5] = 0.2, 9.0
    assert not find_alarms(values).any()


def test_a_named_limit_and_a_number_that_is_not_finite_give_alarm_at_once():
    values = calm(6)
    values[2], values[4] = 60.0, math.inf
    assert np.flatnonzero(find_alarms(values, 50.0)).tolist() == [2, 4]
    assert np.flatnonzero(find_alarms(values)).tolist() == [4]
    assert not find_alarms([-math.inf if place % 3 else -5.0 for place in range(60)], -1.0).any()  # α_max / α, ∞ or 5


def test_alarms_are_those_of_a_slow_loop():
    draws = np.random.default_rng(1)
    values = (np.exp(draws.normal(0, 0.3, 400)) + 0.002 * np.arange(400)).tolist()
    flags = []
    for place, value in enumerate(values):
        seen = values[max(0, place - 50) : place]
        if len(seen) < 10:
            flags.append(False)
            continue
        middle = statistics.median(seen)
        spread = 1.4826 * statistics.median(abs(each - middle) for each in seen)
        flags.append(value > middle + 3 * spread)
    expected = [place for place in range(400) if flags[place] and not (place and flags[place - 1])]
    assert len(expected) > 5 and np.flatnonzero(find_alarms(values)).tolist() == expected


BREAK = 150  # the first step of a broken run's rise


def write_runs(folder, leads, false=0):
    """Three seeds at a rate that breaks and one that does not. A broken run's loss rises by 5 nats at `BREAK`, its
    gradient norm ``leads[seed]`` steps before (None: never); a sound run's norm rises ``false`` times alone."""
    status = {("sa", 1e-2, seed): ("diverged", "loss is nan at step 200") for seed in range(3)}
    study = write_study(
        folder, mechanisms=("sa",), lrs=(1e-3, 1e-2), seeds=3, nll=lambda *each: 2.0, statuses=status, curves=False
    )
    loaded, rows = load(study), []
    for run in loaded.runs.itertuples():
        loss, norm = calm(200), calm(200)
        if run.status == "diverged":
            loss[BREAK:] = [6.0] * (200 - BREAK)
            if leads[int(run.seed)] is not None:
                norm[BREAK - leads[int(run.seed)]] = 2.0
        for place in range(false):
            norm[40 + 20 * place] = 2.0
        rows += [
            {"run_id": run.run_id, "step": float(step + 1), "loss": loss[step], "grad_norm": norm[step]}
            for step in range(200)
        ]
    curves = pd.DataFrame(rows).assign(update_norm=np.nan, lr=1e-3, val_nll=np.nan)
    runs = loaded.runs.assign(num_steps=200.0)
    return replace(loaded, curves=curves, runs=runs)


def test_leads_run_from_the_first_alarm_in_time_to_the_onset(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    found = find_warnings(study, NORM)
    broken = found[found["broke"]]
    # smoothed over 20 steps, a rise of 5 nats exceeds 0.5 at its third step: 5 · (1 − 0.95³) = 0.71, 5 · (1 − 0.95²) = 0.49
    assert broken["onset"].tolist() == [BREAK + 3] * 3
    assert sorted(broken["lead"].dropna()) == [12.0, 32.0] and broken["lead"].isna().sum() == 1
    assert found[~found["broke"]]["alarms"].tolist() == [0.0] * 3


def test_signals_are_judged_by_warned_runs_leads_and_false_alarms(tmp_path):
    study = write_runs(tmp_path, [30, 10, None], false=5)
    by_name = {each.signal.name: each for each in judge_signals([study])}
    assert set(by_name) == {"training loss", "gradient norm"}  # the update norm was not logged
    norm, loss = by_name["gradient norm"], by_name["training loss"]
    assert (norm.broken, norm.runs) == (3, 3)
    assert loss.warned.value == 1.0 and loss.lead.value == 2.0 and loss.false.value == 0.0
    # the planted false alarms, at steps 41, 61, 81, 101 and 121, lie within 50 steps of the onset only from 103 on
    assert norm.warned.value == 1.0 and norm.lead.value == BREAK + 3 - 121
    assert norm.beyond_loss.value == norm.lead.value - loss.lead.value
    assert norm.false.value == pytest.approx(1000 * 5 / 200)
    assert (norm.warned.low, norm.warned.high) == pytest.approx(binomtest(3, 3).proportion_ci(method="exact"))
    assert norm.chance == pytest.approx(1 - math.exp(-25 * 50 / 1000))


def test_a_share_has_the_exact_interval_of_as_many_trials_as_units(tmp_path):
    warned = next(each for each in judge_signals([write_runs(tmp_path, [30, 10, None])]) if each.signal == NORM).warned
    assert warned.value == pytest.approx(2 / 3)
    assert (warned.low, warned.high) == pytest.approx(binomtest(2, 3).proportion_ci(method="exact"))


def test_a_run_that_breaks_before_it_has_a_median_is_left_out(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    few = study.curves.assign(grad_norm=study.curves["grad_norm"].where(study.curves["step"] % 20 == 0))
    found = find_warnings(replace(study, curves=few), NORM)
    assert found["broke"].sum() == 0 and len(found) == 3  # seven rows before the onset


def test_a_run_of_several_studies_counts_once(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    (one, *_), (two, *_) = judge_signals([study]), judge_signals([study, study])
    assert (one.broken, one.runs) == (two.broken, two.runs) == (3, 3)


def with_signals(study):
    """The norms as the largest attention logits of two layers, of which the second is the larger."""
    logs = study.curves.rename(columns={"grad_norm": "attention_logit_max"})[["run_id", "step", "attention_logit_max"]]
    small = logs.assign(attention_logit_max=0.1 * logs["attention_logit_max"])
    layers = pd.concat([small.assign(block="blocks.0"), logs.assign(block="blocks.1")])
    return replace(study, signals={"activations": layers})


def test_the_layer_nearest_to_an_alarm_counts(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, None]))
    signal = next(each for each in SIGNALS if each.column == "attention_logit_max")
    pd.testing.assert_series_equal(find_warnings(study, signal)["lead"], find_warnings(study, NORM)["lead"])
    assert set(list_rows(study, signal)["value"]) == set(study.curves["grad_norm"])
    low = replace(signal, sign=-1, limit=-3.0)
    assert set(list_rows(study, low)["value"]) == set(-0.1 * study.curves["grad_norm"])


def test_a_signal_may_be_a_quotient_whose_low_values_give_alarm(tmp_path):
    study = write_runs(tmp_path, [30, 10, None])
    edge = study.curves[["run_id", "step"]].assign(alpha=2e-3, alpha_max=2e-3 / study.curves["grad_norm"])
    logged = replace(study, signals={"edge": edge})
    ratio = next(each for each in SIGNALS if each.over)
    assert sorted(list_rows(logged, ratio)["value"]) == pytest.approx(sorted(-1 / study.curves["grad_norm"]))


def test_a_report_says_which_signal_warns(tmp_path):
    study = write_runs(tmp_path, [30, 10, 20])
    assert not section.applies(study)
    logged = with_signals(study)
    assert section.applies(logged)
    (said,) = section.sentences(logged)
    assert said.startswith(
        "3 runs broke, 3 did not. More often than by chance warn: training loss (100 %, by chance 0 %)"
    )
    assert said.endswith("The earliest is gradient norm, 22 steps before the onset (95 %: 12 to 32).")
    printed = summary(logged)
    assert "Which signal warns" in printed and "largest attention logit 50" in printed and said[:20] in printed
    assert section.figures(logged)["alarms"].figure.axes[0].get_xlabel() == "steps from the onset"


def test_runs_that_break_before_a_signal_can_be_judged_are_counted(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    early = {
        run for run, _ in zip(study.runs.loc[study.runs["status"] == "diverged", "run_id"], range(2), strict=False)
    }
    # the rise of two runs comes at step 9 instead
    losses = study.curves["loss"].mask(study.curves["run_id"].isin(early) & (study.curves["step"] > 8), 6.0)
    rare = study.curves["grad_norm"].where(study.curves["step"] % 20 == 0)
    some = replace(study, curves=study.curves.assign(loss=losses, grad_norm=rare))
    (said,) = section.sentences(some)
    assert said.startswith(
        "3 runs broke, 3 did not. 2 broke too early to judge, with at most 10 rows before. Logged too"
    )
    assert "rarely to be judged: gradient norm" in said
    last = (
        study.curves["loss"]
        .mask(study.curves["step"] > 8, 6.0)
        .where(study.curves["run_id"].isin(study.runs.loc[study.runs["status"] == "diverged", "run_id"]), 1.0)
    )
    (said,) = section.sentences(replace(study, curves=study.curves.assign(loss=last)))
    assert said == "3 runs broke, 3 did not. All broke too early to judge: no signal has more than 10 rows before."


def test_a_report_without_breaks_says_so(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, 20]))
    calm_runs = study.runs.assign(status="stable", reason="")
    flat = study.curves.assign(loss=1.0)
    sound = replace(study, runs=calm_runs, curves=flat)
    assert (
        section.sentences(sound) == ["No run broke by this rule: nothing to warn of."] and section.figures(sound) == {}
    )


@pytest.mark.parametrize(("leads", "verdict"), [((30, 20, 25), "holds"), ((-2, -2, -1), "contradicted")])
def test_a_signal_with_earlier_alarms_warns_before_the_loss(tmp_path, leads, verdict):
    """Three groups of one broken run each; the loss warns 2 steps before the onset, the norm as planted before the loss."""
    study = with_signals(write_runs(tmp_path, list(leads)))
    claim = next(each for each in signals.claims(study) if each.subject == "signal gradient norm")
    assert (claim.verdict, claim.n) == (verdict, 3)
    result = ttest_1samp(leads, 0)
    assert claim.p == pytest.approx(result.pvalue)
    assert claim.effect == f"{statistics.fmean(leads):+.1f} steps".replace("-", "−")
    low, high = result.confidence_interval()
    assert claim.interval == f"95 %: {low:+.1f} to {high:+.1f} steps".replace("-", "−")
    assert claim.subject in {each.subject for each in judge(study)}


def test_a_lead_that_false_alarms_would_have_is_not_earned(tmp_path):
    """By simulation: the first of alarms with 25 per 1,000 steps, within 50 steps before the onset."""
    draws = np.random.default_rng(0).exponential(1000 / 25, 400_000)
    by_chance = float(np.where(draws < 50, 50 - draws, 0.0).mean())
    frame = find_warnings(write_runs(tmp_path, [30, 10, None], false=5), NORM)
    earned = _earned_leads(frame)
    expected = frame.loc[frame["broke"], "lead"].fillna(0.0) - by_chance
    assert earned.tolist() == pytest.approx(expected.tolist(), abs=0.1)
    assert by_chance > 20


def test_a_study_whose_runs_all_broke_has_no_claim_on_signals(tmp_path):
    study = with_signals(write_runs(tmp_path, [30, 10, None]))
    broken = study.runs[study.runs["status"] == "diverged"]
    found = signals.claims(replace(study, runs=broken))
    assert {each.verdict for each in found} == {"not judged"} and "every run broke" in found[0].text


def test_a_study_without_logs_of_signals_has_no_claim_on_them(tmp_path):
    assert signals.claims(write_runs(tmp_path, [30, 10, None])) == []
